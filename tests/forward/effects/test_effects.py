"""Of small forwards: where a value may lie, and which expression may write what.

The base of each is the module below; `x` and `y` are tensors, `n` is a number, of `z` nothing is known.
"""

import ast
import textwrap
from collections.abc import Callable

import pytest
import torch

from fusekit.forward import source
from fusekit.forward.effects import Effects, Region, effects_of, touches

MODULES = """
SHELF = []
OUT_OF_SIGHT = {}
exec("def unread(*args): pass", OUT_OF_SIGHT)
unread = OUT_OF_SIGHT["unread"]


def double(t):
    return t.mul_(2)


def copied(t):
    return t + 1


def first(*args, **kwargs):
    return args[0]


def once(t):
    yield t.mul_(2)


class Double(nn.Module):
    def forward(self, t):
        return t.mul_(2)


class Parent(nn.Module):
    def __init__(self):
        super().__init__()
        self.q = nn.Linear(8, 8)
        self.norm = nn.BatchNorm1d(8)
        self.soft, self.hard = nn.ReLU(), nn.ReLU(inplace=True)
        self.sub = Double()
        self.register_buffer("steps", torch.zeros(8))
        self.kept = None

    def double(self, t):
        return t.mul_(2)

    def same(self, t):
        return t

    @property
    def doubled(self):
        return self.steps.mul_(2)


class Module(Parent):
    def double(self, t):
        return t + 1

    def forward(self, x, y, z=None, n: int = 1, *args, **kwargs):
"""
HEADER = "import functools\nimport torch\nimport torch.nn as nn\nimport torch.nn.functional as F\n"


@pytest.fixture
def follow(load: Callable) -> Callable[[str], tuple[Effects, ast.FunctionDef]]:
    def follow(body: str) -> tuple[Effects, ast.FunctionDef]:
        text = MODULES + textwrap.indent(body, " " * 8)
        module = load(text, HEADER).Module()
        forward = source(module)
        return effects_of(forward, module, {"x": torch.ones(2, 8), "y": torch.ones(2, 8)}), forward.tree

    return follow


def labels(regions: frozenset[Region]) -> str:
    return ", ".join(sorted("outside" if region.kind == "outside" else region.label for region in regions))


def lies_in(found: Effects, tree: ast.FunctionDef) -> str:
    """The regions of what the forward returns in its last statement."""
    last = tree.body[-1]
    assert isinstance(last, ast.Return) and last.value is not None
    return labels(found.value(last.value).regions)


def told(found: Effects) -> set[str]:
    """`text: effect`, the text the first line of the node that has it."""
    effects = set()
    for node, of_node in found.found.items():
        text = ast.unparse(node).partition("\n")[0]
        for effect in of_node:
            what = {"store": effect.stored and effect.stored[1], "context": ""}.get(
                effect.kind, labels(effect.regions)
            )
            effects.add(f"{text}: {effect.kind} {what}".strip())
    return effects


NEW = "x + 1"
LIES_IN = [
    # operators, by their schemas
    ("return x", "x"),
    ("return x + 1", NEW),
    ("return x.clone()", "x.clone()"),
    ("return torch.add(x, y)", "torch.add(x, y)"),
    ("return x.view(-1)", "x, x.view(-1)"),
    ("return x.reshape(-1)", "x, x.reshape(-1)"),
    ("return x.contiguous()", "x, x.contiguous()"),
    ("return x.expand_as(y)", "x, x.expand_as(y)"),
    ("return x.type_as(y)", "x, x.type_as(y), y"),  # it says nothing
    ("return x.float()", "x, x.float()"),
    ("return x[0]", "x, x[0]"),
    ("return x.T", "x"),
    ("return x.mul_(2)", "x, x.mul_(2)"),
    ("return torch.add(x, 1, out=y)", "torch.add(x, 1, out=y), y"),
    ("return F.relu(x)", "torch.relu(input)"),
    ("return F.relu(x, True)", "torch.relu_(input), x"),
    ("return x.shape", ""),
    # assignments
    ("h = w = x\nreturn w", "x"),
    ("h, w = x, y\nreturn w", "y"),
    ("h, *w = x, y, n\nreturn w[0]", "n, x, y"),
    ("a, (b, c) = 1, (x, y)\nreturn c", "y"),
    ("(h := x)\nreturn h", "x"),
    ("h: torch.Tensor = y\nreturn h", "y"),
    ("h = x + 1\nh += y\nreturn h", NEW),
    ("h = x\nh = h + 1\nreturn h", "h + 1"),
    ("x.data = y\nreturn x", "x, y"),
    ("x.set_(y)\nreturn x", "x, y"),
    # containers
    ("h = [x, y]\nreturn h[0]", "x"),
    ("h = [x, y]\nreturn h[-1]", "x, y"),
    ("h = [x, y]\nreturn h[n]", "x, y"),
    ("h = ((x, y), 1)\nreturn h[0][1]", "y"),
    ("h = {'a': x, 'b': y}\nreturn h['a']", "x"),
    ("h = {'a': x, 'b': y}\nreturn h.get('b')", "y"),
    ("h = []\nh.append(x)\nreturn h[0]", "x"),
    ("h = [y]\nh.insert(0, x)\nreturn h[0]", "x, y"),
    ("h = [x]\nh += [y]\nreturn h[1]", "x, y"),
    ("h = {}\nh.update(a=x)\nreturn h['a']", "x"),
    ("return next(iter([x]))", "x"),
    ("h = [t for t in (x, y)]\nreturn h[0]", "x, y"),
    ("h = {1: t for t in (x,)}\nreturn h[1]", "x"),
    # ways
    ("return x if n else y", "x, y"),
    ("return x or y", "x, y"),
    ("if n:\n    h = x\nelse:\n    h = y\nreturn h", "x, y"),
    ("if True:\n    h = x\nelse:\n    h = y\nreturn h", "x"),
    ("h = x\nwhile n:\n    h = y\n    break\nelse:\n    h = x\nreturn h", "x, y"),
    ("for h in (x, y):\n    pass\nreturn h", "x, y"),
    ("for i, h in enumerate([x]):\n    pass\nreturn h", "a pair, x"),
    ("for h, w in zip([x], [y]):\n    pass\nreturn w", "a pair, x, y"),
    ("h = x + 1\nfor _ in range(3):\n    w = h\n    h = x\nreturn w", f"x, {NEW}"),
    ("h = x\ntry:\n    h = y\nexcept ValueError:\n    pass\nreturn h", "x, y"),
    ("try:\n    h = x\nfinally:\n    h = y\nreturn h", "y"),
    ("match n:\n    case 1:\n        h = x\n    case _:\n        h = y\nreturn h", "x, y"),
    # calls that are read
    ("return (lambda t: t)(x)", "x"),
    ("def f():\n    return x\nreturn f()", "x"),
    ("def f():\n    nonlocal h\n    h = x\nh = y\nf()\nreturn h", "x, y"),
    ("return copied(x)", "t + 1"),
    ("return first(*[y, x])", "y"),
    ("return self.same(x)", "x"),
    ("return self.double(x)", "t + 1"),
    ("return super().double(x)", "t.mul_(2), x"),
    ("return self.q(x)", "F.linear(input, self.weight, self.bias)"),
    ("return next(once(x))", "t.mul_(2), x"),
    # what is there, and what is not known
    ("self.kept = x\nreturn self.kept", "x"),
    ("setattr(self, 'kept', x)\nreturn getattr(self, 'kept')", "x"),
    ("return self.steps", "steps"),
    ("return z", "z"),
    ("return args[0]", "args, outside"),
    ("return unread(x)", "outside, unread(x), x"),
]


@pytest.mark.parametrize("body, expected", LIES_IN, ids=[body for body, _ in LIES_IN])
def test_where_a_value_may_lie(follow, body, expected):
    found, tree = follow(body)
    assert found.failed is None
    assert lies_in(found, tree) == expected


EFFECTS = [
    # nothing
    ("x + 1", set()),
    ("h = lambda: x.mul_(2)", set()),
    ("def f():\n    x.mul_(2)", set()),
    ("print(f'{x}', x.shape)", set()),
    ("self.double(x)", set()),
    ("x.register_hook(lambda grad: None)", set()),
    ("F.relu(x, False)", set()),
    ("self.soft(x)", set()),
    # operators
    ("x.mul_(y)", {"x.mul_(y): write x"}),
    ("x.copy_(y)", {"x.copy_(y): write x"}),
    ("x.view(-1).mul_(2)", {"x.view(-1).mul_(2): write x, x.view(-1)"}),
    ("torch._foreach_mul_([x, y], 2)", {"torch._foreach_mul_([x, y], 2): write [x, y], x, y"}),
    ("torch.ops.aten.mul_(x, 2)", {"torch.ops.aten.mul_(x, 2): write x"}),
    ("torch.mul(x, 2, out=y)", {"torch.mul(x, 2, out=y): write y"}),
    ("torch.mul(x, 2, out=(h := x + 1))", {"torch.mul(x, 2, out=(h := (x + 1))): write x + 1"}),
    # flags, by position too
    ("F.relu(x, True)", {"F.relu(x, True): write x"}),
    ("F.relu(x, n)", {"F.relu(x, n): write x"}),
    ("F.hardtanh(x, -1.0, 1.0, True)", {"F.hardtanh(x, -1.0, 1.0, True): write x"}),
    ("F.dropout(x, 0.5, True, True)", {"F.dropout(x, 0.5, True, True): write x"}),
    ("F.threshold(x, 1, 2, inplace=True)", {"F.threshold(x, 1, 2, inplace=True): write x"}),
    ("self.hard(x)", {"self.hard(x): write x"}),
    ("F.batch_norm(x, y, self.steps, None, None, True)",
     {"F.batch_norm(x, y, self.steps, None, None, True): write steps, y"}),
    ("self.norm(x)",
     {"self.norm(x): write num_batches_tracked", "self.norm(x): write running_mean, running_var"}),
    # assignments
    ("h = x\nh += 1", {"h += 1: write x"}),
    ("n += 1", {"n += 1: write n"}),
    ("x[0] = y", {"x[0]: write x"}),
    ("h = [x]\nh[0] = y", set()),
    ("h = [x]\nh[0] += 1", {"h[0] += 1: write x"}),
    ("x.data = y\nx.mul_(2)", {"x.data: write x", "x.mul_(2): write x, y"}),
    ("self.kept = x\nself.kept.mul_(2)", {"self.kept: store kept", "self.kept.mul_(2): write x"}),
    ("self.steps += 1", {"self.steps += 1: write steps", "self.steps: store steps"}),
    ("self.q.weight = y", {"self.q.weight: store weight"}),
    ("self.q.weight.data.mul_(2)", {"self.q.weight.data.mul_(2): write weight"}),
    ("del self.q", {"del self.q: store q"}),
    ("setattr(self, 'q', None)", {"setattr(self, 'q', None): store q"}),
    ("SHELF.append(x)", {"SHELF.append(x): store []"}),
    # containers
    ("h = {'a': x}\nh['a'].mul_(2)", {"h['a'].mul_(2): write x"}),
    ("h = [x]\nh.append(y)\nh.pop().mul_(2)", {"h.pop().mul_(2): write x, y"}),
    ("[t.mul_(2) for t in (x, y)]", {"t.mul_(2): write x, y"}),
    # ways
    ("y if n else x.mul_(2)", {"x.mul_(2): write x"}),
    ("n and x.mul_(2)", {"x.mul_(2): write x"}),
    ("assert x.mul_(2) is not None", {"x.mul_(2): write x"}),
    ("h = x + 1\nfor _ in range(2):\n    h.mul_(2)\n    h = x", {f"h.mul_(2): write x, {NEW}"}),
    ("h = x + 1\nwhile n:\n    h.mul_(2)\n    h = y", {f"h.mul_(2): write {NEW}, y"}),
    ("try:\n    h = x\n    h = y\nexcept ValueError:\n    h.mul_(2)", {"h.mul_(2): write x, y"}),
    ("try:\n    pass\nfinally:\n    x.mul_(2)", {"x.mul_(2): write x"}),
    ("with torch.no_grad():\n    x.mul_(2)", {"x.mul_(2): write x"}),
    ("torch.set_grad_enabled(False)", {"torch.set_grad_enabled(False): context"}),
    ("match x:\n    case h:\n        h.mul_(2)", {"h.mul_(2): write x"}),
    ("match n:\n    case _ if x.mul_(2) is None:\n        y.mul_(2)",
     {"x.mul_(2): write x", "y.mul_(2): write y"}),
    # calls
    ("def f():\n    x.mul_(2)\nf()", {"f(): write x"}),
    ("def f(a=x):\n    a.mul_(2)\nf()", {"f(): write x"}),
    ("double(x)", {"double(x): write x"}),
    ("self.sub(x)", {"self.sub(x): write x"}),
    ("super().double(x)", {"super().double(x): write x"}),
    ("super().same(x).mul_(2)", {"super().same(x).mul_(2): write x"}),
    ("self.doubled", {"self.doubled: write steps"}),
    ("sorted([x, y], key=lambda t: t.mul_(2).sum())",
     {"sorted([x, y], key=lambda t: t.mul_(2).sum()): write x, y"}),
    ("x.apply_(lambda a: y.mul_(2))",
     {"x.apply_(lambda a: y.mul_(2)): write x", "x.apply_(lambda a: y.mul_(2)): write y"}),
    # generators: where they are made, as nothing is known of how they are consumed, and where they are
    (
        "h = once(x)\nfor _ in h:\n    pass",
        {"once(x): write x", "h: write x", "h: may write once(x), t.mul_(2), x"},
    ),
    (
        "h = (x.mul_(2) for _ in range(2))\nlist(h)",
        {
            "x.mul_(2): write x",
            "list(h): write x",
            "list(h): may write (x.mul_(2) for _ in range(2)), x, x.mul_(2)",
        },
    ),
    ("h = map(double, [x])\nlist(h)", {
            "map(double, [x]): write x",
            "list(h): write x",
            "list(h): may write [x], map(double, [x]), t.mul_(2), x",
        }),
    # what is not known
    ("unread(x)", {"unread(x): may write outside, x"}),
    ("unread()\nh = x + 1", {"unread(): may write outside"}),
    ("h = x + 1\nSHELF.append(h)\nunread()",
     {"SHELF.append(h): store []", f"unread(): may write outside, {NEW}"}),
    ("def f():\n    x.mul_(2)\nunread(f)",
     {"unread(f): write x", "unread(f): may write def f(): x.mul_(2), outside, x"}),
    ("z + 1", set()),
    ("kwargs['a'].mul_(2)", {"kwargs['a'].mul_(2): may write kwargs, outside"}),
    ("setattr(self, 'k' + str(n), None)",
     {"setattr(self, 'k' + str(n), None): may write outside, self",
      "setattr(self, 'k' + str(n), None): store *"}),
    ("yield x", {"(yield x): may write outside"}),
]  # fmt: skip


@pytest.mark.parametrize("body, expected", EFFECTS, ids=[body for body, _ in EFFECTS])
def test_what_an_expression_may_write(follow, body, expected):
    found, _ = follow(body)
    assert found.failed is None
    assert told(found) == expected


def test_modules_that_run_are_noted_where_they_are_called(follow):
    found, tree = follow("h = self.q(x)\nreturn self.sub(h)")
    first, second = (statement.value for statement in tree.body)
    assert [type(module).__name__ for module in found.called[first]] == ["Linear"]
    assert [type(module).__name__ for module in found.called[second]] == ["Double"]
    assert len(found.called) == 2


@pytest.mark.parametrize("body", ["global h\nh = x", "def f():\n    nonlocal h\n    h = x\nh = y\nf()"])
def test_names_that_other_code_stores_are_volatile(follow, body):
    assert follow(body)[0].volatile == {"h"}


def test_stored_names_and_parameters_with_what_they_hold(follow):
    found, _ = follow("h = x\nh = y.view(-1)")
    assert [(stored.name, labels(stored.value.regions)) for stored in found.stored[-2:]] == [
        ("h", "x"),
        ("h", "y, y.view(-1)"),
    ]
    names = [stored.name for stored in found.given]
    assert names == ["self", "x", "y", "z", "n", "args", "kwargs"]


def test_a_view_is_told_with_its_rule(follow):
    found, tree = follow("h = x.view(-1)\nreturn self.same(x.T)")
    rules = {ast.unparse(node): rule for node, rule in found.views.items()}
    assert rules == {
        "x.view(-1)": "aten::view returns a view of its input",
        "x.T": "`.T` of a tensor is a view of it",
    }


def test_tokens_tell_whether_two_names_hold_one_value(follow):
    found, tree = follow("h = x\nif n:\n    w = x\nelse:\n    w = x + 1\nreturn x, h, w")
    x, h, w = (found.value(name) for name in tree.body[-1].value.elts)
    assert x.token is not None and x.token == h.token
    assert w.token not in (None, x.token)


def test_a_forward_that_is_too_large_is_not_followed(follow, monkeypatch):
    from fusekit.forward.effects import notes

    monkeypatch.setattr(notes, "WORK", 5)
    assert "too large" in follow("h = x + 1\nreturn h + 1")[0].failed


def region(kind, key, **options):
    return Region(kind, key, **options)


OUTSIDE = region("outside", None)
GIVEN, OTHER = region("given", "x"), region("given", "y")
OWN, INDICES = region("own", 1), region("own", 2, can_be_input=False)
MADE, MADE_TOO = region("new", 1), region("new", 2)


@pytest.mark.parametrize(
    "written, read, is_touched",
    [
        (GIVEN, GIVEN, True),
        (GIVEN, OTHER, True),  # the caller may pass one tensor twice
        (GIVEN, OWN, True),  # or one of the module's
        (GIVEN, INDICES, False),
        (GIVEN, OUTSIDE, True),
        (GIVEN, MADE, False),
        (OWN, OWN, True),
        (OWN, INDICES, False),
        (OWN, OUTSIDE, True),
        (OWN, MADE, False),
        (MADE, MADE, True),
        (MADE, MADE_TOO, False),
        (MADE, OUTSIDE, False),
        (OUTSIDE, OUTSIDE, True),
    ],
)
def test_which_regions_may_be_one(written, read, is_touched):
    assert touches([written], [read]) == (written if is_touched else None)
    assert touches([read], [written]) == (read if is_touched else None)


def test_touches_names_the_first_that_is_written():
    assert touches([MADE_TOO, MADE, GIVEN], [OTHER, MADE]) is MADE
    assert touches([], [GIVEN]) is None and touches([GIVEN], []) is None
