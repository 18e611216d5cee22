"""Which names of a forward may share storage, followed to a fixed point."""

import ast
import doctest
import sys

import pytest
import torch
import torch.nn as nn
from hypothesis import given, settings
from hypothesis import strategies as st

import fusekit.forward.flow
from fusekit.forward import aliasing_names, written_names


class Module(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k = nn.Linear(4, 4), nn.Linear(4, 4)
        self.act, self.norm, self.many = nn.ReLU(inplace=True), None, nn.ModuleList([nn.Linear(4, 4)])
        self.on, self.off, self.scale, self.w = True, False, 2.0, torch.ones(4)
        self.h, self.kept = None, []

    def keep(self, x):
        self.h = x
        return x

    def fresh(self):
        return torch.ones(4)

    def forward(self, x, y=None, z=None):
        return x


def sharing(seed, *lines: str, module: nn.Module | None = None, parameters: str = "self, x, y=None, z=None"):
    text = f"def forward({parameters}):\n" + "".join(f"    {line}\n" for line in lines)
    return aliasing_names(ast.parse(text).body[0], seed, module or Module())


def test_examples_of_the_docstrings():
    assert doctest.testmod(fusekit.forward.flow) == (0, 2)


@pytest.mark.parametrize(
    "lines",
    [
        "a = x",
        "a = b = x",
        "b = x; a = b",
        "a = b; b = x",
        "a, b = x, y",
        "(b, [a]) = (y, [x])",
        "a, b = x",
        "*a, b = x",
        "b, *a = y, x, z",
        "f(a := x)",
        "if (a := x) is None: pass",
        "a = y; a += x",
        "a: int = x",
        "for a in x: pass",
        "for b, (c, a) in zip(y, x): pass",
        "with x as a: pass",
        "with y, f(x) as (b, a): pass",
        "b = [a for a in x]",
        "b = [c for c in y if (a := x)]",
        "a = [b for b in x]",
        "a = {b: c for b, c in x}",
        "a = list(b for b in x)",
        "b = [x]; a = b[0]",
        "b = {'k': (x,)}; a = b['k'][0]",
        "b = []; b.append(x); a = b[0]",
        "b = []; c = b; c.append(x); a = b[0]",
        "b = {}; c = b; c['k'] = x; a = b.get('k')",
        "b = {}; b.update(k=x); a = b",
        "b = {}; a = b.setdefault('k', x)",
        "b = [y]; b += [x]; a = b[1]",
        "b = [[]]; c = b[0]; c.append(x); a = b",
        "a = x if y else z",
        "a = z if y else x",
        "a = y or x",
        "a = x and y",
        "a = x.view(-1).transpose(0, 1)[..., 0].float()",
        "a = torch.flatten(x)",
        "a = f(x)",
        "a = self.act(x)",
        "a = self.act(self.act(input=x))",
        "a = self.act(b := self.q(x)); a = x",
        "self.h = x; a = self.h",
        "y.h = x; a = y.h",
        "y.h.g = x; b = y.h; a = b.g",
        "b = y.h; y.h.g = x; a = b.g",
        "y.shape = x; a = y.shape",
        "b = self; b.h = x; a = self.h",
        "setattr(y, 'h', x); a = y.h",
        "setattr(self, 'scale', x); a = self.scale",
        "self.scale = x; a = self.scale",
        "self.q = x; a = self.q(y)",
        "self.kept.append(x); a = self.kept[0]",
        "b = self.keep(x); a = self.h",
        "f(self, x); a = self.h",
        "store(y, x); a = y[0]",
        "y.store_(x); a = y.h",
        "y.set_(x); a = y",
        "y.data = x; a = y",
        "a = [*x]",
        "a = {**x}",
        "a = f(*x, **y)",
        "a = lambda: x",
        "b = lambda: x; a = b()",
        "b = lambda t=x: t; a = b()",
        "b = lambda t: t; a = b(x)",
        "b = lambda t: self.kept.append(t); b(x); a = self.kept",
        "a = map(lambda t: t, x)",
        "a = (lambda t: t)(x)",
        "match x:\n        case [b, *a]: pass",
        "match x:\n        case {'k': E(h=a)}: pass",
        "match y, x:\n        case b, _ as a: pass",
        "try: raise E(x)\n    except E as a: pass",
        "global a; a = x",
        "import g\n    g.h = x; a = g.h",
    ],
)
def test_sharing_goes_through(lines):
    assert "a" in sharing("x", lines)
    assert "x" in sharing({"a"}, lines)


@pytest.mark.parametrize(
    "lines",
    [
        ("def f():", "    return x", "a = f()"),
        ("def f():", "    return (b := x)", "a = f()"),
        ("def f():", "    nonlocal a", "    a = x", "a = y", "f()"),
        ("def f(t):", "    nonlocal a", "    a = t", "a = y", "g = f", "g(x)"),
        ("def f(t):", "    y.append(t)", "f(x)", "a = y[0]"),
        ("def f(t):", "    def g(u): return u", "    return g", "g = f(y)", "a = g(x)"),
        ("def f(t): self.h = t", "g = functools.partial(f, x)", "g()", "a = self.h"),
        ("def f(t=x): return t", "a = f()"),
        ("@keeping(x)", "def f(): return y", "a = f()"),
        ("class C:", "    t = x", "a = C.t"),
        ("class C:", "    def m(this, t): y.append(t)", "C().m(x)", "a = y"),
        ("class C:", "    def m(this): return x", "a = C().m()"),
        ("f = g = None", "for i in y: b = f; f = x", "a = b"),
    ],
)
def test_sharing_goes_through_nested_code(lines):
    assert "a" in sharing("x", *lines)
    assert "x" in sharing({"a"}, *lines)


@pytest.mark.parametrize(
    "lines",
    [
        "a = y",
        "a, b = y, x",
        "a = self.q(x)",
        "a = self.q(x).view(x.shape).to(x.dtype)",
        "a = self.act(self.q(x))",
        "a, b = self.q(x).chunk(2, -1)",
        "a = (self.q(x), [self.k(x)])",
        "a = [self.q(b) for b in x]",
        "a = self.q(x) if self.on else x",
        "a = self.q(x) if self.norm is None else self.norm(x)",
        "a = self.norm(x)",
        "a = x.shape",
        "a, b = x.size()",
        "a = x.size(0) * x.dim()",
        "a = x is None",
        "a = y if x else z",
        "a = 1",
        "self.q.weight = x; a = self.k(x)",
        "y.add_(x); a = y",
        "torch.add(x, y); a = y",
        "b = torch.relu(x); a = torch.relu(y)",
        "b = helper(x); a = helper(y)",
        "b = x.to(torch.float32); a = y.to(torch.float32)",
        "b = x * self.scale; a = y * self.scale",
        "b = x if y else z; a = z",
    ],
)
def test_what_shares_nothing(lines):
    assert "a" not in sharing("x", lines)
    assert "x" not in sharing("a", lines)


def test_names_that_share_with_a_name_in_common_need_not_share():
    lines = ("a = x if z else y",)
    assert sharing("x", *lines) == {"x", "a"} and sharing("y", *lines) == {"y", "a"}
    assert sharing("a", *lines) == {"a", "x", "y"}


def test_siblings_share_what_was_allocated_for_both():
    assert sharing("a", "q = self.q(x)", "a, b = q.chunk(2, -1)") == {"q", "a", "b"}
    assert sharing("a", "a = [b := self.q(x)]") == {"a", "b"}
    assert sharing("a", "a = self.act(b := self.q(x))") == {"a", "b"}


def test_seeds():
    lines = ("a, b = x, y",)
    assert sharing(set(), *lines) == set()
    assert sharing("not_there", *lines) == {"not_there"}
    assert sharing(["x", "y"], *lines) == {"x", "y", "a", "b"}
    assert sharing("self", "self.h = x", "a = self.h", "b = y") == {"self", "x", "a"}


def test_self_is_the_first_parameter():
    assert "a" not in sharing("x", "a = me.q(x)", parameters="me, x")
    assert "a" in sharing("x", "a = self.q(x)", parameters="me, self, x")
    assert "a" in sharing("x", "self = y", "a = self.q(x)")
    assert "a" in sharing("x", "f(lambda self: self)", "a = self.q(x)")
    assert "a" in sharing("x", "a = self.q(x)", parameters="*args")


@pytest.mark.parametrize(
    "line",
    [
        "self.q = y",
        "self.many.q = y",
        "y.q = z",
        "setattr(self, name, y)",
        "self._modules['q'] = y",
        "self.add_module('q', y)",
        "self.q.register_forward_hook(y)",
        "self.q.forward = y",
    ],
)
def test_a_submodule_that_the_forward_may_replace_is_not_known(line):
    assert "a" not in sharing("x", "a = self.q(x)") and "a" in sharing("x", line, "a = self.q(x)")


@pytest.mark.parametrize(
    "line", ["self.keep(y)", "f(self)", "super().forward(y)", "b = self", "self.norm = y"]
)
def test_what_is_missing_may_be_filled_in_by_code_that_gets_self(line):
    for call in ("self.norm(x)", "self.gone(x)", "self.q(x) if self.norm is None else x"):
        assert "a" not in sharing("x", f"a = {call}")
    assert "a" in sharing("x", line, "a = self.norm(x)")
    assert "a" in sharing("x", line, "a = self.q(x) if self.norm is None else x")
    assert "a" not in sharing("x", line, "a = self.q(x)")


def test_what_sees_the_locals_may_share_all():
    assert sharing("x", "a = y", "b = locals()") >= {"a", "x", "y", "b"}


SHARED = torch.ones(4)
SCALE = 2.0


class Global(Module):
    def forward(self, x, y=None):
        return SHARED, SCALE, torch, nn


def test_globals_are_known_by_what_they_are():
    lines = ("a = SHARED.view(-1)", "b = SHARED", "c = ast.walk(x)", "d = SCALE", "e = SCALE")
    assert sharing("b", *lines, module=Global()) == {"a", "b", "SHARED"}
    assert sharing("e", *lines, module=Global()) == {"e"}


# -- against a run ----------------------------------------------------------------------------

NAMES = ["x", "y", "a", "b"]
T = st.sampled_from(NAMES)
EXPRESSIONS = st.one_of(
    st.builds("self.q({})".format, T),
    st.builds("self.act({})".format, T),
    st.builds("self.act(self.k({}))".format, T),
    st.builds("self.norm({}) if self.norm is not None else {}".format, T, T),
    st.builds("self.norm({}) if self.h is not None else self.q({})".format, T, T),
    st.builds("{}.view(-1).view(4, 4)".format, T),
    st.builds("{}[0].expand(4, 4)".format, T),
    st.builds("{}.chunk(2)[0]".format, T),
    st.builds("({0} + {1})".format, T, T),
    st.builds("[{}, {}]".format, T, T),
    st.builds("{} if {}.shape[0] > 2 else {}".format, T, T, T),
    st.builds("{} or {}".format, st.sampled_from(["self.off", "self.on", "self.h", "None"]), T),
    st.builds("[t for t in ({}, {})][0]".format, T, T),
    st.builds("(b := {})".format, T),
    st.builds("(lambda t: t)({})".format, T),
    st.builds("self.keep({})".format, T),
    st.builds("{}[0] if isinstance({}, list) else {}".format, T, T, T),
    st.sampled_from(
        ["self.h", "self.kept[-1]", "box", "box['k']", "self.w", "later()", "self.fresh()", "view(x)"]
    ),
    st.builds("torch.flatten({})".format, T),
    st.builds("self.many[0]({})".format, T),
)
STATEMENTS = st.one_of(
    st.builds("{} = {}".format, T, EXPRESSIONS),
    st.builds("{}, {} = {}, {}".format, T, T, EXPRESSIONS, EXPRESSIONS),
    st.builds("*_, {} = {}, {}".format, T, EXPRESSIONS, EXPRESSIONS),
    st.builds("{} += {}".format, T, T),
    st.builds("self.h = {}".format, EXPRESSIONS),
    st.builds("self.kept.append({})".format, T),
    st.builds("box['k'] = {}".format, EXPRESSIONS),
    st.builds("also = box; also['k'] = {}".format, T),
    st.builds("for {} in [{}, {}]: pass".format, T, T, T),
    st.builds("if self.on: {} = {}".format, T, EXPRESSIONS),
    st.builds("setattr(self, 'h', {})".format, T),
    st.builds("{}.mul_(2)".format, T),
    st.builds("{}[0] = 1".format, T),
    st.builds("{}.view(-1)[0] = 1".format, T),
    st.builds("{}.view(-1).add_({}.view(-1))".format, T, T),
    st.builds("torch.add({}, 1, out={})".format, T, T),
    st.builds("torch.relu_({})".format, T),
    st.builds("nn.functional.relu({}, True)".format, T),
    st.builds("{}.copy_({})".format, T, T),
    st.builds("torch.flatten({}).zero_()".format, T),
    st.builds("later = lambda: {}".format, T),
    st.builds("view = lambda v: self.kept.append(v) or v".format),
    st.builds("match {}:\n    case [{}, *_]: pass".format, T, T),
)


def reached(value, found, seen):
    """The storages of the tensors that a value is or holds, and the values of their version counters."""
    if id(value) in seen:
        return found
    seen.add(id(value))
    if isinstance(value, torch.Tensor):
        found[value.untyped_storage()._cdata] = value
    elif isinstance(value, (tuple, list, dict)):
        for item in value.values() if isinstance(value, dict) else value:
            reached(item, found, seen)
    elif isinstance(value, nn.Module):
        for item in vars(value).values():
            reached(item, found, seen)
    elif callable(value) and getattr(value, "__closure__", None):
        for cell in value.__closure__:
            reached(cell.cell_contents, found, seen)
    return found


def run(text: str, module: nn.Module, inputs: list[torch.Tensor]):
    """Of each local the storages that it ever held, and all tensors, which stay alive meanwhile."""
    namespace = {"torch": torch, "nn": nn}
    exec(compile(text, "forward-run", "exec"), namespace)
    held: dict[str, dict] = {}
    alive: list = []

    def watch(frame, event, argument):
        if frame.f_code.co_name != "forward" or frame.f_code.co_filename != "forward-run":
            return None
        for name, value in list(frame.f_locals.items()):
            try:
                found = reached(value, {}, set())
            except ValueError:  # a cell that is empty yet
                continue
            alive.extend(found.values())
            held.setdefault(name, {}).update(found)
        return watch

    before = sys.gettrace()
    sys.settrace(watch)
    try:
        with torch.no_grad():
            namespace["forward"](module, *inputs)
    except Exception:
        pass  # a random forward may fail half-way: what it did until then counts
    finally:
        sys.settrace(before)
    return held, alive


def forward_text(statements: list[str]) -> str:
    lines = ["a, b, box = self.q(x), self.k(y), {}", "later = lambda: a", "view = lambda v: v"]
    body = "\n".join([*lines, *statements])
    return "def forward(self, x, y):\n" + "".join(f"    {line}\n" for line in body.splitlines())


@settings(deadline=None, max_examples=100, database=None)
@given(st.lists(STATEMENTS, min_size=1, max_size=8))
def test_names_that_did_share_storage_were_said_to(statements):
    text = forward_text(statements)
    forward = ast.parse(text).body[0]
    module = Module()
    held, _alive = run(text, module, [torch.randn(4, 4), torch.randn(4, 4)])
    for name, storages in held.items():
        said = aliasing_names(forward, name, Module())
        for other, others in held.items():
            assert other in said or not storages.keys() & others.keys()


@settings(deadline=None, max_examples=100, database=None)
@given(st.lists(STATEMENTS, min_size=1, max_size=6))
def test_what_was_written_was_said_to_be(statements):
    """Every input whose version counter went up is written, or may share with what is."""
    text = forward_text(statements)
    forward = ast.parse(text).body[0]
    module, inputs = Module(), [torch.randn(4, 4), torch.randn(4, 4)]
    if "self.act" in text or "self.keep" in text or ("view" in text and "later()" in text):
        module.act.inplace = False  # what a submodule writes is not in a name
    run(text, module, inputs)
    written = aliasing_names(forward, written_names(forward.body), module)
    for name, tensor in zip(("x", "y"), inputs, strict=True):
        assert tensor._version == 0 or name in written
