"""`trace`: the dataflow of one forward, or where it stops; nothing outside is touched."""

import collections
import copy
import dataclasses
import functools
import random
import threading
import weakref

import numpy as np
import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from transformers.modeling_outputs import BaseModelOutput

from fusekit.errors import FusekitError
from fusekit.forward import text_at
from fusekit.tracing import trace

X = torch.empty(2, 7, 4)


class Net(nn.Module):
    """Two linears of width 4, to be given a forward."""

    def __init__(self, **attributes):
        super().__init__()
        self.q = nn.Linear(4, 4)
        self.k = nn.Linear(4, 4)
        for name, value in attributes.items():
            setattr(self, name, value)


def names(found) -> list[str]:
    """Targets of a trace's calls, in order."""
    calls = [node for node in found.graph.nodes if node.op.startswith("call")]
    return [getattr(node.target, "__name__", str(node.target)) for node in calls]


def texts(found) -> list[str]:
    """The source texts of a trace's calls, in order."""
    return [
        text_at(found.source.file_text, node.meta["span"])
        for node in found.graph.nodes
        if node.op.startswith("call")
    ]


def node(found, name: str):
    """The only call of `name`."""
    (only,) = [
        node
        for node in found.graph.nodes
        if node.op.startswith("call") and getattr(node.target, "__name__", str(node.target)) == name
    ]
    return only


# -- the graph --------------------------------------------------------------------------------


class Plain(Net):
    def forward(self, x, scale=2.0, mask=None):
        h = self.q(x) * scale
        if mask is not None:
            h = h + mask
        b, n, d = h.shape
        return h.view(b, n, 2, d // 2).transpose(1, 2), self.k(h)


def test_graph_holds_submodules_as_leaves_and_meta_values():
    found = trace(Plain())
    assert found.complete and names(found) == ["q", "mul", "view", "transpose", "k"]
    assert node(found, "q").op == "call_module" and node(found, "q").meta["module_type"] is nn.Linear
    shapes = [tuple(n.meta["val"].shape) for n in found.graph.nodes if n.op.startswith("call")]
    assert shapes == [(2, 7, 4), (2, 7, 4), (2, 7, 2, 2), (2, 2, 7, 2), (2, 7, 4)]
    assert all(n.meta["val"].is_meta for n in found.graph.nodes if n.op != "output")
    output = next(n for n in found.graph.nodes if n.op == "output")
    assert [n.name for n in output.args[0]] == ["transpose", "k"]
    found.graph.lint()


def test_omitted_arguments_are_at_their_defaults_and_listed():
    found = trace(Plain())
    listed = {(a.kind, a.text) for a in found.assumptions if a.kind != "branch"}
    assert listed == {
        ("input", "x is a made-up float32 tensor [2, 7, 4]"),
        ("default", "scale is left out: 2.0"),
        ("default", "mask is left out: None"),
    }
    assert [n.name for n in found.graph.nodes if n.op == "placeholder"] == ["x"]


def test_branches_are_assumptions_with_their_line():
    found = trace(Plain())
    (branch,) = [a for a in found.assumptions if a.kind == "branch"]
    first = found.source.line
    assert (branch.text, branch.line) == ("mask is not None was false", first + 2)
    given = trace(Plain(), X, mask=X)
    assert "mask is not None was true" in [a.text for a in given.assumptions]
    assert [n.name for n in given.graph.nodes if n.op == "placeholder"] == ["x", "mask"]
    assert names(given).count("add") == 1


def test_bindings_say_what_each_name_held():
    found = trace(Plain())
    held = [(b.name, b.line - found.source.line, b.node) for b in found.bindings]
    assert held == [("x", 0, "x"), ("h", 1, "mul")]


class Stores(Net):
    def forward(self, x):
        if (y := self.q(x)) is None:
            return x
        with torch.no_grad() as g, Given(y) as (a, b):
            pass
        match {"h": b}:
            case {"h": c, **rest}:
                pass
        for d, e in [(a, b)]:
            f, *g = d, e
        h = [z for item in (a,) if (z := item * 2) is not None]
        i: torch.Tensor = z
        i += 1
        return i


class Given:
    def __init__(self, value):
        self.value = value

    def __enter__(self):
        return self.value * 1, self.value * 2

    def __exit__(self, *error):
        return None


def test_every_way_to_store_a_name_is_a_binding():
    found = trace(Stores())
    assert found.complete
    assert {"x", "y", "a", "b", "c", "d", "e", "f", "z", "i"} == {b.name for b in found.bindings}


class Branches(Net):
    def forward(self, x, mode="fast", flag=None):
        y = x if flag else x + 1
        z = flag and flag.value
        match mode:
            case "slow":
                return x
            case str() if len(mode) == 4:
                y = y * 3
        items = [y for i in range(3) if i > 5]
        while z:
            pass
        for i in range(2):
            if i == 0:
                y = y + 1
        return y


def test_every_kind_of_test_is_an_assumption_unless_it_went_both_ways():
    found = trace(Branches())
    assert [a.text for a in found.assumptions if a.kind == "branch"] == [
        "flag was false",
        "flag was false",
        "len(mode) == 4 was true",
        "str() was true",
        "i > 5 was false",
        "z was false",
    ]


# -- spans ------------------------------------------------------------------------------------


def helper(x):
    return x.exp().sum(-1, keepdim=True)


# fmt: off
class Spans(Net):
    def forward(self, x):
        """Ünïcödé before it all."""
        a = self.q(x); b = "é€😀"; c = self.k(x) + self.q(a)  # noqa: E702
        d = (
            a.float()
            .transpose(
                1, 2
            )
            .mT
            .contiguous()
        )
        e = helper(c)
        f = [self.q(item) for item in (a,)]
        g = -a[:, 0]
        g[0] = 1
        g += 2
        h, i = a.chunk(2, -1)
        j = (lambda t: t * 5)(h)
        return torch.cat(
            [d.flatten(), e.flatten(), f[0].flatten(), j.flatten()],
            dim=0,
        )
# fmt: on


def test_spans_are_the_expressions_of_the_source():
    found = trace(Spans())
    assert found.complete, found.stopped
    got = [(name, " ".join(text.split())) for name, text in zip(names(found), texts(found), strict=True)]
    chain = "a.float() .transpose( 1, 2 )"
    # From Python 3.12 on a comprehension is no function of its own.
    inlined = ("q", "self.q(item)") in got
    assert got[:-1] == [
        ("q", "self.q(x)"),
        ("k", "self.k(x)"),
        ("q", "self.q(a)"),
        ("add", "self.k(x) + self.q(a)"),
        ("float", "a.float()"),
        ("transpose", chain),
        ("getattr", f"{chain} .mT"),
        ("contiguous", f"{chain} .mT .contiguous()"),
        ("exp", "helper(c)"),
        ("sum", "helper(c)"),
        ("q", "self.q(item)" if inlined else "[self.q(item) for item in (a,)]"),
        ("getitem", "a[:, 0]"),
        ("neg", "-a[:, 0]"),
        ("setitem", "g[0]"),
        ("iadd", "g += 2"),
        ("chunk", "a.chunk(2, -1)"),
        ("getitem", "a.chunk(2, -1)"),
        ("getitem", "a.chunk(2, -1)"),
        ("mul", "(lambda t: t * 5)(h)"),
        ("flatten", "d.flatten()"),
        ("flatten", "e.flatten()"),
        ("flatten", "f[0].flatten()"),
        ("flatten", "j.flatten()"),
    ]
    assert got[-1][1].startswith("torch.cat( [d.flatten") and got[-1][1].endswith("dim=0, )")
    direct = {text: n.meta["direct"] for n, text in zip(calls(found), texts(found), strict=True)}
    assert direct["helper(c)"] is False and direct["self.q(x)"] is True


def calls(found):
    return [node for node in found.graph.nodes if node.op.startswith("call")]


class Recursive(Net):
    def forward(self, x, deep=0):
        if deep < 2:
            return self.forward(self.q(x), deep + 1)
        return self.k(x)


def test_recursion_is_a_call_of_a_helper():
    found = trace(Recursive())
    assert texts(found) == ["self.q(x)"] + ["self.forward(self.q(x), deep + 1)"] * 2
    assert [n.meta["direct"] for n in calls(found)] == [True, False, False]


class Base(Net):
    def forward(self, x):
        return self.q(x)


class Child(Base):
    def forward(self, x):
        return super().forward(x) + 1


def test_forward_of_a_base_class_is_a_helper():
    found = trace(Child())
    assert texts(found) == ["super().forward(x)", "super().forward(x) + 1"]


@pytest.mark.parametrize("module", [nn.Linear(4, 4), nn.LayerNorm(4), nn.GELU(), nn.RMSNorm(4)])
def test_modules_of_pytorch_itself_have_spans(module):
    found = trace(module)
    assert found.complete and all(node.meta["span"] for node in calls(found)) and calls(found)


# -- context and writes -----------------------------------------------------------------------


class Contexts(Net):
    def forward(self, x):
        a = self.q(x)
        with torch.no_grad():
            b = self.q(x)
            with torch.autocast("cpu", dtype=torch.bfloat16):
                c = self.q(x)
                with torch.enable_grad():
                    d = self.q(x)
        with torch.inference_mode():
            e = x * 2
            e.add_(1)
        f = self.k(x)
        return f


def test_grad_mode_and_autocast_stand_in_the_context_of_each_call():
    found = trace(Contexts())
    assert found.complete, found.stopped
    contexts = [n.meta["context"] for n in calls(found)]
    a, b, c, d, e, written, f = contexts
    assert len({a, b, c, d, e}) == 5 and a == f and e == written
    assert any("autocast" in assumption.text for assumption in found.assumptions)
    assert calls(found)[5].meta["written"] == ["mul"]


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_trace_does_not_depend_on_the_mode_of_its_caller(mode):
    with mode():
        found = trace(Writes())
    assert [n.meta.get("written") for n in calls(found)] == [
        n.meta.get("written") for n in calls(trace(Writes()))
    ]
    assert calls(found)[0].meta["context"] == calls(trace(Writes()))[0].meta["context"]


class Writes(Net):
    def forward(self, x):
        a = self.q(x)
        a.mul_(2)
        b = a[:, :2]
        b += 1
        a[0] = 0
        torch.add(a, 1, out=a)
        F.relu(a, inplace=True)
        a.data = x.clone()
        return a


def test_writes_name_the_nodes_that_they_write():
    found = trace(Writes())
    written = {n.name: n.meta["written"] for n in calls(found) if "written" in n.meta}
    assert list(written) == ["mul_", "iadd", "setitem", "add", "relu", "setattr_1"], written
    assert written["mul_"] == ["q"] and written["iadd"] == ["getitem"] and written["setitem"] == ["mul_"]


def test_write_of_one_tensor_by_another_is_followed():
    class A(Net):
        def forward(self, x):
            y = self.q(x)
            x.mul_(y)
            y += x
            y[:, 0] = x[:, 1]
            return torch.mul(x, y, out=y)

    found = trace(A())
    assert found.complete, found.stopped
    assert [n.meta["written"] for n in calls(found) if "written" in n.meta] == [
        ["x"],
        ["q"],
        ["iadd"],
        ["setitem"],
    ]


class InplaceChild(Net):
    def __init__(self):
        super().__init__()
        self.act = nn.ReLU(inplace=True)

    def forward(self, x):
        y = self.q(x)
        self.act(y)
        return y


def test_submodule_that_writes_its_input_is_seen():
    found = trace(InplaceChild())
    assert node(found, "act").meta["written"] == ["q"]


class AsksForGrad(Net):
    def forward(self, x):
        if self.q.weight.requires_grad and not self.k.weight.requires_grad:
            return self.q(x)
        return self.k(x)


def test_parameters_answer_whether_they_require_grad():
    module = AsksForGrad()
    module.k.requires_grad_(False)
    assert names(trace(module)) == ["q"]
    module.q.requires_grad_(False)
    assert names(trace(module)) == ["k"]


# -- nothing outside is touched ---------------------------------------------------------------

SEEN: list = []
TABLE = {"a": [1]}
COUNT = 0
GLOBAL = nn.Linear(4, 4)
MASK = torch.zeros(4)


class Holder:
    def __init__(self):
        self.count, self.nested, self.tensor = 0, {"deep": [0]}, torch.zeros(4)


class Everything(Net):
    shared: list = []
    table = torch.zeros(4)

    def __init__(self):
        super().__init__(
            items=[1], _private=[1], options={"a": {"b": 1}}, holder=Holder(), queue=collections.deque([1]),
            default=collections.defaultdict(list), names=set(), pair=([1], 2), tensor=torch.zeros(4),
        )  # fmt: skip
        self.register_buffer("b", torch.zeros(4))
        self.add = self.items.append
        self.tool = functools.partial(self.remember, 1)
        self.me = weakref.ref(self)
        self.other = weakref.proxy(self.holder)
        self.closure = lambda value: self.items.append(value)
        self.many = [nn.Linear(4, 4)]

    def remember(self, *value):
        self.items.append(value)

    def forward(self, x, seen=[], *, more={}, fail=False):
        global COUNT
        COUNT += 1
        SEEN.append(1)
        TABLE["a"].append(2)
        GLOBAL.weight.add_(1)
        MASK.add_(1)
        seen.append(1)
        more["x"] = 1
        self.items.append(2)
        self._private.append(2)
        self.options["a"]["b"] = 2
        self.holder.count += 1
        self.holder.nested["deep"].append(1)
        self.holder.tensor.add_(1)
        self.queue.append(2)
        self.default["new"].append(1)
        self.names.add("x")
        self.pair[0].append(1)
        self.tensor.mul_(2)
        self.b.add_(1)
        self.b = self.b + 1
        self.shared.append(1)
        self.table.add_(1)
        self.add(3)
        self.tool(4)
        self.me().items.append(5)
        self.me().flag = True
        self.other.count = 9
        self.closure(6)
        self.many[0].weight.zero_()
        self.many.append(self.q)
        self.q.weight.data.add_(1)
        self.q.extra = 1
        self.k = nn.Identity()
        self.register_buffer("late", x, persistent=False)
        dict(self._modules)["q"].leaked = 1
        {**self._modules}["q"].leaked = 1
        self._modules.copy()["q"].leaked = 1
        self.training = False
        random.random()
        np.random.rand()
        torch.rand(3)
        F.dropout(x, training=True)
        if fail:
            raise ValueError("half-way")
        return self.q(x)


def state_of(module: nn.Module):
    """All that a forward could have changed, as plain values."""

    def plain(value, depth=0):
        if isinstance(value, torch.Tensor):
            return id(value), value._version, value.tolist()
        if isinstance(value, nn.Module):
            return id(value), plain(vars(value), depth + 1) if depth < 8 else 0
        if isinstance(value, dict):
            return type(value), [(k, plain(v, depth + 1)) for k, v in value.items()]
        if isinstance(value, (list, tuple, collections.deque)):
            return id(value), [plain(item, depth + 1) for item in value]
        if isinstance(value, Holder):
            return id(value), plain(vars(value))
        return repr(value)

    cls = type(module)
    return (
        plain(module), plain(cls.shared), plain(cls.table), plain(SEEN), plain(TABLE), COUNT, plain(GLOBAL),
        plain(MASK), plain(cls.forward.__defaults__), plain(cls.forward.__kwdefaults__), set(cls.__dict__),
        set(globals()),
    )  # fmt: skip


def world():
    """What tracers usually patch."""
    return (
        nn.Module.__call__, nn.Module.__getattr__, dict(nn.Module.__dict__), nn.Linear.forward,
        dict(F.__dict__), dict(torch.__dict__), len, torch.is_grad_enabled(), torch.get_default_dtype(),
        random.getstate(), torch.get_rng_state().tolist(), np.random.get_state()[1].tolist(),
        torch.overrides._get_current_function_mode_stack(), torch.get_default_device(),
    )  # fmt: skip


@pytest.mark.parametrize("fail", [False, True])
def test_nothing_outside_of_a_trace_is_changed(fail):
    module = Everything()
    before, outside = state_of(module), world()
    found = trace(module, X, fail=fail)
    assert found.complete is not fail, found.stopped
    if fail:
        assert "half-way" in found.stopped.message
    assert state_of(module) == before
    now = world()
    assert [a == b for a, b in zip(now, outside, strict=True)] == [True] * len(now)


class Counts(Net):
    def forward(self, x, cache=None):
        cache.append(self.k(x))
        return self.q(x)


def test_objects_passed_in_are_not_written():
    from transformers import DynamicCache

    cache, given = [X], X.clone()
    trace(Counts(), given, cache=cache)
    assert cache == [X] and given._version == 0
    real = DynamicCache()
    trace(WithCache(), X, real)
    assert real.get_seq_length() == 0 and not real.layers


class WithCache(Net):
    def forward(self, x, cache):
        x = self.q(x)[:, None]
        cache.update(x, x, 0)
        return cache.layers[0].keys


def test_cell_of_a_closure_is_not_written():
    found, count = in_a_closure()
    assert found.complete and count() == 0


def in_a_closure():
    count, kept = 0, []

    class A(Net):
        def forward(self, x):
            nonlocal count
            count += 1
            kept.append(x)
            return self.q(x)

    return trace(A()), lambda: count + len(kept)


SENTINEL = object()


class Identity(Net):
    def __init__(self):
        super().__init__(mode=SENTINEL)

    def forward(self, x, past=SENTINEL):
        if past is SENTINEL and self.mode is SENTINEL:
            return self.q(x)
        return self.k(x)


def test_sentinels_stay_themselves():
    assert names(trace(Identity())) == ["q"]


def test_another_thread_runs_its_model_meanwhile():
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
    x = torch.ones(2, 8)
    want, wrong, stop = model(x), [], threading.Event()

    def run():
        try:
            while not stop.is_set():
                with torch.no_grad():
                    if not torch.equal(model(x), want):
                        wrong.append("values")
        except BaseException as error:
            wrong.append(repr(error))

    thread = threading.Thread(target=run)
    thread.start()
    try:
        for _ in range(30):
            assert trace(model).complete and trace(Plain()).complete
            assert not trace(Raises()).complete
    finally:
        stop.set()
        thread.join()
    assert wrong == []


# -- where it stops ---------------------------------------------------------------------------


class Raises(Net):
    def forward(self, x):
        y = self.q(x)
        raise ValueError("on purpose")


class Decides(Net):
    def forward(self, x):
        y = self.q(x)
        if y.sum() > 0:
            return y
        return self.k(x)


class Item(Net):
    def forward(self, x):
        return self.q(x) * x.max().item()


class Numpy(Net):
    def forward(self, x):
        return self.q(x), x.detach().cpu().numpy()


class Nonzero(Net):
    def forward(self, x):
        return self.q(x)[x[..., 0] > 0]


class Listed(Net):
    def forward(self, x):
        return self.q(x), [int(i) for i in x[0, 0]]


class Generator(Net):
    def forward(self, x):
        yield self.q(x)


class Lazy(Net):
    def forward(self, x):
        return x, (self.q(x) for _ in range(2))


class Endless(Net):
    def forward(self, x):
        return self(x)


@pytest.mark.parametrize(
    ("cls", "offset", "sentence"),
    [
        (Raises, 2, "ValueError: on purpose"),
        (Decides, 2, "needs the values of a tensor"),
        (Item, 1, "needs the values of a tensor"),
        (Numpy, 1, "needs the values of a tensor"),
        (Nonzero, 1, "needs the values of a tensor"),
        (Listed, 1, "needs the values of a tensor"),
        (Generator, 0, "runs later"),
        (Lazy, 0, "runs later"),
        (Endless, 1, "RecursionError"),
    ],
)
def test_stop_says_where_and_why(cls, offset, sentence):
    found = trace(cls())
    assert not found.complete
    assert found.stopped.path == __file__ and found.stopped.line == found.source.line + offset
    assert (
        sentence in found.stopped.message and f"test_trace.py:{found.stopped.line}" in found.stopped.message
    )
    assert all(n.op != "output" for n in found.graph.nodes)


def test_graph_before_the_stop_is_kept():
    assert names(trace(Decides())) == ["q", "sum", "gt"]


def test_argument_that_was_left_out_is_named_as_the_cause():
    class NeedsMask(Net):
        def forward(self, x, mask=None):
            return self.q(x) + mask.float()

    assert "pass inputs to trace()" in trace(NeedsMask()).stopped.message


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
def test_interrupt_passes_through_and_leaves_nothing(error):
    class Interrupted(Net):
        def forward(self, x):
            raise error

    before = torch.overrides._get_current_function_mode_stack()
    with pytest.raises(error):
        trace(Interrupted())
    assert torch.overrides._get_current_function_mode_stack() == before
    assert torch.get_default_device() == torch.device("cpu")


def test_no_module_is_an_error_that_says_what_to_pass():
    with pytest.raises(FusekitError, match="takes a module, not function: pass"):
        trace(trace)


# -- signatures, results, modules -------------------------------------------------------------


@dataclasses.dataclass
class Result:
    h: torch.Tensor
    rest: tuple


class Only(Net):
    def forward(self, x, /):
        return self.q(x)


class Keyword(Net):
    def forward(self, *, x):
        return self.q(x)


class Various(Net):
    def forward(self, x, *args, y=None, **kwargs):
        return self.q(args[0] if args else x) + kwargs.get("z", 0)


class Nothing(Net):
    def forward(self, x):
        self.q(x)


class Returns(Net):
    def forward(self, x, kind="dict"):
        h = self.q(x)
        if kind == "dict":
            return {"h": h}
        if kind == "dataclass":
            return Result(h, (h, None))
        if kind == "named":
            return collections.namedtuple("N", "h")(h)
        return BaseModelOutput(last_hidden_state=h)


def test_signatures_of_every_kind_are_called_right():
    for cls in (Only, Keyword, Various):
        assert names(trace(cls()))[0] == "q" and trace(cls()).complete
    assert trace(Only(), X).complete and trace(Keyword(), x=X).complete
    assert trace(Various(), X, X, z=X).complete
    wrong = trace(Plain(), X, nope=1)
    assert not wrong.complete and "nope" in wrong.stopped.message


def test_results_of_every_kind_reach_the_output():
    def output(found):
        (only,) = [n for n in found.graph.nodes if n.op == "output"]
        return str(only.args[0])

    assert output(trace(Nothing())) == "None"
    assert output(trace(Returns())) == "{'h': q}"
    assert output(trace(Returns(), X, "dataclass")) == "{'h': q, 'rest': (q, None)}"
    assert output(trace(Returns(), X, "named")) == "(q,)"
    assert output(trace(Returns(), X, "output")) == "{'last_hidden_state': q}"


class Parent(Net):
    def __init__(self):
        super().__init__()
        self.inner = Returns()

    def forward(self, x):
        a = self.inner(x, "dataclass")
        b = self.inner(x, "output")
        return self.k(a.h), self.k(b[0]), self.k(a.rest[0])


def test_parts_of_a_submodules_result_come_from_its_call():
    found = trace(Parent())
    inputs = [n.args[0] for n in calls(found) if n.target == "k"]
    assert [root(n).name for n in inputs] == ["inner", "inner_1", "inner"]
    assert str(inputs[1].args[1]) == "last_hidden_state"
    assert not any(n.op == "get_attr" for n in found.graph.nodes)


def root(node):
    """The call that made what `node` is a part of."""
    return node if node.op == "call_module" else root(node.args[0])


class Unregistered(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.all = [self.inner, nn.Linear(4, 4), nn.Linear(4, 4)]

    def forward(self, x):
        return self.all[0](x), self.all[1](x), self.all[2](x), self.inner(x)


def test_modules_in_plain_lists_have_names_of_their_own():
    targets = names(trace(Unregistered()))
    assert targets[0] == targets[3] == "inner" and len(set(targets)) == 3


class Containers(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.heads = nn.ModuleDict({"a": nn.Linear(4, 4)})
        self.sequence = nn.Sequential(nn.Linear(4, 4), nn.ReLU())

    def forward(self, x):
        for layer in self.layers[:2]:
            x = layer(x)
        for i, layer in enumerate(self.layers):
            x = layer(x)
        for name, head in self.heads.items():
            x = head(x)
        return self.sequence[0](self.heads["a"](self.layers[-1](x)))


def test_module_containers_iterate_and_slice():
    assert names(trace(Containers())) == [
        "layers.0", "layers.1", "layers.0", "layers.1", "layers.2", "heads.a", "layers.2", "heads.a",
        "sequence.0",
    ]  # fmt: skip


class BoundActivation(nn.Module):
    def __init__(self):
        super().__init__()
        self.act = self._python

    def _python(self, x):
        return x * torch.sigmoid(x)

    def forward(self, x):
        return self.act(x)


def test_bound_method_kept_as_an_attribute_is_followed():
    assert names(trace(BoundActivation())) == ["sigmoid", "mul"]


def test_hooks_do_not_run():
    ran = []
    module = Plain()
    for place in (module, module.q):
        place.register_forward_hook(lambda *a: ran.append(1))
        place.register_forward_pre_hook(lambda *a, **k: ran.append(1), with_kwargs=True)
    assert trace(module).complete and ran == []


class Nasty(nn.Module):
    """Forbids being copied, compared, shown or looked into."""

    class Object:
        x = 1

        def __init__(self):
            self.y = 1

        def __copy__(self):
            raise RuntimeError("no copies")

        def __eq__(self, other):
            raise RuntimeError("no comparing")

        def __repr__(self):
            raise RuntimeError("no showing")

        __hash__ = None

    class Error(Exception):
        def __str__(self):
            raise RuntimeError("no text")

    def __init__(self):
        super().__init__()
        self.thing, self.lock, self.file = Nasty.Object(), threading.Lock(), open(__file__)
        self.file.close()
        self.loop = []
        self.loop.append(self.loop)

    def forward(self, x):
        with self.lock:
            if self.thing.y:
                raise Nasty.Error(self.thing)


class NoNew(Net):
    def __new__(cls, width):
        return super().__new__(cls)

    def __init__(self, width):
        super().__init__()

    def forward(self, x):
        return self.q(x)


class Slotted(Net):
    def forward(self, x):
        return self.q(x) * self.__dict__["missing"]


@pytest.mark.parametrize(
    "module",
    [
        Nasty(),
        NoNew(3),
        Slotted(),
        nn.Module(),
        nn.LazyLinear(4),
        nn.LSTM(4, 4),
        nn.MultiheadAttention(4, 2),
        nn.BatchNorm1d(7),
        nn.Embedding(3, 4),
        nn.Conv2d(3, 4, 2),
        nn.Sequential(),
        nn.ModuleList(),
        nn.ParameterList([nn.Parameter(X)]),
        torch.jit.script(nn.Linear(4, 4)),
        nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)),
        nn.utils.parametrizations.orthogonal(nn.Linear(4, 4)),
        torch.compile(nn.Linear(4, 4)),
        nn.DataParallel(nn.Linear(4, 4)),
        torch.fx.symbolic_trace(nn.Linear(4, 4)),
    ],
    ids=lambda module: type(module).__name__,
)
def test_no_module_makes_a_trace_raise(module):
    found = trace(module)
    assert found.complete or found.stopped.message


@pytest.mark.parametrize("kind", ["meta", "bfloat16", "tied", "view"])
def test_parameters_of_every_kind(kind):
    module = Plain()
    if kind == "meta":
        module = module.to("meta")
    elif kind == "bfloat16":
        module = module.bfloat16()
    elif kind == "tied":
        module.k.weight = module.q.weight
    else:
        whole = torch.zeros(8, 4)
        module.q.weight.data, module.k.weight.data = whole[:4], whole[4:]
    found = trace(module)
    assert found.complete and node(found, "q").meta["val"].dtype == module.q.weight.dtype


def test_weights_are_not_read():
    module = Plain()
    before = module.q.weight._version
    trace(module)
    assert module.q.weight._version == before and module.q.weight.device.type == "cpu"


class Moves(Net):
    def forward(self, x):
        y = x.to("cpu").cuda().to(torch.device("cpu"), torch.float64).cpu()
        return y + torch.ones(4, device="cuda") + torch.zeros(4).to(x.device)


def test_moves_between_devices_are_followed():
    found = trace(Moves())
    assert found.complete and found.graph.output_node().args[0].meta["val"].dtype == torch.float64


class Namespaces(Net):
    def forward(self, x):
        mine = {name: value for name, value in locals().items() if name != "self"}
        return [self.q(value) for value in mine.values()]


def test_forward_that_asks_for_its_names_sees_its_own():
    found = trace(Namespaces())
    assert found.complete and names(found) == ["q"]
    assert any("asks for its own names" in a.text for a in found.assumptions)


def test_decorated_forward_is_traced_inside_its_wrappers():
    class A(Net):
        @torch.no_grad()
        def forward(self, x):
            return self.q(x)

    found = trace(A())
    assert names(found) == ["q"] and len(found.source.wrappers) == 1


def test_instance_forward_that_is_not_bound_stops_at_once():
    module = Plain()
    module.forward = lambda x: x
    assert "forward of its own" in trace(module).stopped.message


def test_child_with_a_forward_of_its_own_elsewhere_never_reaches_the_real_one():
    module, ran = Plain(), []
    module.q.forward = lambda x: ran.append(x) or x
    found = trace(module)
    assert not found.complete and ran == []
    other = nn.Linear(4, 4)
    module.q.forward = other.forward
    assert not trace(module).complete


def test_traces_of_one_module_are_equal():
    module = Plain()
    assert str(trace(module).graph) == str(trace(module).graph) == str(trace(copy.deepcopy(module)).graph)


def test_module_mode_decides_the_branch():
    class A(Net):
        def forward(self, x):
            return F.dropout(self.q(x), 0.5, self.training) if self.training else self.k(x)

    assert names(trace(A().train())) == ["q", "dropout"] and names(trace(A().eval())) == ["k"]
