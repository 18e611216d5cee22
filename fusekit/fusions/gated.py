"""The products in a trace that are gated ones, or look like one: act(gate) * up in the dataflow.

A factor is followed down to the linear that it comes from, through casts, scalings by numbers and
parameters, and views. What else stands on the way decides what the product is.
"""

import operator
from dataclasses import dataclass

import torch
from torch import fx

from fusekit.fusions.factor import PRODUCTS, Factor, Factors, Step, operands_of, said, shape_of
from fusekit.fusions.roles import ATTENTION_OPERATORS, sources
from fusekit.fusions.view import ForwardView
from fusekit.tracing import is_leaf_call
from fusekit.tracing.schema import operator_name

BY_DIMENSION = {"chunk": 2, "split": 2, "tensor_split": 2, "unbind": 1, "narrow": 1, "select": 1}
SUMS = (operator.add, operator.iadd, torch.add)


@dataclass(frozen=True)
class Gated:
    """act(gate) * up, the activation being a step of `gate`; `packed` where both are cut from one linear."""

    node: fx.Node
    gate: Factor
    up: Factor
    act: Step
    problem: tuple[str, str, fx.Node] | None = None  # (reason, sentence, where)

    @property
    def packed(self) -> bool:
        return self.gate.linear is self.up.linear

    @property
    def parts(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys((str(self.gate.linear.target), str(self.up.linear.target))))


def gated_product(factors: Factors, node: fx.Node) -> Gated | None:
    """The gated product that `node` is or looks like, None where nobody would take it for one."""
    operands = operands_of(node, PRODUCTS, ("mul", "mul_", "multiply")) or operands_of(node, SUMS, ("add",))
    if operands is None:
        return None
    left, right = map(factors.follow, operands)
    if left is None or right is None:
        return _near(factors, node, operands, (left, right))
    active = [factor for factor in (left, right) if factor.activation is not None]
    if not active:
        return None
    gate = active[0]
    up = right if gate is left else left
    act = gate.activation
    assert act is not None
    if _is_no_pair(gate, up):
        return None
    view = factors.view
    problem = _problem(view, node, gate, up, act, len(active) > 1)
    if node.target in SUMS or node.target == "add":
        if problem is not None:
            return None
        problem = "not-this-function", f"{said(view, node)} is a sum, and no product", node
    return Gated(node, gate, up, act, problem)


def _is_no_pair(gate: Factor, up: Factor) -> bool:
    """Whether the two factors are no gate and up: one value twice, or one computed from the other."""
    if gate.linear is up.linear:
        return gate.base is None or up.base is None or gate.half is up.half
    if _read_one_value(gate, up):
        return False
    linears = [gate.linear, up.linear]
    inputs = [linear.args[0] for linear in linears]
    assert isinstance(inputs[0], fx.Node) and isinstance(inputs[1], fx.Node)
    return bool(gate.cuts or up.cuts or sources(inputs[0], linears) or sources(inputs[1], linears))


def _read_one_value(gate: Factor, up: Factor) -> bool:
    """Whether both linears read one tensor; that it is written in between is for the prover to say."""
    first, second = gate.linear.args[0], up.linear.args[0]
    assert isinstance(first, fx.Node) and isinstance(second, fx.Node)
    return first is second or first.meta.get("val") is second.meta.get("val")


def _near(
    factors: Factors,
    node: fx.Node,
    operands: tuple[fx.Node, fx.Node],
    sides: tuple[Factor | None, Factor | None],
) -> Gated | None:
    """One factor is an activated linear, or slice of one, and the other comes from more than one value."""
    for mine, other in ((0, 1), (1, 0)):
        gate = sides[mine]
        if gate is None or sides[other] is not None or gate.activation is None or node.target in SUMS:
            continue
        pair = operands_of(operands[other], PRODUCTS, ("mul", "multiply")) or ()
        ups = [up for up in map(factors.follow, pair) if up is not None]
        if len(ups) == 2 and all(_read_one_value(gate, up) for up in ups):
            why = f"{said(factors.view, node)} has three factors: join two of them with parentheses"
            return Gated(node, gate, ups[0], gate.activation, ("not-this-function", why, node))
        if gate.base is not None and sources(operands[other], [gate.linear, *_attentions(node)]) == {
            gate.linear
        }:
            why = f"what it gates is computed from {gate.linear.target} and more, and no slice of it"
            return Gated(node, gate, gate, gate.activation, ("not-this-function", why, node))
    return None


def _attentions(node: fx.Node) -> list[fx.Node]:
    """The attentions of a trace: a gate on what they give is none of an MLP's."""
    names = ATTENTION_OPERATORS
    return [n for n in node.graph.nodes if is_leaf_call(n) or getattr(n.target, "__name__", "") in names]


# -- what stands against it -------------------------------------------------------------------


def _problem(
    view: ForwardView, node: fx.Node, gate: Factor, up: Factor, act: Step, both: bool
) -> tuple[str, str, fx.Node] | None:
    """(reason, sentence, where) of the first thing that makes it another function than act(gate) * up."""
    first, second = gate.linear.target, up.linear.target
    if node.meta.get("written"):
        return "not-this-function", f"{said(view, node)} writes the product into a factor", node
    if not _read_one_value(gate, up):
        return "different-inputs", f"{first} and {second} read different values", up.linear
    if both:
        assert up.activation is not None
        why = f"both factors are activated: {said(view, act.node)} and {said(view, up.activation.node)}"
        return "not-this-function", why, node
    for factor in (gate, up):
        for step in factor.steps:
            above = factor is gate and gate.steps.index(step) < gate.steps.index(act)
            known = step is act and step.kind == "activation"
            odd = None if known else _odd(view, step, above)
            if odd:
                return "not-this-function", odd, step.node
    if gate.linear is up.linear:
        return _not_halves(view, gate, up)
    if gate.cuts or up.cuts:
        where = (*gate.cuts, *up.cuts)[0]
        return (
            "not-this-function",
            f"{said(view, where)} cuts or reshapes a factor before the product",
            where,
        )
    if shape_of(gate.node) != shape_of(up.node):
        return "layout", f"{first} and {second} give different widths", node
    return None


def _odd(view: ForwardView, step: Step, above: bool) -> str | None:
    """What a step is that act_and_mul does not do."""
    text = said(view, step.node)
    if step.kind == "dropout":
        return f"{text} draws random numbers before the product"
    if step.kind == "clamp":
        return f"{text} limits a factor (a clamped gated product), and act_and_mul does not"
    if step.kind == "written-out":
        return f"{text} is an activation written out; F.silu, which rounds once, has other bits"
    if above and step.kind == "scale":
        return f"{text} is a third factor of the product"
    if above:
        return f"{text} comes between the activation and the product"
    return None if step.kind in ("cast", "scale") else f"{text} comes before the product"


def _not_halves(view: ForwardView, gate: Factor, up: Factor) -> tuple[str, str, fx.Node] | None:
    """Why the two slices of one linear are not two runs of columns side by side, of one width."""
    assert gate.half is not None and up.half is not None
    linear = gate.linear.target
    if gate.base is not up.base:
        return (
            "not-this-function",
            f"{linear} gives both factors, but not as two slices of one value",
            up.half,
        )
    first, second = gate.half.meta["val"], up.half.meta["val"]
    if first.shape != second.shape:
        widths = f"{first.shape[-1]} and {second.shape[-1]} columns"
        return "not-this-function", f"the slices of {linear} have different sizes ({widths})", up.half
    for node in (*gate.cuts, *up.cuts):
        if _from_the_front(node):
            why = f"{said(view, node)} counts the dimension from the front: of other inputs it is another"
            return "layout", why, node
    whole = gate.base.meta["val"] if gate.base is not None else None
    row = first.stride(-2) if first.dim() > 1 else 0
    starts = sorted(x.storage_offset() - whole.storage_offset() for x in (first, second))  # type: ignore[union-attr]
    one_storage = first.untyped_storage()._cdata == second.untyped_storage()._cdata
    if one_storage and first.stride(-1) > 1 and starts[1] < row:
        return "not-this-function", f"the columns of {linear} are interleaved, gate beside up", gate.half
    is_run = one_storage and first.stride() == second.stride() and first.stride(-1) == 1
    if not is_run or starts[1] + first.shape[-1] > row or starts[1] - starts[0] < first.shape[-1]:
        why = f"{linear} is not cut along its columns into gate and up"
        return "not-this-function", why, gate.half
    return None


def _from_the_front(node: fx.Node) -> bool:
    place = BY_DIMENSION.get(operator_name(node) or "")
    if place is None:
        return False
    default = 0
    dim = node.kwargs.get("dim", node.args[place] if len(node.args) > place else default)
    return not isinstance(dim, int) or dim >= 0
