"""Questions about a graph: what a node calls, which linear a value comes from or goes to.

They ask nothing of a graph but that submodules are `call_module` nodes: one of `fusekit.trace`, whose
nodes also know their place in the source, or one of a `torch.fx.Tracer` of your own.
"""

import operator
from collections.abc import Callable
from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import fx

from fusekit.forward import DTYPE_CASTS
from fusekit.tracing.leaf import is_leaf_call

PRODUCTS = frozenset({"mul", "multiply"})
SCALINGS = PRODUCTS | {"div", "divide", "truediv", "true_divide", "neg", "negative"}


def find_node(graph: fx.Graph, predicate: Callable[[fx.Node], bool]) -> fx.Node | None:
    """The first node, in the order of the graph, for which `predicate` holds, or None.

    >>> import torch
    >>> graph = torch.fx.symbolic_trace(lambda x: torch.sin(x) + torch.sin(x * 2)).graph
    >>> find_node(graph, lambda node: is_op(node, "sin")).name
    'sin'
    """
    return next((node for node in graph.nodes if predicate(node)), None)


def output_value(graph: fx.Graph) -> Any:
    """What the `output` node returns: a node, or nodes in tuples, lists and dicts; None where it has none.

    A trace that stopped half-way never reached one.

    >>> import torch
    >>> output_value(torch.fx.symbolic_trace(lambda x: (x, x + 1)).graph)
    (x, add)
    """
    found = find_node(graph, lambda node: node.op == "output")
    return None if found is None else found.args[0]


def is_fn(node: fx.Node, target: Callable[..., Any]) -> bool:
    """Whether `node` calls exactly the function `target`, not another one of its name.

    Teaching-only: the library tells operators by PyTorch's schemas.

    >>> import torch
    >>> node = find_node(torch.fx.symbolic_trace(lambda x: torch.mul(x, 2)).graph, lambda n: bool(n.args))
    >>> is_fn(node, torch.mul), is_fn(node, torch.Tensor.mul)
    (True, False)
    """
    return node.op == "call_function" and node.target is target


def is_method(node: fx.Node, name: str) -> bool:
    """Whether `node` calls the method `name` of a tensor.

    Teaching-only: the library tells operators by PyTorch's schemas.

    >>> import torch
    >>> node = find_node(torch.fx.symbolic_trace(lambda x: x.mul(2)).graph, lambda n: bool(n.args))
    >>> is_method(node, "mul"), is_method(node, "add")
    (True, False)
    """
    return node.op == "call_method" and node.target == name


def is_op(node: fx.Node, name: str) -> bool:
    """Whether `node` is the operator `name` in any of its spellings.

    They are `torch.<name>`, `torch.nn.functional.<name>`, `operator.<name>` and the method or function
    `torch.Tensor.<name>`. Another name for the same thing (`multiply`, `truediv`) is another operator.

    Teaching-only: the library tells operators by PyTorch's schemas.

    >>> import torch
    >>> graph = torch.fx.symbolic_trace(lambda x: torch.mul(x, 2) * x.mul(3) + 1).graph
    >>> [node.name for node in graph.nodes if is_op(node, "mul")]
    ['mul', 'mul_1', 'mul_2']
    """
    places = (torch, F, operator, torch.Tensor)
    return is_method(node, name) or (
        node.op == "call_function" and any(node.target is getattr(place, name, None) for place in places)
    )


def is_linear(node: fx.Node, module: nn.Module) -> bool:
    """Whether `node` calls a submodule of `module` that is an `nn.Linear`, or of a subclass of it.

    >>> import torch
    >>> module = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU())
    >>> [node.name for node in torch.fx.symbolic_trace(module).graph.nodes if is_linear(node, module)]
    ['_0']
    """
    return isinstance(_submodule(node, module), nn.Linear)


def is_conv1d(module: nn.Module | None) -> bool:
    """Whether `module` is Transformers' linear with its weight laid out the other way.

    Told without importing it, by the classes it comes from.
    """
    return any(
        cls.__name__ == "Conv1D" and cls.__module__ == "transformers.pytorch_utils"
        for cls in type(module).__mro__
    )


def is_any_linear(node: fx.Node, module: nn.Module) -> bool:
    """Whether `node` calls an `nn.Linear` or Transformers' `Conv1D`, which is a linear in fusekit."""
    return is_linear(node, module) or is_conv1d(_submodule(node, module))


def peel(value: Any) -> Any:
    """The value under casts of dtype (`.to`, `.float()`, `.type_as`, ...); any other is returned as it is.

    Teaching-only: the library follows values through writes and submodules too.

    >>> import torch
    >>> peel(output_value(torch.fx.symbolic_trace(lambda x: x.sin().float().to(x.dtype)).graph))
    sin
    """
    while (
        isinstance(value, fx.Node) and _is_cast(value) and value.args and isinstance(value.args[0], fx.Node)
    ):
        value = value.args[0]
    return value


def upstream_linear(value: Any, module: nn.Module) -> fx.Node | None:
    """The call of the linear of `module` whose output reaches `value`, or None.

    It may pass steps that only one value enters, such as casts, reshapes, a norm or an activation, and
    is `value` itself where that is the call of a linear; it never passes a leaf call. Transformers'
    `Conv1D` counts as a linear.

    Teaching-only: the library follows values through writes and submodules too.

    >>> import torch
    >>> module = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU(), torch.nn.Flatten())
    >>> upstream_linear(output_value(torch.fx.symbolic_trace(module).graph), module).target
    '0'
    """
    while isinstance(value, fx.Node) and not is_any_linear(value, module):
        inputs = value.all_input_nodes
        if len(inputs) != 1 or value.op == "output" or is_leaf_call(value):
            return None
        value = inputs[0]
    return value if isinstance(value, fx.Node) else None


def downstream_linear(node: fx.Node, module: nn.Module) -> fx.Node | None:
    """The call of the nearest linear of `module` that consumes `node`, or None.

    On its way the value may be cast to another dtype and scaled: multiplied or divided by a number or
    a tensor that the module holds. It never passes a leaf call. Of several the one that the fewest
    steps lead to is nearest, then the first in the graph. Transformers' `Conv1D` counts as a linear.

    Teaching-only: the library follows values through writes and submodules too.

    >>> import torch
    >>> class Scaled(torch.nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.down = torch.nn.Linear(2, 2)
    ...     def forward(self, x):
    ...         return self.down((torch.sin(x) * 0.5).float())
    >>> graph = torch.fx.symbolic_trace(Scaled()).graph
    >>> downstream_linear(find_node(graph, lambda n: is_op(n, "sin")), Scaled()).target
    'down'
    """
    order = {found: index for index, found in enumerate(node.graph.nodes)}
    kept, ring = {node}, [node]  # what is the value, cast or scaled; the last step's share of it
    while ring:
        users = sorted({user for one in ring for user in one.users} - kept, key=order.__getitem__)
        for user in users:
            if is_any_linear(user, module):
                return user
        ring = [user for user in users if _keeps_value(user, kept)]
        kept.update(ring)
    return None


def returned_linear(graph: fx.Graph, module: nn.Module) -> str | None:
    """The name of the linear of `module` that makes the first value `graph` returns, or None.

    Between the linear and the end there may be what `upstream_linear` passes.

    Teaching-only: the library follows values through writes and submodules too.

    >>> import torch
    >>> module = torch.nn.Sequential(torch.nn.Linear(2, 4), torch.nn.ReLU(), torch.nn.Linear(4, 2))
    >>> returned_linear(torch.fx.symbolic_trace(module).graph, module)
    '2'
    """
    value = output_value(graph)
    while isinstance(value, (tuple, list, dict)) and value:
        value = next(iter(value.values())) if isinstance(value, dict) else value[0]
    found = upstream_linear(value, module)
    return None if found is None else str(found.target)


def _submodule(node: fx.Node, module: nn.Module) -> nn.Module | None:
    if node.op != "call_module":
        return None
    try:
        return module.get_submodule(str(node.target))
    except AttributeError:
        return None


def _is_cast(node: fx.Node) -> bool:
    return any(is_op(node, name) for name in DTYPE_CASTS)


def _keeps_value(node: fx.Node, values: set[fx.Node]) -> bool:
    """Whether `node` is one of `values`, cast or scaled."""
    if not node.args or not (node.args[0] in values or any(is_op(node, name) for name in PRODUCTS)):
        return False
    if _is_cast(node):
        return node.args[0] in values
    if not any(is_op(node, name) for name in SCALINGS):
        return False
    operands = [argument for argument in node.args if isinstance(argument, fx.Node)]
    others = [operand for operand in operands if operand not in values]
    return len(operands) - len(others) == 1 and all(other.op == "get_attr" for other in others)
