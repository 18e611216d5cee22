"""Spans of what no operator makes: parameters, attributes of self, the result."""

import torch
import torch.nn as nn

from fusekit.forward import source, text_at
from fusekit.fusions.view import ForwardView
from fusekit.tracing import trace


def texts(module, *args, **kwargs):
    """Of each placeholder, attribute and output the source text at its span."""
    found = trace(module, *args, **kwargs)
    assert found.complete, found.stopped
    nodes = [n for n in found.graph.nodes if n.op in ("placeholder", "get_attr", "output")]
    assert all(node.meta["direct"] is False for node in nodes)
    return [
        (str(n.target), n.meta["span"] and text_at(found.source.file_text, n.meta["span"])) for n in nodes
    ]


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight, self.other = nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(4))

    def shift(self, x):
        return x + self.other

    def forward(self, x: torch.Tensor, *rest, y=None, **named):
        def inner(z):
            return z

        x = self.shift(x) * self.weight + inner(self.weight)
        return x * y + rest[0] + named["z"]


def test_inputs_attributes_and_output_have_spans():
    x = torch.empty(2, 4)
    assert texts(Scaled(), x, x.clone(), y=x.clone(), z=x.clone()) == [
        ("x", "x: torch.Tensor"),
        ("rest", "rest"),
        ("y", "y"),
        ("named", "named"),
        ("other", None),  # a method reads it
        ("weight", "self.weight"),
        ("output", 'x * y + rest[0] + named["z"]'),
    ]


def test_first_read_of_an_attribute_is_its_span():
    found = trace(Scaled(), torch.empty(2, 4), torch.empty(4), y=torch.empty(4), z=torch.empty(4))
    (weight,) = found.graph.find_nodes(op="get_attr", target="weight")
    first = Scaled.forward.__code__.co_firstlineno + 4
    assert (weight.meta["span"].line, weight.meta["span"].column) == (first, 28)


class ReturnsTwice(nn.Module):
    def forward(self, x):
        if x.dim() > 9:
            return x
        return x + 1


class ReturnsNothing(nn.Module):
    def forward(self, x):
        x + 1


class Returns(nn.Module):
    def forward(self, x):
        y = x + 1
        return y


def test_output_has_no_span_where_it_is_not_one_returned_expression():
    assert texts(ReturnsTwice())[-1] == texts(ReturnsNothing())[-1] == ("output", None)
    assert texts(Returns())[-1] == ("output", "y")


def test_values_without_an_operator_are_no_nodes_of_an_expression():
    module = Scaled()
    x = torch.empty(2, 4)
    view = ForwardView(module, source(module), trace(module, x, x.clone(), y=x.clone(), z=x.clone()))
    ops = {node.op for nodes in view.nodes_at.values() for node in nodes}
    assert ops and not ops & {"placeholder", "get_attr", "output"}
    for node in view.trace.graph.nodes:
        if node.op in ("placeholder", "get_attr", "output"):
            assert view.expression(node) is None and view.expression_at(node) is None
