"""What the recorder makes of a call: its operator, its arguments, one opaque node for a leaf."""

import dataclasses
import operator

import pytest
import torch
import torch.nn as nn

from fusekit.tracing import is_leaf_call, trace
from fusekit.tracing.leaf import AttentionTable, LeafCall, is_attention_function
from fusekit.tracing.recorder import Recorder, parts_of, tensors_in


def attention(module, query, key, value, mask=None, scaling=1.0):
    query.add_(1)
    return query.transpose(1, 2), None


def unreadable(module, query, key, value):
    return query.numpy()


class Attends(nn.Module):
    def forward(self, x):
        first, weights = attention(self, x, x * 2, value=x, scaling=3.0)
        if weights is None:
            return unreadable(self, query=x, key=x, value=x)[0], first
        return first


def test_attention_is_a_leaf_in_every_way_of_calling_it():
    found = trace(Attends(), torch.empty(2, 3, 4, 5))
    assert found.complete, found.stopped
    first, second = [node for node in found.graph.nodes if is_leaf_call(node)]
    assert [str(arg) for arg in first.args] == ["x", "mul"] and list(first.kwargs) == ["value"]
    assert first.meta["written"] == ["x"]
    assert list(second.kwargs) == ["query", "key", "value"]
    assert second.meta["val"][0].shape == (2, 4, 3, 5)  # as attention functions return it


def test_table_that_lacks_a_function_says_so():
    table = AttentionTable({"eager": attention}, lambda found: found)
    assert table.get("none") is None and table.get("eager") is attention
    assert list(table) == ["eager"] and len(table) == 1 and "eager" in table and "none" not in table
    with pytest.raises(KeyError):
        table["none"]


def test_leaf_of_a_leaf_is_the_leaf():
    recorder = Recorder()
    leaf = recorder.leaf(attention, True)
    assert recorder.leaf(leaf, True) is leaf and repr(LeafCall(attention)) == "attention"
    assert is_attention_function(attention) and not is_attention_function(print)


@pytest.mark.parametrize(
    ("make", "op", "target"),
    [
        (lambda x: x + 1, "call_function", operator.add),
        (lambda x: 1 + x, "call_function", operator.add),
        (lambda x: x.add(1), "call_method", "add"),
        (lambda x: torch.add(x, 1), "call_function", torch.add),
        (lambda x: x @ x, "call_function", operator.matmul),
        (lambda x: -x, "call_function", operator.neg),
        (lambda x: x[0], "call_function", operator.getitem),
        (lambda x: x == 1, "call_function", operator.eq),
        (lambda x: x.mT, "call_function", getattr),
        (lambda x: nn.functional.silu(x), "call_function", nn.functional.silu),
    ],
)
def test_call_is_spelled_as_in_the_source(make, op, target):
    class A(nn.Module):
        def forward(self, x):
            return make(x)

    (node,) = [n for n in trace(A(), torch.empty(3, 3)).graph.nodes if n.op.startswith("call")]
    assert (node.op, node.target) == (op, target)


@pytest.mark.parametrize(
    ("make", "first"), [(lambda x: 1 - x, 1), (lambda x: 2**x, 2), (lambda x: x - 1, None)]
)
def test_operands_stand_in_the_order_of_the_source(make, first):
    class A(nn.Module):
        def forward(self, x):
            return make(x)

    node = [n for n in trace(A()).graph.nodes if n.op.startswith("call")][-1]
    assert node.args[0] == first if first is not None else node.args[1] == 1


def test_metadata_makes_no_node():
    class A(nn.Module):
        def forward(self, x):
            _ = x.shape, x.dim(), x.dtype, x.is_contiguous(), len(x), x.numel(), x.requires_grad, x.device
            return x

    assert [n.op for n in trace(A()).graph.nodes] == ["placeholder", "output"]


@dataclasses.dataclass
class Pair:
    a: object
    b: object


def test_tensors_are_found_in_whatever_holds_them():
    x, y = torch.ones(1), torch.ones(1)
    for value in ([x, y], {"a": x, "b": (y,)}, Pair(x, [y]), (slice(x, y),)):
        assert [t is w for t, w in zip(tensors_in(value), (x, y), strict=True)] == [True, True]
    assert parts_of(Pair) == [] and tensors_in("x") == []


def test_arguments_keep_what_a_graph_can_hold():
    class A(nn.Module):
        def forward(self, x):
            return x.contiguous(memory_format=torch.preserve_format).to(torch.float64).clone()

    found = trace(A())
    assert found.graph.find_nodes(op="call_method", target="contiguous")[0].kwargs == {
        "memory_format": torch.preserve_format
    }
    assert Recorder().argument({"a": [torch.Size([1]), object(), slice(1, None)]}) == {
        "a": [(1,), None, slice(1, None, None)]
    }


def test_span_is_none_outside_of_a_forward():
    recorder = Recorder()
    with recorder:
        torch.ones(1, device="meta") + 1
    assert [node.meta["span"] for node in recorder.graph.nodes if node.op.startswith("call")] == [None, None]
