"""One factor of a product, followed down to the linear that it comes from."""

import ast
import operator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn as nn
from torch import fx

from fusekit.forward import Span
from fusekit.fusions.merge import is_linear_like
from fusekit.fusions.reading import RANDOM, may_be_activation
from fusekit.fusions.view import ForwardView
from fusekit.tracing.schema import CASTS, operator_name

LIKE_ACTIVATIONS = frozenset(
    {"celu", "elu", "gelu", "hardsigmoid", "hardswish", "hardtanh", "leaky_relu", "logsigmoid", "mish"}
    | {"prelu", "relu", "relu6", "selu", "sigmoid", "silu", "softmax", "softplus", "softsign", "tanh"}
    | {"relu_", "sigmoid_", "silu_", "tanh_", "leaky_relu_", "elu_"}
)
CLAMPS = frozenset({"clamp", "clamp_", "clamp_max", "clamp_min", "clip", "clip_", "minimum", "maximum"})
# Views that cut a tensor or name its halves.
CUTS = frozenset(
    {"chunk", "contiguous", "narrow", "reshape", "select", "slice", "split", "tensor_split", "unbind"}
    | {"unflatten", "view"}
)
DROPOUTS = (nn.Dropout, nn.AlphaDropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)
PRODUCTS = (operator.mul, operator.imul, torch.mul, torch.multiply)


@dataclass(frozen=True)
class Step:
    """One node on the way from a linear to a factor: `cast`, `scale`, `activation`, `clamp`, ..."""

    node: fx.Node
    kind: str
    source: fx.Node


@dataclass(frozen=True)
class Factor:
    """A factor of a product and the linear that it comes from; the steps are in order, the last first."""

    node: fx.Node
    linear: fx.Node
    steps: tuple[Step, ...]
    cuts: tuple[fx.Node, ...]  # views on the way, those of the linear's side last
    half: fx.Node | None = None  # the value above the views
    base: fx.Node | None = None  # the value under them

    @property
    def activation(self) -> Step | None:
        """The last activation on the way, called or written out."""
        return next((step for step in self.steps if step.kind in ("activation", "written-out")), None)


class Factors:
    """The factors of a trace's products, each step on their ways looked at once."""

    def __init__(self, view: ForwardView, linears: list[fx.Node]):
        self.view, self.linears = view, frozenset(linears)
        self._steps: dict[fx.Node, Step | None] = {}
        self._outer: dict[ast.expr, set[fx.Node]] = {}
        self._fixed: set[fx.Node] = set()  # made of parameters and constants, whatever the input
        for node in view.trace.graph.nodes:
            made = node.op in ("call_function", "call_method")
            if node.op == "get_attr" or (made and self._fixed.issuperset(node.all_input_nodes)):
                self._fixed.add(node)

    def follow(self, node: fx.Node) -> Factor | None:
        """How `node` comes from one linear, None where it does not."""
        steps: list[Step] = []
        cuts: list[fx.Node] = []
        half = base = None
        current = node
        while current not in self.linears:
            if operator_name(current) in CUTS and current.all_input_nodes:
                if not cuts:
                    half = current
                elif base is not None:  # cut, computed with, and cut again
                    return None
                cuts.append(current)
                current = current.all_input_nodes[0]
                if operator_name(current) not in CUTS:
                    base = current
                continue
            if current not in self._steps:
                self._steps[current] = self._step(current)
            step = self._steps[current]
            if step is None:
                return None
            steps.append(step)
            current = step.source
        return Factor(node, current, tuple(steps), tuple(cuts), half, base)

    def _step(self, node: fx.Node) -> Step | None:
        """`node` as a step from its one input of the same shape; None where it is none."""
        if node.op not in ("call_function", "call_method", "call_module") or shape_of(node) is None:
            return None
        expression = self.view.expression_at(node)
        helper = None if node.meta.get("direct") else expression
        found = self._inputs_of_helper(helper) if helper is not None else self._inputs(node)
        source = next(iter(found), None) if len(found) == 1 else None
        if len(found) == 2 and helper is None:
            source = _written_out(node)
        if source is None or shape_of(source) != shape_of(node):
            return None
        with_it_alone = isinstance(helper, ast.Call) and len(helper.args) == 1
        return Step(node, "activation" if with_it_alone else self._kind(node, source), source)

    def _inputs(self, node: fx.Node) -> set[fx.Node]:
        return set(node.all_input_nodes) - self._fixed

    def _inputs_of_helper(self, expression: ast.expr) -> set[fx.Node]:
        """What a function called by the forward is given, the module's own and constants aside."""
        if expression not in self._outer:
            inside = self.view.nodes_at[expression]
            self._outer[expression] = set().union(*map(self._inputs, inside)) - set(inside)
        return self._outer[expression]

    def _kind(self, node: fx.Node, source: fx.Node) -> str:
        name = operator_name(node)
        if node.op == "call_module":
            module = self.view.submodule(str(node.target))
            if isinstance(module, DROPOUTS):
                return "dropout"
            return "activation" if may_be_activation(module) or _may_be_unknown_one(module) else "other"
        if name in LIKE_ACTIVATIONS:
            return "activation"
        if name in CASTS:
            return "cast"
        if name in CLAMPS:
            return "clamp"
        if name in RANDOM:
            return "dropout"
        is_scale = name in ("mul", "multiply") or (name == "div" and node.args[0] is source)
        if is_scale and len(node.args) == 2 and not node.kwargs:
            others = [argument for argument in node.args if argument is not source]
            if not others:
                return "other"  # a square
            if isinstance(others[0], fx.Node):
                if len(node.all_input_nodes) == 2 and others[0] not in self._fixed:
                    return "written-out"
                value = others[0].meta.get("val")
                # More dimensions could broadcast: the factors would be of one shape here and not elsewhere.
                return "scale" if isinstance(value, torch.Tensor) and value.dim() <= 1 else "other"
            return "scale" if _is_own_number(self.view, node) else "other"
        return "other"


def _written_out(node: fx.Node) -> fx.Node | None:
    """x of x * sigmoid(x), or x * sigmoid(a * x)."""
    operands = operands_of(node, PRODUCTS, ("mul",))
    for x, gate in (operands, operands[::-1]) if operands else ():
        if operator_name(gate) == "sigmoid":
            inner = gate.args[0]
            assert isinstance(inner, fx.Node)
            if inner is x or (operator_name(inner) == "mul" and x in inner.all_input_nodes):
                return x
    return None


def _is_own_number(view: ForwardView, node: fx.Node) -> bool:
    """Whether the number that scales is a constant or the module's own; one passed in may be a tensor."""
    expression = view.expression(node)
    operands: list[ast.expr] = []
    if isinstance(expression, ast.BinOp):
        numbers = {int, float}
        sides = (expression.left, expression.right)
        operands = [s for s in sides if view.trace.operands.get(Span.of(s), {object}) <= numbers]
    elif isinstance(expression, ast.Call):
        operands = expression.args[-1:]
    names = [n.id for operand in operands for n in ast.walk(operand) if isinstance(n, ast.Name)]
    return bool(operands) and all(name == view.source.self_name or not view.stores(name) for name in names)


def _may_be_unknown_one(module: nn.Module | None) -> bool:
    """A submodule that could be an activation: no norm, no linear in it, no matrix."""
    if module is None or "norm" in type(module).__name__.lower():
        return False
    if any(is_linear_like(child) for child in module.modules()):
        return False
    return all(parameter.dim() < 2 for parameter in module.parameters())


def shape_of(node: fx.Node) -> Any:
    return getattr(node.meta.get("val"), "shape", None)


def operands_of(node: fx.Node, functions: Any, methods: tuple[str, ...]) -> tuple[fx.Node, fx.Node] | None:
    is_it = (node.op == "call_function" and node.target in functions) or (
        node.op == "call_method" and node.target in methods
    )
    if is_it and len(node.args) == 2:
        left, right = node.args
        if isinstance(left, fx.Node) and isinstance(right, fx.Node):
            return left, right
    return None


def said(view: ForwardView, node: fx.Node) -> str:
    expression = view.expression_at(node)
    return view.short(expression) if expression is not None else node.name
