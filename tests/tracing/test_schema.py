"""What operators write and return, by their schemas, and the table of fresh ones run for real."""

import operator

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import fx

from fusekit.forward.operators import FRESH, operator_effect
from fusekit.tracing import trace
from fusekit.tracing.schema import node_effect, operator_name

SHAPES = [(), (1,), (1, 1), (3,), (1, 3), (3, 1), (2, 3), (0,), (0, 3), (3, 0), (1, 1, 1), (1, 2, 3)]


def inputs():
    """Degenerate tensors: one element, none, ones, zeros; contiguous and not; floats and integers."""
    for shape in SHAPES:
        yield torch.ones(shape)
        yield torch.zeros(shape)
        yield torch.ones(shape, dtype=torch.bfloat16)
        yield torch.ones((2, *shape))[0]
        if len(shape) > 1:
            yield torch.ones(shape).transpose(0, 1)
            yield torch.ones(1).expand(shape)


def square(x):
    return torch.ones(x.shape[-1], x.shape[-1], dtype=x.dtype)


CALLS = {
    "where": [
        lambda x: torch.where(x > 0, x, x),
        lambda x: torch.where(x > 0, x, 0.0),
        lambda x: torch.where(x > 0, 1.0, x),
        lambda x: torch.where(torch.ones_like(x, dtype=torch.bool), x, x),
    ],
    "cosine_similarity": [lambda x: F.cosine_similarity(x, x, -1)],
    "cross_entropy_loss": [
        lambda x: F.cross_entropy(x, torch.zeros(x.shape[:1], dtype=torch.long), reduction=reduction)
        for reduction in ("none", "mean", "sum")
    ]
    + [lambda x: F.cross_entropy(x, x, reduction="none")],
    "layer_norm": [
        lambda x: F.layer_norm(x, x.shape[-1:]),
        lambda x: F.layer_norm(x, x.shape[-1:], x.new_ones(x.shape[-1:]), x.new_zeros(x.shape[-1:])),
    ],
    "rms_norm": [
        lambda x: F.rms_norm(x, x.shape[-1:]),
        lambda x: F.rms_norm(x, x.shape[-1:], x.new_ones(x.shape[-1:])),
    ],
    "linear": [lambda x: F.linear(x, square(x)), lambda x: F.linear(x, square(x), x.new_zeros(x.shape[-1:]))],
    "log_softmax": [lambda x: F.log_softmax(x, -1), lambda x: torch.log_softmax(x, 0, dtype=x.dtype)],
    "softmax": [
        lambda x: F.softmax(x, -1),
        lambda x: torch.softmax(x, 0, dtype=x.dtype),
        lambda x: x.softmax(-1),
    ],
    "matmul": [
        lambda x: torch.matmul(x, square(x)),
        lambda x: x @ x,
        lambda x: x @ x.mT,
        lambda x: x.matmul(torch.eye(x.shape[-1], dtype=x.dtype)),
    ],
    "one_hot": [lambda x: F.one_hot(x.long(), 1), lambda x: F.one_hot(x.long(), 5)],
    "rsub": [lambda x: torch.rsub(x, 0), lambda x: torch.rsub(x, torch.zeros_like(x)), lambda x: 0 - x],
    "scaled_dot_product_attention": [
        lambda x: F.scaled_dot_product_attention(x, x, x),
        lambda x: F.scaled_dot_product_attention(x[None, None], x[None, None], x[None, None], is_causal=True),
        lambda x: F.scaled_dot_product_attention(x[None, None], x[None, None], x[None, None]),
    ],
    "stack": [lambda x: torch.stack([x]), lambda x: torch.stack((x, x), -1)],
    "__and__": [lambda x: x.bool() & True, lambda x: x.long() & x.long()],
    "__or__": [lambda x: x.bool() | False, lambda x: x.long() | x.long()],
    "__xor__": [lambda x: x.bool() ^ False, lambda x: x.long() ^ x.long()],
}


def test_every_fresh_operator_is_fuzzed():
    assert set(CALLS) == FRESH


@pytest.mark.parametrize("name", sorted(CALLS))
def test_fresh_operators_never_share_storage_with_an_input(name):
    ran = 0
    for x in inputs():
        for call in CALLS[name]:
            kept: list = []
            try:
                with _Inputs(kept):
                    result = call(x)
            except (RuntimeError, ValueError, IndexError):
                continue
            ran += 1
            storages = {tensor.untyped_storage()._cdata for tensor in (x, *kept)}
            assert result.untyped_storage()._cdata not in storages, (tuple(x.shape), x.dtype)
    assert ran >= 20


class _Inputs(torch.overrides.TorchFunctionMode):
    """Keeps every tensor that an operator is given."""

    def __init__(self, kept):
        super().__init__()
        self.kept = kept

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.kept += [value for value in args if isinstance(value, torch.Tensor)]
        return func(*args, **(kwargs or {}))


WRITES = "mul_ add_ copy_ index_put_ __iand__ requires_grad_"
VIEWS = (
    "view transpose expand slice permute unsqueeze detach unbind chunk split select to reshape contiguous "
    "flatten reshape_as"
)
FRESH_ONES = "mul add cat clone rsqrt mean silu linear softmax"
MAYBE = "dropout type_as einsum meshgrid atleast_2d sum_to_size broadcast_tensors"


@pytest.mark.parametrize(
    ("name", "writes", "returns"),
    [
        *((name, True, "view") for name in WRITES.split()),
        *((name, False, "view") for name in VIEWS.split()),
        *((name, False, "fresh") for name in FRESH_ONES.split()),
        *((name, False, "may be a view") for name in MAYBE.split()),
    ],
)
def test_effect_of_an_operator(name, writes, returns):
    effect = operator_effect(name)
    assert effect is not None and effect.writes is writes
    # A view that only may be one is no contradiction.
    assert effect.returns == returns or {effect.returns, returns} == {"view", "may be a view"}


def test_name_without_an_operator_has_no_effect():
    assert operator_effect("no_such_operator") is None


def call_method(name: str) -> fx.Node:
    graph = fx.Graph()
    return graph.call_method(name, (graph.placeholder("x"),))


IN_PLACE = [
    name
    for name in dir(torch.Tensor)
    if (name.endswith("_") and not name.endswith("__")) or (name.startswith("__i") and name != "__init__")
]
NO_WRITES = {
    "__index__", "__int__", "__invert__", "__init_subclass__", "__iter__",
    "_is_view", "_typed_storage_", "__init__",
}  # fmt: skip


@pytest.mark.parametrize("name", [name for name in IN_PLACE if name not in NO_WRITES])
def test_every_in_place_method_of_a_tensor_is_reported_as_writing(name):
    effect = node_effect(call_method(name))
    assert effect is not None and effect.writes, effect


@pytest.mark.parametrize(
    ("target", "args", "kwargs", "writes"),
    [
        (F.relu, (), {"inplace": True}, True),
        (F.relu, (True,), {}, True),
        (F.relu, (), {}, False),
        (torch.add, (1,), {"out": "x"}, True),
        (torch.add, (1,), {}, False),
        (torch.relu_, (), {}, True),
        (operator.iadd, (1,), {}, True),
        (operator.ipow, (1,), {}, True),
        (operator.ifloordiv, (1,), {}, True),
        (operator.imod, (1,), {}, True),
        (operator.iand, (1,), {}, True),
        (operator.setitem, (0, 1), {}, True),
        (operator.getitem, (0,), {}, False),
        (F.dropout, (0.5, True), {}, False),
        (F.dropout, (0.5, True, True), {}, True),
        (setattr, ("data", 1), {}, True),
    ],
)
def test_flags_and_operators_that_write(target, args, kwargs, writes):
    graph = fx.Graph()
    x = graph.placeholder("x")
    effect = node_effect(
        graph.call_function(target, (x, *args), {k: x if v == "x" else v for k, v in kwargs.items()})
    )
    assert effect is not None
    # A positional True may be a flag for something else: then it says too much, never too little.
    assert effect.writes if writes else (not effect.writes or True in args)


def test_names_of_operators_are_those_of_aten():
    class A(nn.Module):
        def forward(self, x):
            y = 1 - (x / 2) // 1 % 3
            return (~(y > 0), x.T, x.float(), x.bool() & y.bool(), x.mT, 2 / x, 2**x)

    found = trace(A(), torch.empty(3, 3))
    listed = {operator_name(n) for n in found.graph.nodes if n.op.startswith("call")}
    assert {"rsub", "sub"} & listed
    for name in listed:
        assert operator_effect(name) is not None, name


def test_foreign_functions_have_no_effect():
    graph = fx.Graph()
    assert node_effect(graph.call_function(len, (graph.placeholder("x"),))) is None
    assert node_effect(graph.call_module("q", ())) is None
