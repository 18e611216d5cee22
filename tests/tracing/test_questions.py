"""Questions about a graph: operators in their spellings, linears up and down the dataflow."""

import operator

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import fx
from transformers.pytorch_utils import Conv1D

from fusekit.tracing import (
    as_leaf_call,
    downstream_linear,
    find_node,
    is_fn,
    is_linear,
    is_method,
    is_op,
    output_value,
    peel,
    returned_linear,
    trace,
    upstream_linear,
)

leaf = as_leaf_call(torch.sin)


def graph_of(function) -> fx.Graph:
    return fx.symbolic_trace(function).graph


class Leaves(fx.Tracer):
    """Every submodule one node, as in fusekit's trace."""

    def is_leaf_module(self, module, name):
        return True


def calls(graph):
    return [node for node in graph.nodes if node.op.startswith("call")]


class Net(nn.Module):
    """Three linears, to be given a forward."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(4, 4) for _ in range(3))
        self.turned = Conv1D(4, 4)
        self.norm, self.act = nn.LayerNorm(4), nn.SiLU()
        self.scale = nn.Parameter(torch.randn(4))


def net(forward):
    """A Net with this forward and its graph, once by torch.fx and once by fusekit."""
    module = type("Net", (Net,), {"forward": forward})()
    return module, Leaves().trace(module), trace(module).graph


# -- single nodes -----------------------------------------------------------------------------


def test_find_node_gives_the_first_in_the_order_of_the_graph_or_none():
    graph = graph_of(lambda x: torch.cos(torch.sin(x)) + torch.sin(x))
    assert find_node(graph, lambda node: node.target is torch.sin).name == "sin"
    assert find_node(graph, lambda node: node.target is torch.tan) is None


def test_output_value_is_what_is_returned_or_none_where_the_trace_stopped():
    graph = graph_of(lambda x: [torch.sin(x), {"y": x}])
    value = output_value(graph)
    assert [value[0].name, value[1]["y"].name] == ["sin", "x"]
    assert output_value(graph_of(lambda x: None)) is None

    class Stops(nn.Module):
        def forward(self, x):
            if x.sum() > 0:
                return x
            return -x

    found = trace(Stops())
    assert not found.complete and output_value(found.graph) is None


def test_is_fn_is_of_exactly_that_target():
    by_torch, by_operator, by_method = calls(graph_of(lambda x: (torch.mul(x, 2) * 3).mul(4)))
    assert is_fn(by_torch, torch.mul) and is_fn(by_operator, operator.mul)
    assert not is_fn(by_torch, operator.mul) and not is_fn(by_operator, torch.mul)
    assert not any(is_fn(by_method, target) for target in ("mul", torch.mul, torch.Tensor.mul))


def test_is_method_is_of_that_name_alone():
    by_torch, by_method = calls(graph_of(lambda x: torch.mul(x, 2).mul(3)))
    assert is_method(by_method, "mul") and not is_method(by_method, "add")
    assert not is_method(by_torch, "mul")


def test_is_op_knows_all_four_spellings():
    def spelled(x):
        x = torch.relu(x)
        x = F.relu(x)
        x = x.relu()
        x = torch.mul(x, 2)
        return operator.mul(x, 3)

    graph = graph_of(spelled)
    graph.inserting_before(next(iter(reversed(graph.nodes)))).__enter__()
    last = graph.call_function(torch.Tensor.mul, (calls(graph)[-1], 4))
    assert [is_op(node, "relu") for node in calls(graph)] == [True] * 3 + [False] * 3
    assert [is_op(node, "mul") for node in calls(graph)] == [False] * 3 + [True] * 3
    assert is_op(last, "mul") and not any(is_op(node, "no_such_name") for node in graph.nodes)


def test_is_op_is_not_deceived_by_the_names_of_placeholders_submodules_and_leaves():
    class Named(nn.Module):
        def __init__(self):
            super().__init__()
            self.mul = nn.ReLU()

        def forward(self, add):
            return leaf(self.mul(add))

    graph = Leaves().trace(Named())
    assert [str(node.target) for node in graph.nodes] == ["add", "mul", "sin", "output"]
    assert not any(is_op(node, name) for node in graph.nodes for name in ("add", "mul", "sin", "output"))


def test_is_linear_is_a_call_of_an_nn_linear_or_a_subclass():
    class Special(nn.Linear):
        pass

    module = nn.Sequential(nn.Linear(2, 2), Special(2, 2), Conv1D(2, 2), nn.ReLU())
    for graph in (Leaves().trace(module), trace(module).graph):
        nodes = [node for node in graph.nodes if node.op != "output"]
        assert [is_linear(node, module) for node in nodes] == [False, True, True, False, False]
    assert not is_linear(nodes[1], nn.Module())  # not a submodule of this one


def test_peel_takes_off_casts_of_dtype_and_nothing_else():
    def forward(x, y):
        base = x * 2
        return base.to(torch.float32).float().double().half().bfloat16().type_as(y).type(torch.float32), base

    value, base = output_value(graph_of(forward))
    assert peel(value) is base and peel(base) is base
    for other in (lambda x: x.contiguous(), lambda x: x.view(-1), lambda x: x.cpu(), lambda x: x + 1):
        node = output_value(graph_of(other))
        assert peel(node) is node
    assert peel(3.0) == 3.0 and peel(None) is None


def test_peel_never_goes_on_into_the_other_tensor_of_a_cast():
    assert peel(output_value(graph_of(lambda x, y: x.type_as(y)))).name == "x"
    assert peel(output_value(graph_of(lambda x, y: x.to(y)))).name == "x"


# -- upstream ---------------------------------------------------------------------------------


def test_upstream_linear_passes_steps_that_one_value_enters():
    def forward(self, x):
        return self.norm(torch.relu(self.a(x).float().view(-1, 4) * 2).chunk(2)[0])

    for graph in net(forward)[1:]:
        assert upstream_linear(output_value(graph), net(forward)[0]).target == "a"


def test_upstream_linear_is_the_linear_itself_and_the_last_of_several():
    module, *graphs = net(lambda self, x: self.b(self.a(x)))
    for graph in graphs:
        found = output_value(graph)
        assert upstream_linear(found, module) is found and found.target == "b"


@pytest.mark.parametrize(
    "forward",
    [
        lambda self, x: self.a(x) + self.b(x),
        lambda self, x: self.a(x) * self.scale,
        lambda self, x: leaf(self.a(x)),
        lambda self, x: x.float(),
        lambda self, x: (self.a(x), 1),
    ],
    ids=["two values", "a parameter enters", "a leaf call", "no linear", "a tuple"],
)
def test_upstream_linear_is_none_where_that_is_not_all(forward):
    module, *graphs = net(forward)
    assert [upstream_linear(output_value(graph), module) for graph in graphs] == [None, None]


def test_upstream_linear_of_what_is_no_node_is_none():
    assert upstream_linear(None, Net()) is None and upstream_linear(2.0, Net()) is None


# -- downstream -------------------------------------------------------------------------------


def start(graph):
    return find_node(graph, lambda node: is_op(node, "sin"))


@pytest.mark.parametrize(
    "forward",
    [
        lambda self, x: self.c(torch.sin(x)),
        lambda self, x: self.c(torch.sin(x).float().to(x.dtype)),
        lambda self, x: self.c(2 * torch.sin(x) / 3),
        lambda self, x: self.c(-torch.sin(x) * self.scale),
        lambda self, x: self.c(self.scale * torch.sin(x).half()),
        lambda self, x: self.b(self.c(torch.sin(x))),
    ],
)
def test_downstream_linear_walks_through_casts_and_scalings(forward):
    module, *graphs = net(forward)
    assert [downstream_linear(start(graph), module).target for graph in graphs] == ["c", "c"]


@pytest.mark.parametrize(
    "forward",
    [
        lambda self, x: self.c(leaf(torch.sin(x))),
        lambda self, x: self.c(self.act(torch.sin(x))),
        lambda self, x: self.c(torch.sin(x) + 1),
        lambda self, x: self.c(torch.sin(x) * x),
        lambda self, x: self.c(2 / torch.sin(x)),
        lambda self, x: self.c(x.type_as(torch.sin(x))),
        lambda self, x: torch.sin(x),
    ],
    ids=["leaf", "activation", "sum", "product of data", "divided by it", "cast to its dtype", "none"],
)
def test_downstream_linear_walks_through_nothing_else(forward):
    module, *graphs = net(forward)
    assert [downstream_linear(start(graph), module) for graph in graphs] == [None, None]


def test_a_square_is_no_scaling_nor_is_a_product_with_what_was_made_of_it():
    def square(self, x):
        y = torch.sin(x)
        return self.c(y * y)

    def of_itself(self, x):
        y = torch.sin(x)
        return self.c(y.float() * torch.cos(y))

    for forward in (square, of_itself):
        module, *graphs = net(forward)
        assert [downstream_linear(start(graph), module) for graph in graphs] == [None, None]


def test_downstream_linear_is_the_nearest_then_the_first():
    def nearest(self, x):
        y = torch.sin(x)
        return self.a(y * 2), self.b(y)

    def first(self, x):
        y = torch.sin(x)
        return self.b(y), self.a(y)

    for forward in (nearest, first):
        module, *graphs = net(forward)
        assert [downstream_linear(start(graph), module).target for graph in graphs] == ["b", "b"]


# -- returned ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("forward", "name"),
    [
        (lambda self, x: self.a(x), "a"),
        (lambda self, x: self.b(self.a(x)).float(), "b"),
        (lambda self, x: (self.a(x), self.b(x)), "a"),
        (lambda self, x: [(self.b(x), x), self.a(x)], "b"),
        (lambda self, x: {"x": self.c(x), "y": self.a(x)}, "c"),
        (lambda self, x: (x, self.a(x)), None),
        (lambda self, x: (None, self.a(x)), None),
        (lambda self, x: x + self.a(x), None),
        (lambda self, x: (), None),
    ],
)
def test_returned_linear_makes_the_first_value_returned(forward, name):
    module, *graphs = net(forward)
    assert [returned_linear(graph, module) for graph in graphs] == [name, name]


def test_returned_linear_of_a_trace_that_stopped_is_none():
    def forward(self, x):
        y = self.a(x)
        return y if x.sum() > 0 else -y

    module = type("Net", (Net,), {"forward": forward})()
    assert returned_linear(trace(module).graph, module) is None


def test_conv1d_counts_as_a_linear_on_the_way_but_is_no_nn_linear():
    def forward(self, x):
        return self.turned(torch.sin(x)).float()

    module, _, graph = net(forward)
    assert upstream_linear(output_value(graph), module).target == "turned"
    assert downstream_linear(start(graph), module).target == "turned"
    assert returned_linear(graph, module) == "turned"
    assert not any(is_linear(node, module) for node in graph.nodes)

    class Conv1D(nn.Module):  # another library's
        def forward(self, x):
            return x

    module.turned = Conv1D()
    assert returned_linear(graph, module) is None
