"""Calls that a trace keeps whole: of any function, and of every attention function of Transformers."""

import subprocess
import sys
import threading

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import fx
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, AttentionInterface

import fusekit as fk
from fusekit import FusekitError
from fusekit.tracing import as_leaf_call, is_leaf_call, leaf_attention_interfaces, trace


def pair(x, other=None, scale=1.0):
    if x.shape[0] > 0:  # torch.fx does not get through here
        return x * scale, other
    return x, other


def leaves(graph):
    return [node for node in graph.nodes if is_leaf_call(node)]


def outer(function):
    class Outer(nn.Module):
        def forward(self, x, y):
            return function(x, y)

    return Outer()


def both(function):
    """Its graph by `symbolic_trace` and by fusekit."""
    module = outer(function)
    found = trace(module, torch.empty(2, 3), torch.empty(2, 3))
    assert found.complete, found.stopped
    return fx.symbolic_trace(module).graph, found.graph


def test_a_call_is_one_opaque_node_that_only_proxies_enter():
    leaf = as_leaf_call(pair)
    for graph in both(lambda x, y: leaf(x, None, 2.0)):
        (node,) = leaves(graph)
        assert node.op == "call_function" and node.target.function is pair
        assert [str(arg) for arg in node.args] == ["x"] and node.kwargs == {}
    for graph in both(lambda x, y: leaf(y, other=x, scale=3.0)):
        (node,) = leaves(graph)
        assert [str(arg) for arg in node.args] == ["y"]
        assert {name: str(arg) for name, arg in node.kwargs.items()} == {"other": "x"}


def test_what_cannot_enter_a_graph_is_dropped_by_position_and_by_name():
    leaf = as_leaf_call(lambda anything, x, *, other: x)
    graph = fx.symbolic_trace(lambda x: leaf(nn.Linear(2, 2), x, other=object())).graph
    (node,) = leaves(graph)
    assert [str(arg) for arg in node.args] == ["x"] and node.kwargs == {}


def test_proxies_in_lists_tuples_and_dicts_enter_too():
    leaf = as_leaf_call(lambda *args, **kwargs: args)
    graph = fx.symbolic_trace(lambda x, y: leaf([x, object(), (y, 1)], 2, of={"a": x, "b": 3})).graph
    (node,) = leaves(graph)
    assert str(node.args) == "([x, (y,)],)" and str(node.kwargs) == "{'of': {'a': x}}"


@pytest.mark.parametrize("length", [1, 2, 3])
def test_length_makes_every_way_of_unpacking_trace(length):
    leaf = as_leaf_call(lambda x: (x,) * length, length)

    def unpack(x):
        first, *rest = leaf(x)
        return [first, *rest], len(leaf(x))

    graph = fx.symbolic_trace(unpack).graph
    output = next(node for node in graph.nodes if node.op == "output")
    assert len(output.args[0][0]) == length == output.args[0][1]
    assert all(node.args[0] is leaves(graph)[0] for node in output.args[0][0])


def test_without_a_length_the_result_is_one_proxy():
    leaf = as_leaf_call(pair)
    assert isinstance(outer_result(leaf), fx.Proxy)
    with pytest.raises(Exception, match="cannot be iterated"):
        fx.symbolic_trace(lambda x: list(leaf(x)))


def outer_result(leaf):
    found = []
    fx.symbolic_trace(lambda x: found.append(leaf(x)))
    return found[0]


def test_without_proxies_it_simply_calls():
    x = torch.randn(3) - 2
    assert as_leaf_call(lambda *args, **kwargs: (args, kwargs))(x, 1, y=2) == ((x, 1), {"y": 2})
    result, other = as_leaf_call(pair, 5)(x.abs(), other="other", scale=2.0)  # the length is not asked
    assert torch.equal(result, x.abs() * 2) and other == "other"
    with pytest.raises(TypeError):
        as_leaf_call(pair)()


def test_other_modes_see_what_a_leaf_does():
    with torch.device("meta"):
        assert as_leaf_call(lambda x: torch.zeros(2))(torch.ones(2)).is_meta


def test_the_same_wrapper_is_recorded_again_when_a_graph_is_traced_again():
    leaf = as_leaf_call(torch.cos)
    once = fx.symbolic_trace(lambda x: leaf(x) + 1)
    again = fx.symbolic_trace(once)
    assert [node.target for node in leaves(again.graph)] == [leaf]
    assert torch.equal(again(torch.ones(1)), torch.ones(1).cos() + 1)


@pytest.mark.parametrize("fn", [torch.add, F.softmax, lambda x: x, nn.ReLU(), len, print])
def test_whatever_can_be_called_is_a_leaf_that_code_can_be_written_for(fn):
    leaf = as_leaf_call(fn)
    assert leaf.__name__.isidentifier()
    module = fx.symbolic_trace(lambda x: leaf(x))
    assert leaves(module.graph) and leaf.__name__ in module.code


def counted(x):
    CALLS.append(x.is_meta)
    return torch.zeros(2, device="cpu") + x.sum().cos()


CALLS = []
counted_leaf = as_leaf_call(counted)
inside = as_leaf_call(lambda x: x.mul_(2))
around = as_leaf_call(lambda x: inside(x))


class Counts(nn.Module):
    def forward(self, x):
        return counted_leaf(x) + 1


class Nests(nn.Module):
    def forward(self, x):
        return around(x) + x


def test_fusekit_does_not_look_inside_nor_run_twice():
    CALLS.clear()
    found = trace(Counts(), torch.empty(2))
    assert found.complete, found.stopped
    assert CALLS == [True]
    assert [node.name for node in found.graph.nodes] == ["x", "counted", "add", "output"]
    (node,) = leaves(found.graph)
    assert node.target is counted_leaf and node.meta["direct"] and node.meta["span"].line


def test_fusekit_sees_what_a_leaf_wrote_and_records_none_inside_of_another():
    (node,) = leaves(trace(Nests(), torch.empty(2)).graph)
    assert node.target is around and node.meta["written"] == ["x"]


def test_after_a_trace_and_in_other_threads_leaves_simply_call():
    class Asks(nn.Module):
        def forward(self, x):
            thread = threading.Thread(target=lambda: RESULTS.append(counted_leaf(torch.ones(2))))
            thread.start()
            thread.join()
            raise ValueError("and stops")

    RESULTS = []
    CALLS.clear()
    assert not trace(Asks(), torch.empty(2)).complete
    assert CALLS == [False] and counted_leaf(torch.ones(2)).shape == (2,)


writer = as_leaf_call(lambda x: x.mul_(2))
plain = as_leaf_call(lambda x: x * 2)


class Between(nn.Module):
    def __init__(self, leaf):
        super().__init__()
        self.a, self.b, self.leaf = nn.Linear(4, 4), nn.Linear(4, 4), leaf

    def forward(self, x):
        a = self.a(x)
        y = self.leaf(x)
        return a + self.b(x) + y


@pytest.mark.parametrize("leaf", [writer, plain])
def test_no_merge_moves_across_a_leaf_that_may_do_anything(leaf):
    plan = fk.plan(Between(leaf))
    assert plan.sites == () and plan.refusals[0].fusion == "columns"


class Folds(nn.Module):
    """What a leaf returns depends on an argument that does not enter the graph."""

    def __init__(self, width):
        super().__init__()
        self.width = width
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        a, b = self.a(x), self.b(x)
        return fold(a, self.width).sum() + b.sum()


fold = as_leaf_call(lambda x, width: x.view(-1, width))


def test_an_argument_that_a_leaf_alone_reads_tells_instances_apart():
    assert len(fk.plan(Folds(4)).sites) == 1
    assert fk.plan(Folds(3)).sites == ()  # 56 numbers are no rows of 3
    assert len(fk.plan(Folds(4)).sites) == 1


@pytest.mark.parametrize(
    ("fn", "length", "message"),
    [
        (3, None, "takes a function, not int"),
        (pair, 0, "length=0: give the number"),
        (pair, True, "length=True"),
        (pair, 2.0, "length=2.0"),
    ],
)
def test_bad_input_is_an_error_that_names_it(fn, length, message):
    with pytest.raises(FusekitError, match=message):
        as_leaf_call(fn, length)


# -- attention interfaces ---------------------------------------------------------------------


def attention_of_llama(implementation):
    config = LlamaConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4, vocab_size=60
    )
    config._attn_implementation = implementation
    return LlamaForCausalLM(config).model.layers[0].self_attn


class Sizes(fx.Tracer):
    """A user's own tracer: shapes are known, submodules are leaves."""

    def is_leaf_module(self, module, name):
        return True


class Standing(nn.Module):
    """The look-up and the call of an attention as Transformers writes them."""

    def __init__(self, implementation):
        super().__init__()
        self.implementation = implementation

    def forward(self, q, k, v):
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.implementation, pair)
        output, weights = attend(self, q, k, v, None, scaling=2.0)
        return output, weights


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_looked_up_attention_is_a_leaf_of_two_values(implementation):
    with leaf_attention_interfaces():
        graph = Sizes().trace(Standing(implementation))
    (node,) = leaves(graph)
    assert node.target.attention and [str(arg) for arg in node.args] == ["q", "k", "v"]
    output = next(node for node in graph.nodes if node.op == "output")
    assert [(item.args[0], item.args[1]) for item in output.args[0]] == [(node, 0), (node, 1)]


def test_every_way_of_looking_up_yields_a_leaf_of_the_function_itself():
    sdpa = ALL_ATTENTION_FUNCTIONS["sdpa"]
    with leaf_attention_interfaces():
        found = [
            ALL_ATTENTION_FUNCTIONS["sdpa"],
            ALL_ATTENTION_FUNCTIONS.get("sdpa"),
            ALL_ATTENTION_FUNCTIONS.get_interface("sdpa", pair),
            AttentionInterface()["sdpa"],
        ]
        assert [leaf.function for leaf in found] == [sdpa] * 4  # not a leaf of a leaf
        assert ALL_ATTENTION_FUNCTIONS.get("none") is None
        with pytest.raises(KeyError):
            ALL_ATTENTION_FUNCTIONS["none"]


def test_models_still_run_while_it_is_open():
    attention = attention_of_llama("sdpa")
    x, rotary = torch.randn(1, 3, 32), (torch.randn(1, 3, 8), torch.randn(1, 3, 8))
    want = attention(x, rotary, None)[0]
    with leaf_attention_interfaces():
        assert torch.equal(attention(x, rotary, None)[0], want)


def table_state():
    return {cls: dict(vars(cls)) for cls in AttentionInterface.__mro__[:-1]}


def test_it_is_restored_exactly_also_after_an_exception():
    before, own = table_state(), dict(vars(ALL_ATTENTION_FUNCTIONS))
    with leaf_attention_interfaces():
        assert table_state() != before
    assert table_state() == before and vars(ALL_ATTENTION_FUNCTIONS) == own
    with pytest.raises(ZeroDivisionError):
        with leaf_attention_interfaces():
            1 / 0
    assert table_state() == before


def test_contexts_nest_and_may_end_in_any_order():
    before = table_state()
    first, second = leaf_attention_interfaces(), leaf_attention_interfaces()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert is_leaf_function(ALL_ATTENTION_FUNCTIONS["sdpa"])
    second.__exit__(None, None, None)
    assert table_state() == before


def is_leaf_function(found):
    return type(found).__name__ == "LeafCall"


def test_it_holds_for_the_whole_process():
    seen = []
    with leaf_attention_interfaces():
        thread = threading.Thread(target=lambda: seen.append(ALL_ATTENTION_FUNCTIONS["sdpa"]))
        thread.start()
        thread.join()
    assert is_leaf_function(seen[0])


def test_transformers_is_imported_only_when_it_is_entered():
    code = (
        "import sys, fusekit.tracing as t\n"
        "context = t.leaf_attention_interfaces()\n"
        "assert 'transformers' not in sys.modules\n"
        "with context: assert 'transformers' in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
