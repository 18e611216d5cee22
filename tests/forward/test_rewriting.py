"""A forward rewritten as a tree: recovered, changed in place, compiled in the original's place."""

import ast
import doctest
import inspect
import itertools
import linecache
import traceback

import pytest
import torch
import torch.nn as nn
from hypothesis import given, settings
from hypothesis import strategies as st

import fusekit.forward.rewriting
from fusekit.errors import FusekitError
from fusekit.forward import (
    NoSource,
    block_chain,
    bypass_existence_guard,
    compile_forward,
    in_boolean_context,
    recover_forward,
    replace_expr,
    self_call_and_refs,
    single_self_call,
    source,
)

X = torch.tensor([1.0, 2.0])


def forward_of(*lines: str, parameters: str = "self, x, y=None") -> ast.FunctionDef:
    return ast.parse(f"def forward({parameters}):\n" + "".join(f"    {line}\n" for line in lines)).body[0]


def find(tree: ast.AST, text: str) -> ast.expr:
    """The only expression of a tree that reads `text`."""
    found = [node for node in ast.walk(tree) if isinstance(node, ast.expr) and ast.unparse(node) == text]
    assert len(found) == 1
    return found[0]


def change(tree: ast.AST, old: str, new: str) -> None:
    replace_expr(tree, find(tree, old), ast.parse(new, mode="eval").body)


def test_examples_of_the_docstrings():
    assert doctest.testmod(fusekit.forward.rewriting) == (0, 21)


# -- recover_forward --------------------------------------------------------------------------

DECORATED = """
def double(f):
    @functools.wraps(f)
    def wrapper(self, *args, **kwargs):
        return f(self, *args, **kwargs) * 2
    return wrapper

class A(nn.Module):
    @double
    @double
    def forward(self, x: torch.Tensor, *rest: int, scale: float = 3.0, **more: str) -> torch.Tensor:
        y: torch.Tensor = x * scale
        return y
"""


def test_recovered_tree_has_no_decorators_and_no_annotations_in_the_signature(load):
    a = load(DECORATED).A
    forward, fn = recover_forward(a)
    assert fn is a.forward and forward.decorator_list == []
    assert ast.unparse(forward).splitlines()[0] == "def forward(self, x, *rest, scale=3.0, **more):"


def test_a_class_and_an_instance_give_the_same(load):
    a = load(DECORATED).A
    (one, f), (two, g) = recover_forward(a), recover_forward(a())
    assert ast.dump(one) == ast.dump(two) and f is g


def test_recovered_tree_is_a_copy(load):
    a = load(DECORATED).A
    forward, _ = recover_forward(a)
    forward.body.clear()
    assert recover_forward(a)[0].body and source(a()).tree.decorator_list


def test_no_plain_source_is_said(load):
    namespace = {"nn": nn}
    exec("class A(nn.Module):\n    def forward(self, x):\n        return x\n", namespace)
    with pytest.raises(NoSource, match="no source text"):
        recover_forward(namespace["A"])
    own = load(DECORATED).A()
    own.forward = lambda x: x
    with pytest.raises(NoSource, match="of its own on the instance"):
        recover_forward(own)
    for without in (nn.Module, nn.ModuleList, nn.Module(), int):
        with pytest.raises(NoSource, match="no forward of its own"):
            recover_forward(without)


def test_edited_file_is_refused(load):
    module = load("class A(nn.Module):\n    def forward(self, x):\n        return x\n")
    with open(module.__file__) as file:
        text = file.read()
    with open(module.__file__, "w") as file:
        file.write(text.replace("return x", "return -x  # and more"))
    with pytest.raises(NoSource, match="no longer what"):
        recover_forward(module.A)


def test_what_is_no_module_is_said():
    with pytest.raises(FusekitError, match="takes a module's class or an instance, not str"):
        recover_forward("A")


# -- compile_forward --------------------------------------------------------------------------


def test_rewritten_function_runs_in_the_originals_place(load):
    module = load(
        """
        OFFSET = 1.0
        def build(k):
            class Base(nn.Module):
                def forward(self, x):
                    return x + OFFSET
            class A(Base):
                __factor = 5.0
                def forward(self, x, *, scale=2.0):
                    '''What it does,
                on two lines.'''
                    return super().forward(x) * scale * k * self.__factor
            def set_k(new):
                nonlocal k
                k = new
            return A(), set_k
        """
    )
    a, set_k = module.build(3.0)
    forward, fn = recover_forward(a)
    change(forward, "super().forward(x)", "-super().forward(x)")
    made = compile_forward(forward, fn).__get__(a)
    assert torch.equal(made(X), -(X + 1) * 2 * 3 * 5)
    assert torch.equal(a(X), (X + 1) * 2 * 3 * 5)
    set_k(1.0)
    module.OFFSET = 0.0
    assert torch.equal(made(X, scale=1.0), -X * 5)
    assert made.__doc__ == a.forward.__doc__ and made.__func__.__kwdefaults__ == {"scale": 2.0}


def test_decorators_stay_around_the_rewritten_forward(load):
    a = load(DECORATED).A()
    forward, fn = recover_forward(a)
    change(forward, "x * scale", "x + scale")
    made = compile_forward(forward, fn)
    assert torch.equal(made(a, X), (X + 3) * 4)
    assert torch.equal(a(X), X * 3 * 4)
    assert inspect.signature(made) == inspect.signature(fn)


def test_the_forward_of_the_class_and_not_another_in_the_wrapper_is_rewritten(load):
    module = load(
        """
        class Other(nn.Module):
            def forward(self, x):
                return x * 100
        def with_fallback(other):
            def decorate(f):
                @functools.wraps(f)
                def wrapper(self, x):
                    return f(self, x) + other(self, x)
                return wrapper
            return decorate
        class A(nn.Module):
            @with_fallback(Other.forward)
            def forward(self, x):
                return x
        """
    )
    a = module.A()
    forward, fn = recover_forward(a)
    change(forward, "x", "-x")
    assert torch.equal(compile_forward(forward, fn)(a, X), -X + X * 100)


def test_inspect_and_tracebacks_show_the_text_that_runs(load):
    a = load(DECORATED).A()
    forward, fn = recover_forward(a)
    change(forward, "x * scale", "x * scale + missing_name")
    made = compile_forward(forward, fn)
    shown = inspect.getsource(made)
    assert "y: torch.Tensor = x * scale + missing_name" in shown and shown.count("@double") == 2
    assert inspect.getsource(a.forward).count("missing_name") == 0
    with pytest.raises(NameError) as caught:
        made(a, X)
    last = traceback.extract_tb(caught.value.__traceback__)[-1]
    assert last.line == "y: torch.Tensor = x * scale + missing_name"
    assert last.filename.startswith("<fusekit A.forward ")


def test_rewritten_forward_can_be_recovered_and_rewritten_again(load):
    a = load(DECORATED).A
    forward, fn = recover_forward(a)
    change(forward, "x * scale", "x + scale")
    a.forward = compile_forward(forward, fn)
    forward, fn = recover_forward(a)
    change(forward, "x + scale", "x - scale")
    assert torch.equal(compile_forward(forward, fn)(a(), X), (X - 3) * 4)


def test_strings_over_several_lines_keep_their_text(load):
    a = load(
        '''
        class A(nn.Module):
            def forward(self, x):
                """One
            two
                  three"""
                name = f"""a
        b{x}"""
                return name
        '''
    ).A
    forward, fn = recover_forward(a)
    made = compile_forward(forward, fn)
    assert made(a(), 1) == a.forward(a(), 1)
    assert made.__code__.co_consts[0] == a.forward.__code__.co_consts[0]


@pytest.mark.parametrize(
    "text",
    [
        "\tdef forward(self, x):\n\t\tif x:\n\t\t\treturn x\n\tdef after(self): return 1\n",
        "  def forward(self, x): y = x; return y\n  def after(self): return 1\n",
        "  if 1:\n   def forward(self,\n x):\n    return x  # why\n  def after(self): return 1",
        " def forward(self, é): return é\n def after(self): return 1",
        " def forward(self, x):\r\n  return x\r\n def after(self): return 1\r\n",
    ],
)
def test_layouts_of_files(load, text):
    a = load(f"import torch.nn as nn\nclass A(nn.Module):\n{text}".encode()).A
    forward, fn = recover_forward(a)
    forward.body.insert(0, ast.parse("self.seen = 1").body[0])
    made = compile_forward(forward, fn)
    module = a()
    assert made(module, 3) == 3 and module.seen == 1
    lines, first = inspect.getsourcelines(made)
    assert lines[1].strip() == "self.seen = 1" and first == inspect.getsourcelines(a.forward)[1]
    file = "".join(linecache.getlines(made.__code__.co_filename))
    assert file.startswith("import torch.nn as nn\n") and file.rstrip().endswith("def after(self): return 1")


def test_negative_constants_keep_their_value():
    forward, fn = recover_forward(nn.Identity)
    forward.body = [ast.Return(ast.BinOp(ast.Constant(-3), ast.Pow(), ast.Constant(2)))]
    assert compile_forward(forward, fn)(nn.Identity(), 0) == 9


def test_tree_given_is_left_as_it_is():
    forward, fn = recover_forward(nn.Identity)
    forward.body = [ast.Return(ast.Constant(-3))]
    before = ast.dump(forward)
    compile_forward(forward, fn)
    assert ast.dump(forward) == before


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda f: f.args.args.append(ast.arg("more")), "parameters or defaults"),
        (lambda f: setattr(f.args.args[1], "arg", "other"), "parameters or defaults"),
        (lambda f: f.args.kw_defaults.__setitem__(0, ast.Constant(4.0)), "parameters or defaults"),
        (lambda f: setattr(f, "name", "other"), "renamed to other"),
        (lambda f: f.decorator_list.append(ast.Name("double", ast.Load())), "carries decorators"),
        (lambda f: f.body.clear(), "is no Python|incomplete"),
        (lambda f: f.body.insert(0, ast.Break()), "is no Python"),
        (lambda f: f.body.insert(0, ast.Expr(ast.Call(ast.Name("f"), []))), "is incomplete"),
        (lambda f: f.body.insert(0, ast.Expr(ast.Constant((1, (2,))))), "another tree"),
        (lambda f: f.body.insert(0, ast.Expr(ast.Name("a b", ast.Load()))), "is no Python|incomplete"),
        (lambda f: f.body.insert(0, ast.Expr(ast.Name("a.b", ast.Load()))), "another tree"),
    ],
)
def test_what_cannot_be_compiled_is_said(load, change, message):
    forward, fn = recover_forward(load(DECORATED).A)
    change(forward)
    with pytest.raises(FusekitError, match=message):
        compile_forward(forward, fn)


def test_a_function_of_elsewhere_is_said():
    forward, _ = recover_forward(nn.Identity)
    with pytest.raises(FusekitError, match="that recover_forward\\(\\) gave"):
        compile_forward(forward, lambda self, x: x)
    _, fn = recover_forward(nn.Identity)
    with pytest.raises(FusekitError, match=r"takes an ast\.FunctionDef, not Module"):
        compile_forward(ast.parse("pass"), fn)


OPERANDS = ["x", "y", "self.k", "2.0", "-1.5"]
LEAVES = st.sampled_from(OPERANDS)
EXPRESSIONS = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.builds("({} + {})".format, inner, inner),
        st.builds("({} * -{})".format, inner, inner),
        st.builds("({} if {} < 0.5 else {})".format, inner, inner, inner),
        st.builds("[{}, {}][0]".format, inner, inner),
        st.builds("(lambda t: t - {})({})".format, inner, inner),
        st.builds("sum([t + {} for t in ({}, {})])".format, inner, inner, inner),
    ),
    max_leaves=8,
)
STATEMENTS = st.one_of(
    st.builds("x = {}\n".format, EXPRESSIONS),
    st.builds("if {} < y:\n    y = {}\nelse:\n    x, y = y, {}\n".format, LEAVES, EXPRESSIONS, EXPRESSIONS),
    st.builds("for y in ({}, {}):\n    x = x + y\n".format, EXPRESSIONS, EXPRESSIONS),
    st.builds("try:\n    y = {}\nfinally:\n    x = {}\n".format, EXPRESSIONS, EXPRESSIONS),
    st.builds("'a\\\n  b'; y = {}\n".format, EXPRESSIONS),
    st.builds("'''a\n  b'''\ny = {}\n".format, EXPRESSIONS),
    st.builds("match {}:\n    case float(x) | x: pass\n".format, EXPRESSIONS),
)
FIXTURES = settings(deadline=None, max_examples=60, database=None)
_cells = iter(range(10**9))


def class_of(body: str):
    """A class in a notebook cell of its own whose forward has this body."""
    lines = [f"        {line}" for line in body.splitlines()]
    text = "class A(nn.Module):\n    k = 0.5\n    def forward(self, x, y=1.0):\n" + "\n".join(lines) + "\n"
    name = f"/tmp/ipykernel_2/{next(_cells)}.py"
    linecache.cache[name] = (len(text), None, text.splitlines(True), name)
    namespace = {"nn": nn}
    exec(compile(text, name, "exec"), namespace)
    return namespace["A"]


def outcome(function, *args):
    try:
        return repr(function(*args))
    except RecursionError:
        raise
    except Exception as error:
        return type(error).__name__


@FIXTURES
@given(st.lists(STATEMENTS, max_size=5), st.floats(-3, 3))
def test_recovered_and_compiled_forward_computes_the_same(statements, value):
    a = class_of("".join(statements) + "return x, y")
    made = compile_forward(*recover_forward(a))
    assert made is not a.forward
    assert outcome(made, a(), value) == outcome(a.forward, a(), value)


# -- replace_expr -----------------------------------------------------------------------------


def test_replaces_by_identity_and_not_by_equality():
    tree = ast.parse("f(x, x, y=x)", mode="eval")
    assert ast.unparse(replace_expr(tree, tree.body.args[1], ast.Name("z", ast.Load()))) == "f(x, z, y=x)"
    equal = ast.Name("x", ast.Load())
    with pytest.raises(FusekitError, match="stands in the tree 0 times"):
        replace_expr(tree, equal, ast.Name("z", ast.Load()))


def test_the_tree_itself_and_what_holds_the_old_one():
    old = ast.parse("x + 1", mode="eval").body
    new = ast.Call(ast.Name("f", ast.Load()), [old], [])
    assert replace_expr(old, old, new) is new
    tree = ast.parse("y * g(x)", mode="eval")
    call = tree.body.right
    replace_expr(tree, call, ast.Call(ast.Name("f", ast.Load()), [call], []))
    assert ast.unparse(tree) == "y * f(g(x))"
    compile(tree, "here", "eval")


def test_an_expression_at_two_places_is_not_replaced():
    shared = ast.Name("x", ast.Load())
    tree = ast.Tuple([shared, shared], ast.Load())
    with pytest.raises(FusekitError, match="2 times"):
        replace_expr(tree, shared, ast.Name("y", ast.Load()))
    assert ast.unparse(tree) == "(x, x)"


def test_targets_stay_targets():
    tree = ast.parse("x = 1")
    replace_expr(tree, tree.body[0].targets[0], ast.parse("o.a", mode="eval").body)
    exec(compile(tree, "here", "exec"), {"o": nn.Module()})
    with pytest.raises(FusekitError, match=r"o\.a is stored to, and f\(\) cannot be"):
        replace_expr(tree, tree.body[0].targets[0], ast.parse("f()", mode="eval").body)


@FIXTURES
@given(EXPRESSIONS, st.data())
def test_replacing_changes_exactly_one_place(text, data):
    tree = ast.parse(text, mode="eval")
    every = [node for node in ast.walk(tree) if isinstance(node, ast.expr)]
    old = data.draw(
        st.sampled_from([node for node in every if isinstance(getattr(node, "ctx", ast.Load()), ast.Load)])
    )
    kept = [node for node in every if node not in ast.walk(old)]
    dumps = [ast.dump(node) for node in kept if not any(child is old for child in ast.walk(node))]
    count = sum(ast.unparse(node) == "new_name" for node in every)
    new = ast.Name("new_name", ast.Load())
    done = replace_expr(tree, old, new)
    after = list(ast.walk(done))
    assert old not in after and after.count(new) == 1 and count == 0
    assert all(any(node is other for other in after) for node in kept)
    left = [ast.dump(node) for node in kept if not any(child is new for child in ast.walk(node))]
    assert left == dumps


# -- block_chain ------------------------------------------------------------------------------

BLOCKS = """
if a0:
    a1
elif a2:
    a3
else:
    a4
for b0 in b1:
    b2
else:
    b3
while c0:
    c1
try:
    d0
except d1:
    d2
else:
    d3
finally:
    d4
with e0 as e1:
    e2
match f0:
    case f1.x if f2:
        f3
    case _:
        f4
def g0(g1=g2):
    g3
class h0(h1):
    h2
try:
    i0
except* i1:
    i2
"""


def names_of(statement):
    return {node.id: node for node in ast.walk(statement) if isinstance(node, ast.Name)}


def test_chain_goes_through_every_kind_of_nested_block():
    body = ast.parse(BLOCKS).body
    nodes = {name: node for statement in body for name, node in names_of(statement).items()}
    one, two, three, four, five, six, seven, eight, nine = body
    inner = {
        "a1": one.body, "a3": one.orelse[0].body, "a4": one.orelse[0].orelse,
        "b2": two.body, "b3": two.orelse, "c1": three.body,
        "d0": four.body, "d2": four.handlers[0].body, "d3": four.orelse, "d4": four.finalbody,
        "e2": five.body, "f3": six.cases[0].body, "f4": six.cases[1].body,
        "g3": seven.body, "h2": eight.body, "i0": nine.body, "i2": nine.handlers[0].body,
    }  # fmt: skip
    for name, block in inner.items():
        chain = block_chain(body, nodes[name])
        assert chain[-1][0] is block and chain[-1][1] == 0
        assert chain[0][0] is body and name in names_of(body[chain[0][1]])
    outer = {"a0": 0, "a2": 0, "b0": 1, "b1": 1, "c0": 2, "d1": 3, "e0": 4, "e1": 4, "f0": 5, "f1": 5}
    outer |= {"f2": 5, "g2": 6, "h1": 7, "i1": 8}
    assert len(inner) + len(outer) == len(nodes)
    for name, index in outer.items():
        chain = block_chain(body, nodes[name])
        if name == "a2":
            assert [at for _, at in chain] == [0, 0] and chain[1][0] is one.orelse
        else:
            assert [at for _, at in chain] == [index] and chain[0][0] is body


def test_chain_of_a_statement_and_of_parts_that_are_no_expressions():
    body = ast.parse("if a:\n    pass\n    for b in c: f(d=e)").body
    loop = body[0].body[1]
    assert [at for _, at in block_chain(body, loop)] == [0, 1]
    assert [at for _, at in block_chain(body, loop.body[0].value.keywords[0])] == [0, 1, 0]
    with pytest.raises(FusekitError, match="does not stand in the block"):
        block_chain(body, ast.Name("d", ast.Load()))


SIMPLE = st.sampled_from(["n()", "n(n)", "pass"])
BODIES = st.recursive(
    st.lists(SIMPLE, min_size=1, max_size=3),
    lambda inner: st.lists(
        st.one_of(
            SIMPLE,
            st.tuples(
                st.sampled_from([["if n:", "else:"], ["try:", "finally:"], ["while n:"]]), inner, inner
            ),
        ),
        min_size=1,
        max_size=3,
    ),
    max_leaves=10,
)


def written(body, indent=""):
    for part in body:
        if isinstance(part, str):
            yield indent + part
        else:
            heads, *blocks = part
            for head, block in zip(heads, blocks):
                yield indent + head
                yield from written(block, indent + " ")


@FIXTURES
@given(BODIES, st.data())
def test_last_block_that_all_chains_go_through_dominates(body, data):
    """It holds all the nodes, and no block nested in it does."""
    body = ast.parse("\n".join(written(body))).body
    nodes = [
        node for statement in body for node in ast.walk(statement) if isinstance(node, (ast.Name, ast.stmt))
    ]
    chosen = data.draw(st.lists(st.sampled_from(nodes), min_size=1, max_size=4))
    chains = [block_chain(body, node) for node in chosen]
    for chain, node in zip(chains, chosen):
        assert any(part is node for part in ast.walk(chain[-1][0][chain[-1][1]]))
        for (outer, at), (inner, _) in itertools.pairwise(chain):
            assert any(getattr(outer[at], name, None) is inner for name in ("body", "orelse", "finalbody"))
    common = [steps[0][0] for steps in zip(*chains) if all(step[0] is steps[0][0] for step in steps)]

    def holds_all(block):
        inside = [part for statement in block for part in ast.walk(statement)]
        return all(any(part is node for part in inside) for node in chosen)

    every = [body, *(block for node in nodes if isinstance(node, ast.stmt) for block in nested(node))]
    assert [block for block in every if holds_all(block)][-1] is common[-1]


def nested(statement):
    blocks = (getattr(statement, name, None) for name in ("body", "orelse", "finalbody"))
    return [block for block in blocks if block]


# -- the call of a submodule ------------------------------------------------------------------


def refs_of(*lines, name="q"):
    call, refs = self_call_and_refs(forward_of(*lines), name)
    return ast.unparse(call), [ast.unparse(ref) for ref in refs]


def test_the_one_call_and_the_other_references():
    assert refs_of("return self.q(x)") == ("self.q(x)", [])
    assert refs_of("if self.q is None: return x", "return self.q(x)") == ("self.q(x)", ["self.q"])
    assert refs_of("self.q = f(self.q.weight)", "return self.q(x + 1)") == ("self.q(x + 1)", ["self.q"] * 2)


@pytest.mark.parametrize(
    "call", ["self.q()", "self.q(x, y)", "self.q(*x)", "self.q(x, scale=2)", "self.q(input=x)", "self.q(**x)"]
)
def test_a_call_counts_only_with_one_plain_argument(call):
    with pytest.raises(FusekitError, match=r"self\.q is called 0 times"):
        self_call_and_refs(forward_of(f"return {call}"), "q")
    assert refs_of(f"return {call} + self.q(y)") == ("self.q(y)", ["self.q"])


def test_unless_there_is_exactly_one_call_it_raises():
    with pytest.raises(FusekitError, match=r"self\.k is called 0 times"):
        self_call_and_refs(forward_of("return self.q(x)"), "k")
    with pytest.raises(FusekitError, match=r"2 times.*line 2: self.q\(x\); line 3: self.q\(y\)"):
        self_call_and_refs(forward_of("x = self.q(x)", "return self.q(y)"), "q")


@pytest.mark.parametrize(
    ("line", "ref"),
    [
        ("getattr(self, 'q')", "getattr(self, 'q')"),
        ("hasattr(self, name)", "hasattr(self, name)"),
        ("setattr(self, 'q', 1)", "setattr(self, 'q', 1)"),
        ("m = self; z = m.q(x)", "m.q"),
        ("z = (m := self).q; m.q", "m.q"),
        ("z, (m, _) = x, [self, y]; n = m; n.q", "n.q"),
        ("self.__dict__['q']", "self.__dict__"),
        ("self._modules['q']", "self._modules"),
        ("del self.q", "self.q"),
        ("f(lambda: self.q)", "self.q"),
    ],
)
def test_references_in_other_guise(line, ref):
    assert refs_of(line, "return self.q(x)")[1][-1] == ref


def test_what_is_no_reference():
    line = "getattr(self, 'k'); getattr(y, 'q'); self.inner.q; y.q(x); q = self.k; self._modules_of"
    assert refs_of(line, "return self.q(x)") == ("self.q(x)", [])


def test_a_path():
    assert refs_of("return self.inner.d(x)", name="inner.d") == ("self.inner.d(x)", [])
    lines = ("inner = self.inner", "self.inner(x)", "getattr(self.inner, 'd')", "return self.inner.d(x)")
    assert refs_of(*lines, name="inner.d")[1] == ["self.inner"] * 2 + [
        "getattr(self.inner, 'd')",
        "self.inner",
    ]


@pytest.mark.parametrize(
    "line", ["self = y", "f(lambda self: self.q)", "[self.q for self in y]", "for self in y: pass"]
)
def test_a_self_that_is_stored_again_is_said(line):
    with pytest.raises(FusekitError, match="self is stored again"):
        self_call_and_refs(forward_of(line, "return self.q(x)"), "q")


def test_the_first_parameter_is_the_module():
    call, refs = self_call_and_refs(forward_of("return me.q(self.q(x))", parameters="me, self, x"), "q")
    assert ast.unparse(call) == "me.q(self.q(x))" and refs == []
    with pytest.raises(FusekitError, match="no parameter for its module"):
        self_call_and_refs(forward_of("return self.q(x)", parameters="*args"), "q")


def test_single_call():
    tree = forward_of("return self.q(x)")
    assert single_self_call(tree, "q") is tree.body[0].value
    with pytest.raises(FusekitError, match=r"also used at line 2.*: self\.q"):
        single_self_call(forward_of("w = self.q.weight", "return self.q(x)"), "q")
    with pytest.raises(FusekitError, match="called 2 times"):
        single_self_call(forward_of("return self.q(self.q(x))"), "q")


# -- guards -----------------------------------------------------------------------------------


def folded(*lines):
    tree = forward_of(*lines)
    (ref,) = [node for node in ast.walk(tree) if isinstance(node, ast.Attribute) and node.attr == "q"]
    assert bypass_existence_guard(tree, ref, "q") is tree
    compile(ast.fix_missing_locations(ast.Module([tree], [])), "here", "exec")
    return "\n".join(map(ast.unparse, tree.body))


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("return self.q is None", "return False"),
        ("return None is self.q", "return False"),
        ("return self.q is not None", "return True"),
        ("return None is not self.q", "return True"),
        ("return x if self.q is None and y else y", "return x if False and y else y"),
        ("return x if self.q else y", "return x if True else y"),
        ("assert self.q, x", "assert True, x"),
        ("return not self.q", "return not True"),
        ("flag = self.q is not None", "flag = True"),
    ],
)
def test_guards_are_folded(before, after):
    assert folded(before) == after


def test_tests_of_statements_are_folded():
    assert folded("if self.q:", "    return x").startswith("if True:")
    assert folded("while self.q:", "    break").startswith("while True:")
    assert folded("if x:", "    pass", "elif not self.q:", "    pass").count("not True") == 1


@pytest.mark.parametrize(
    "line",
    [
        "return self.q == None",
        "return self.q != None",
        "return None == self.q",
        "return self.q and x",
        "return x or self.q",
        "return x if self.q and y else y",
        "return x if y and self.q is None is None else y",
        "return self.q is y",
        "return self.q is False",
        "return self.q",
        "return self.q(x)",
        "return self.q.weight",
        "return bool(self.q)",
        "return -self.q",
        "return self.q if x else y",
        "self.q = x",
        "del self.q",
        "assert x, self.q",
        "for x in self.q: pass",
    ],
)
def test_any_other_reference_escapes(line):
    tree = forward_of(line)
    before = ast.dump(tree)
    (ref,) = [node for node in ast.walk(tree) if isinstance(node, ast.Attribute) and node.attr == "q"]
    with pytest.raises(FusekitError, match=r"line 2: .* is no guard on the existence of self\.q"):
        bypass_existence_guard(tree, ref, "q")
    assert ast.dump(tree) == before


def test_only_a_reference_to_that_name_of_that_forward_is_folded():
    tree = forward_of("return x if self.k is None else y.q is None")
    for text in ("self.k", "y.q"):
        with pytest.raises(FusekitError, match="is no guard"):
            bypass_existence_guard(tree, find(tree, text), "q")
    with pytest.raises(FusekitError, match="does not stand in this forward"):
        bypass_existence_guard(tree, ast.parse("self.q", mode="eval").body, "q")


def test_folded_forward_runs_without_what_it_asked_for():
    class Guarded(nn.Module):
        def __init__(self):
            super().__init__()
            self.q = None

        def forward(self, x):
            if self.q is not None:
                x = x + 1
            return x if None is self.q else x * 2

    forward, fn = recover_forward(Guarded)
    for ref in [node for node in ast.walk(forward) if isinstance(node, ast.Attribute)]:
        bypass_existence_guard(forward, ref, "q")
    assert torch.equal(compile_forward(forward, fn)(Guarded(), X), (X + 1) * 2)
    assert torch.equal(Guarded()(X), X)


@pytest.mark.parametrize(
    ("line", "answer"),
    [
        ("if self.q: pass", True),
        ("while self.q: pass", True),
        ("assert self.q", True),
        ("return x if self.q else y", True),
        ("return not self.q", True),
        ("return [z for z in x if self.q]", True),
        ("return self.q if x else y", False),
        ("return x if y else self.q", False),
        ("assert x, self.q", False),
        ("if self.q and x: pass", False),
        ("if x or self.q: pass", False),
        ("if self.q is None: pass", False),
        ("if f(self.q): pass", False),
        ("if x: self.q", False),
        ("return -self.q", False),
        ("for x in self.q: pass", False),
        ("return [z for z in self.q]", False),
    ],
)
def test_boolean_context(line, answer):
    tree = forward_of(line)
    assert in_boolean_context(tree, find(tree, "self.q")) is answer


def test_boolean_context_of_a_match_guard():
    tree = forward_of("match x:", "    case 1 if self.q: pass")
    assert in_boolean_context(tree, find(tree, "self.q"))
