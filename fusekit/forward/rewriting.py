"""Rewriting a forward as a tree: recovered, changed in place, compiled in the original's place.

Fusions edit the text instead, which keeps comments and layout (`edits`); a tree is what a first
fuser of one's own is quickest written with.
"""

import ast
import copy
import math
import weakref
from collections.abc import Iterator
from types import FunctionType
from typing import Any

import torch.nn as nn

from fusekit.errors import FusekitError
from fusekit.forward.compile import compile_def, register, rewrap
from fusekit.forward.names import COMPREHENSIONS, FUNCTIONS, parameters_of, rebound_names
from fusekit.forward.reads import attribute_chain
from fusekit.forward.source import ForwardSource, NoSource, _place, class_chain, forward_chain, source_of
from fusekit.forward.span import lines_of

Block = list[ast.stmt]

# The functions under one that `recover_forward` gave, down to the forward itself.
_inner: "weakref.WeakKeyDictionary[FunctionType, tuple[weakref.ref[FunctionType], ...]]" = (
    weakref.WeakKeyDictionary()
)


# -- recovering and compiling -----------------------------------------------------------------


def recover_forward(cls: type | nn.Module) -> tuple[ast.FunctionDef, FunctionType]:
    """The forward's tree, ready to rewrite, and its function, from a module's class or an instance.

    The tree is a copy without decorators and without the annotations of the signature; its positions are
    those of the file. The function is the one that the class holds, decorators and all:
    `compile_forward` takes both. Raises `NoSource` (a `FusekitError`) where no text is that of
    the code that runs.
    Teaching-only: the library edits the text of `source(module)`.

    >>> forward, fn = recover_forward(nn.Dropout)
    >>> ast.unparse(forward.body[-1]), fn is nn.Dropout.forward
    ('return F.dropout(input, self.p, self.training, self.inplace)', True)
    """
    if isinstance(cls, nn.Module):
        if "forward" not in cls.__dict__:
            _check_has_forward(type(cls))
        chain = forward_chain(cls)
    elif isinstance(cls, type):
        _check_has_forward(cls)
        chain = class_chain(cls)
    else:
        raise FusekitError(
            f"recover_forward() takes a module's class or an instance, not {type(cls).__name__}"
        )
    tree = copy.deepcopy(source_of(chain).tree)
    tree.decorator_list = []
    _strip_annotations(tree)
    _inner[chain[0]] = tuple(map(weakref.ref, chain[1:]))
    return tree, chain[0]


def _check_has_forward(cls: type) -> None:
    if getattr(cls, "forward", None) in (None, nn.Module.forward):
        raise NoSource("no-source", f"{cls.__name__} has no forward of its own to recover")


def _strip_annotations(tree: ast.FunctionDef) -> None:
    tree.returns = None
    for node in ast.walk(tree.args):
        if isinstance(node, ast.arg):
            node.annotation = None


def compile_forward(forward: ast.FunctionDef, fn: FunctionType) -> FunctionType:
    """The rewritten `forward` as a function in the place of `fn`, both from `recover_forward`.

    It has the original's globals, closure cells, defaults, annotations and decorators, and its own text:
    the file with the def replaced, registered with `linecache` under a name of its own, so
    that `inspect`, debuggers and tracebacks show what runs. Bind it with its `__get__(module)` or as a
    class's forward. Raises `FusekitError` when parameters or defaults were changed, or when the tree is
    no Python.
    Teaching-only: the library compiles edited text (`compile_edited`).

    >>> import inspect
    >>> forward, fn = recover_forward(nn.Identity)
    >>> forward.body = ast.parse("return -input").body
    >>> made = compile_forward(forward, fn)
    >>> made(nn.Identity(), 3), inspect.getsource(made).split()[-2:]
    (-3, ['return', '-input'])
    """
    source = _source_of_function(fn)
    _check_signature(forward, source)
    after = _text_after(forward, source)
    try:
        place = _place(after, f"<rewritten {source.path}>", source.line, source.tree.name)
        if place is None or not _same(_without_decorators(place[0]), forward):
            raise FusekitError(
                f"the rewritten {source.name} reads back from its text as another tree: build it from nodes "
                "that a parse gives"
            )
        filename = register(after, source)
        return rewrap(source.chain, compile_def(place[0], filename, source, {}))[0]
    except (SyntaxError, ValueError) as error:
        raise FusekitError(f"the rewritten {source.name} is no Python: {error}") from error


def _source_of_function(fn: FunctionType) -> ForwardSource:
    inner = _inner.get(fn) if isinstance(fn, FunctionType) else None
    if inner is None:
        raise FusekitError(
            f"compile_forward() takes the tree and the function that recover_forward() gave, not {fn!r}"
        )
    chain = [fn, *(function for reference in inner if (function := reference()) is not None)]
    return source_of(tuple(chain))


def _check_signature(forward: ast.FunctionDef, source: ForwardSource) -> None:
    if not isinstance(forward, ast.FunctionDef):
        raise FusekitError(f"compile_forward() takes an ast.FunctionDef, not {type(forward).__name__}")
    if forward.name != source.tree.name:
        raise FusekitError(f"the def of {source.name} was renamed to {forward.name}: keep its name")
    if forward.decorator_list:
        raise FusekitError(
            f"the rewritten {source.name} carries decorators: those of the original stay around it, take "
            "them off the tree"
        )
    before, after = copy.deepcopy(source.tree), copy.deepcopy(forward)
    _strip_annotations(before)
    _strip_annotations(after)
    if not _same(before.args, after.args):
        raise FusekitError(
            f"the parameters or defaults of {source.name} were changed: they are the original function's, so "
            "rewrite its body alone"
        )


def _text_after(forward: ast.FunctionDef, source: ForwardSource) -> str:
    """The text of the file with the def, but for its decorators, replaced by `forward`."""
    lines = lines_of(source.file_text)
    first, end = source.tree.lineno, source.tree.end_lineno
    line = lines[first - 1]
    indent = line[: len(line) - len(line.lstrip())]
    written = _SignedNumbers().visit(copy.deepcopy(forward))
    try:
        text = ast.unparse(ast.fix_missing_locations(written))
        inside = _inside_of_strings(text)
    except Exception as error:
        raise FusekitError(f"the tree of the rewritten {source.name} is incomplete: {error}") from error
    body = [
        part if number in inside or not part.strip() else indent + part
        for number, part in enumerate(lines_of(text + "\n"), 1)
    ]
    return "".join([*lines[: first - 1], *body, *lines[end:]])


def _inside_of_strings(text: str) -> set[int]:
    """The lines that begin inside a string: to indent them would change it."""
    return {
        line
        for node in ast.walk(ast.parse(text))
        if isinstance(node, (ast.Constant, ast.JoinedStr)) and node.end_lineno is not None
        for line in range(node.lineno + 1, node.end_lineno + 1)
    }


class _SignedNumbers(ast.NodeTransformer):
    """Negative constants as a parse gives them: `Constant(-1) ** 2` would be written `-1 ** 2`."""

    def visit_Constant(self, node: ast.Constant) -> ast.expr:
        value = node.value
        if isinstance(value, (int, float)) and math.copysign(1, value) < 0:
            return ast.UnaryOp(ast.USub(), ast.Constant(-value))
        return node


def _without_decorators(tree: ast.FunctionDef) -> ast.FunctionDef:
    bare = copy.copy(tree)
    bare.decorator_list = []
    return bare


def _same(one: ast.AST, two: ast.AST) -> bool:
    """Whether two trees are the same code, wherever their nodes stand."""
    trees = [_SignedNumbers().visit(copy.deepcopy(tree)) for tree in (one, two)]
    return _outline(trees[0]) == _outline(trees[1])


def _outline(value: Any) -> Any:
    if isinstance(value, ast.AST):
        fields = [name for name in value._fields if name not in ("ctx", "kind", "type_comment")]
        return (type(value).__name__, *(_outline(getattr(value, name, None)) for name in fields))
    if isinstance(value, list):
        return tuple(map(_outline, value)) or None
    return None if value is None else (type(value).__name__, repr(value))


# -- places in a tree -------------------------------------------------------------------------


def replace_expr(tree: ast.AST, old: ast.expr, new: ast.expr) -> ast.AST:
    """`tree` with the expression `old`, that very node and none that is equal, replaced by `new`.

    The tree is changed in place, and returned (`new`, where `tree` is `old` itself). `new` may
    hold `old`; where it has no position it gets that of `old`. Raises `FusekitError` unless `old` stands in
    the tree at exactly one place, or when it is a target and `new` cannot be one.
    Teaching-only: the library edits the text.

    >>> tree = ast.parse("f(x) + f(x)", mode="eval")
    >>> ast.unparse(replace_expr(tree, tree.body.right, ast.Name("y", ast.Load())))
    'f(x) + y'
    """
    places = [*_places_of(tree, old)]
    if len(places) + (tree is old) != 1:
        raise FusekitError(
            f"the expression to replace stands in the tree {len(places)} times, not once: "
            f"{ast.unparse(old) if isinstance(old, ast.expr) else old!r}"
        )
    context = getattr(old, "ctx", None)
    if context is not None and not isinstance(context, ast.Load):
        if not isinstance(new, (ast.Name, ast.Attribute, ast.Subscript, ast.Tuple, ast.List, ast.Starred)):
            raise FusekitError(f"{ast.unparse(old)} is stored to, and {ast.unparse(new)} cannot be")
        new.ctx = context
    if not hasattr(new, "lineno"):
        ast.copy_location(new, old)
    ast.fix_missing_locations(new)
    for holder, field, index in places:
        if index is None:
            setattr(holder, field, new)
        else:
            getattr(holder, field)[index] = new
    return new if tree is old else tree


def _places_of(tree: ast.AST, wanted: ast.AST) -> Iterator[tuple[ast.AST, str, int | None]]:
    """Every (node, field, index in the field's list) of the tree at which `wanted` itself stands."""
    for name, value in ast.iter_fields(tree):
        for index, child in enumerate(value if isinstance(value, list) else [value]):
            if child is wanted:
                yield tree, name, index if isinstance(value, list) else None
            elif isinstance(child, ast.AST):
                yield from _places_of(child, wanted)


def block_chain(block: Block, node: ast.AST) -> list[tuple[Block, int]]:
    """The path of (statement list, index) from `block` down to the statement that `node` is or stands in.

    It goes through every kind of nested block: bodies, `else`, `finally`, handlers, `match` cases, nested
    defs and classes. Of several chains, the last statement list that all go through is the innermost
    block that dominates their nodes: it is entered before any of them is evaluated. Raises
    `FusekitError` when `node` does not stand in the block.

    >>> body = ast.parse("a()\\nif b:\\n    c()\\nelse:\\n    d()").body
    >>> chain = block_chain(body, body[1].orelse[0].value)
    >>> [index for _, index in chain], chain[1][0] is body[1].orelse
    ([1, 0], True)
    """
    found = _chain(block, node)
    if not found:
        raise FusekitError("the node does not stand in the block: give the tree that it was taken from")
    return found


def _chain(block: Block, node: ast.AST) -> list[tuple[Block, int]]:
    for index, statement in enumerate(block):
        for inner in blocks_of(statement):
            if found := _chain(inner, node):
                return [(block, index), *found]
        if any(part is node for part in _parts(statement)):
            return [(block, index)]
    return []


def blocks_of(statement: ast.stmt) -> Iterator[Block]:
    """The blocks nested in a compound statement, those of a def or class too."""
    for name in ("body", "orelse", "finalbody"):
        inner = getattr(statement, name, None)
        if isinstance(inner, list) and inner:
            yield inner
    for part in (*getattr(statement, "handlers", ()), *getattr(statement, "cases", ())):
        yield part.body


def _parts(node: ast.AST) -> Iterator[ast.AST]:
    """A statement and all of it that is in no nested block."""
    yield node
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, ast.stmt):
            yield from _parts(child)


# -- calls of a submodule and guards ----------------------------------------------------------


def self_call_and_refs(forward: ast.FunctionDef, name: str) -> tuple[ast.Call, list[ast.expr]]:
    """The one `self.name(argument)` call of a forward, and all other references to `self.name`.

    A call counts only with exactly one positional, unstarred argument and no keyword; any other one
    is a reference (its `self.name`). So are stores, `getattr(self, "name")` and the like, also with
    computed names, and reads through another name of `self` (`m = self`). `name` may be
    a path, `inner.name`. Where the forward hands `self` on, what the callee reads is not seen.
    Raises `FusekitError` unless there is exactly one such call, or when `self` is stored again.
    Teaching-only: the library takes the calls from the trace.

    >>> tree = ast.parse("def forward(self, x):\\n if self.q is not None: x = self.q(x)\\n return x").body[0]
    >>> call, refs = self_call_and_refs(tree, "q")
    >>> ast.unparse(call), [ast.unparse(ref) for ref in refs]
    ('self.q(x)', ['self.q'])
    """
    own = _own_name(forward)
    wanted = tuple(name.split("."))
    roots = _names_of_self(forward, own)
    calls: list[ast.Call] = []
    refs: list[ast.expr] = []
    called: set[ast.AST] = set()
    read_through: set[ast.AST] = set()
    for node in _in_order(forward):
        if isinstance(node, ast.Call):
            if attribute_chain(node.func, own) == wanted and _has_one_argument(node):
                calls.append(node)
                called.add(node.func)
            elif _asks_for(node, roots, wanted):
                refs.append(node)
        elif isinstance(node, ast.Attribute):
            chain = _chain_on(node, roots)
            on_the_way = bool(chain) and chain == wanted[: len(chain)] and node not in read_through
            in_table = bool(chain) and chain[-1] in TABLES and chain[:-1] == wanted[: len(chain) - 1]
            if node not in called and (chain == wanted or on_the_way or in_table):
                refs.append(node)
            read_through.add(node.value)
    if len(calls) != 1:
        raise FusekitError(
            f"{own}.{name} is called {len(calls)} times with one plain argument, not once"
            + "".join(f"; line {call.lineno}: {ast.unparse(call)}" for call in calls)
        )
    return calls[0], refs


TABLES = frozenset({"__dict__", "_modules", "_parameters", "_buffers"})
ASKING = frozenset({"getattr", "hasattr", "setattr", "delattr"})


def _chain_on(node: ast.Attribute, roots: set[str]) -> tuple[str, ...]:
    """The attribute chain of `node` on one of the names of `self`."""
    return next(filter(None, (attribute_chain(node, root) for root in roots)), ())


def _in_order(node: ast.AST) -> Iterator[ast.AST]:
    """A node and all under it, from the top down and from left to right."""
    yield node
    for child in ast.iter_child_nodes(node):
        yield from _in_order(child)


def _own_name(forward: ast.FunctionDef) -> str:
    """What a forward calls its module, a name that it never stores."""
    positional = [*forward.args.posonlyargs, *forward.args.args]
    if not positional:
        raise FusekitError(f"{forward.name}() has no parameter for its module")
    own = positional[0].arg
    stored = own in rebound_names(forward.body)
    for node in ast.walk(forward):
        if isinstance(node, FUNCTIONS) and node is not forward:
            stored |= own in parameters_of(node)
        elif isinstance(node, COMPREHENSIONS):
            targets = [part for generator in node.generators for part in ast.walk(generator.target)]
            stored |= any(isinstance(part, ast.Name) and part.id == own for part in targets)
    if stored:
        raise FusekitError(f"{own} is stored again in {forward.name}: {own}.x need not be the module's")
    return own


def _names_of_self(forward: ast.FunctionDef, own: str) -> set[str]:
    """`self` and the names that it is assigned to."""
    pairs: list[tuple[ast.expr, ast.expr]] = []
    for node in ast.walk(forward):
        if isinstance(node, ast.Assign):
            pairs += [pair for target in node.targets for pair in _pairs(target, node.value)]
        elif isinstance(node, (ast.AnnAssign, ast.NamedExpr)) and node.value is not None:
            pairs.append((node.target, node.value))
    found, size = {own}, 0
    while size != len(found):
        size = len(found)
        for target, value in pairs:
            if isinstance(value, ast.NamedExpr):
                value = value.value
            if isinstance(target, ast.Name) and isinstance(value, ast.Name) and value.id in found:
                found.add(target.id)
    return found


def _pairs(target: ast.expr, value: ast.expr) -> list[tuple[ast.expr, ast.expr]]:
    """A target and its value, part by part where both are written out."""
    if isinstance(target, (ast.Tuple, ast.List)) and isinstance(value, (ast.Tuple, ast.List)):
        if len(target.elts) == len(value.elts):
            return [pair for both in zip(target.elts, value.elts, strict=True) for pair in _pairs(*both)]
    return [(target, value)]


def _has_one_argument(call: ast.Call) -> bool:
    return len(call.args) == 1 and not call.keywords and not isinstance(call.args[0], ast.Starred)


def _asks_for(call: ast.Call, roots: set[str], wanted: tuple[str, ...]) -> bool:
    """Whether a call is `getattr(self, "name")` or the like, or could be, with a computed name."""
    if not isinstance(call.func, ast.Name) or call.func.id not in ASKING or not call.args:
        return False
    for root in roots:
        is_root = isinstance(call.args[0], ast.Name) and call.args[0].id == root
        chain = attribute_chain(call.args[0], root)
        if (is_root or chain) and len(chain) < len(wanted) and chain == wanted[: len(chain)]:
            asked = call.args[1] if len(call.args) > 1 else None
            return not isinstance(asked, ast.Constant) or asked.value == wanted[len(chain)]
    return False


def single_self_call(forward: ast.FunctionDef, name: str) -> ast.Call:
    """The one `self.name(argument)` call of a forward that refers to `self.name` nowhere else.

    Raises `FusekitError`, with the line, where there is another reference, no call, or several.
    Teaching-only: the library takes the calls from the trace.

    >>> ast.unparse(single_self_call(ast.parse("def forward(self, x): return -self.q(x)").body[0], "q"))
    'self.q(x)'
    """
    call, refs = self_call_and_refs(forward, name)
    if refs:
        raise FusekitError(
            f"{_own_name(forward)}.{name} is also used at line {refs[0].lineno}, other than by its call: "
            f"{ast.unparse(refs[0])}"
        )
    return call


def bypass_existence_guard(forward: ast.FunctionDef, ref: ast.expr, name: str) -> ast.FunctionDef:
    """`forward`, changed in place, with the guard that `ref` stands in folded: `self.name` exists.

    `self.name is None` becomes `False`, `is not None` `True`, in either operand order; where `ref` is
    used for its truth alone (`in_boolean_context`) it becomes `True`. That holds for a submodule
    that is there and is true, as every module without a `__len__` is. Raises `FusekitError` for
    any other reference: `==` and `!=` may be overridden, `and` and `or` yield the operand, all else lets it
    escape.
    Teaching-only: the library keeps guards, since the parts stay where they are.

    >>> tree = ast.parse("def forward(self, x): return self.q(x) if None is not self.q else x").body[0]
    >>> _, (ref,) = self_call_and_refs(tree, "q")
    >>> ast.unparse(bypass_existence_guard(tree, ref, "q").body[0])
    'return self.q(x) if True else x'
    """
    own = _own_name(forward)
    is_ref = attribute_chain(ref, own) == tuple(name.split(".")) and isinstance(ref, ast.Attribute)
    parent = _parent_of(forward, ref)
    if is_ref and isinstance(ref.ctx, ast.Load):  # type: ignore[attr-defined]
        if isinstance(parent, ast.Compare) and len(parent.ops) == 1:
            other = parent.comparators[0] if parent.left is ref else parent.left
            op = parent.ops[0]
            if isinstance(op, (ast.Is, ast.IsNot)) and isinstance(other, ast.Constant):
                if other.value is None:
                    replace_expr(forward, parent, ast.Constant(isinstance(op, ast.IsNot)))
                    return forward
        elif in_boolean_context(forward, ref):
            replace_expr(forward, ref, ast.Constant(True))
            return forward
    raise FusekitError(
        f"line {ref.lineno}: {ast.unparse(parent) if isinstance(parent, ast.expr) else ast.unparse(ref)} is "
        f"no guard on the existence of {own}.{name}; only `is None`, `is not None` and its bare truth are"
    )


def in_boolean_context(forward: ast.FunctionDef, ref: ast.expr) -> bool:
    """Whether an expression of the forward is used for its truth alone.

    It is as the test of `if`, `while`, `assert`, a conditional expression, a comprehension or a `match`
    case, and under `not`; not as an operand of `and` or `or`, which may yield it.
    Teaching-only: the library keeps guards.

    >>> tree = ast.parse("def forward(self, x):\\n assert self.a\\n return self.b and x").body[0]
    >>> in_boolean_context(tree, tree.body[0].test), in_boolean_context(tree, tree.body[1].value.values[0])
    (True, False)
    """
    parent = _parent_of(forward, ref)
    if isinstance(parent, (ast.If, ast.While, ast.Assert, ast.IfExp)):
        return parent.test is ref
    if isinstance(parent, ast.UnaryOp):
        return isinstance(parent.op, ast.Not)
    if isinstance(parent, ast.comprehension):
        return any(test is ref for test in parent.ifs)
    return isinstance(parent, ast.match_case) and parent.guard is ref


def _parent_of(tree: ast.AST, node: ast.AST) -> ast.AST:
    places = [*_places_of(tree, node)]
    if len(places) != 1:
        raise FusekitError(
            "the reference does not stand in this forward: give the tree that it was taken from"
        )
    return places[0][0]
