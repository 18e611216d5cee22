"""act(gate(x)) * up(x) -> gate, up = merged(x); kernels.act_and_mul(gate, up, act)."""

import ast
import operator
from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

from fusekit.forward import Edit, Span
from fusekit.fusions.match import Match, Objection, Refused
from fusekit.fusions.merge import is_linear_like, merged_calls, merged_line, order_of
from fusekit.fusions.prover import movable
from fusekit.fusions.view import ForwardView
from fusekit.kernels import activation_name


def find_glus(view: ForwardView, kernels: str) -> Iterator[Match | Objection]:
    """A match or an objection for each product of an activated linear and another linear of one input."""
    seen: set[Span] = set()
    for node in view.trace.graph.nodes:
        operands = _product(node)
        for act, up in [operands, operands[::-1]] if operands else []:
            gate = act.args[0] if _is_activation(view, act) else None
            if isinstance(gate, fx.Node) and _is_linear(view, gate) and _is_linear(view, up):
                if gate.args == up.args and gate.target != up.target:
                    if node.meta.get("span") in seen:  # the same product again, in another round of a loop
                        break
                    if node.meta.get("span"):
                        seen.add(node.meta["span"])
                    try:
                        yield _match(view, kernels, gate, act, up, node)
                    except Refused as refused:
                        yield refused.objection("glu", (str(gate.target), str(up.target)))
                    break


def _product(node: fx.Node) -> tuple[fx.Node, fx.Node] | None:
    is_product = node.op == "call_function" and node.target in (operator.mul, torch.mul)
    if (is_product or (node.op == "call_method" and node.target == "mul")) and len(node.args) == 2:
        left, right = node.args
        if isinstance(left, fx.Node) and isinstance(right, fx.Node):
            return left, right
    return None


def _is_activation(view: ForwardView, node: fx.Node) -> bool:
    """A submodule without linears, of one input: whether it is a known activation is told per instance."""
    if node.op != "call_module" or len(node.args) != 1 or node.kwargs:
        return False
    return activation_name(view.submodule(str(node.target))) is not None


def _is_linear(view: ForwardView, node: Any) -> bool:
    return (
        isinstance(node, fx.Node)
        and node.op == "call_module"
        and len(node.args) == 1
        and not node.kwargs
        and is_linear_like(view.submodule(str(node.target)))
    )


def _match(
    view: ForwardView, kernels: str, gate: fx.Node, act: fx.Node, up: fx.Node, product: fx.Node
) -> Match:
    nodes = [gate, up]
    calls = merged_calls(view, nodes)
    activation, whole = view.call_of(act), view.expression(product)
    if activation is None or whole is None:
        raise Refused(
            "module-escapes",
            f"{act.target} and the product are no expressions of the forward itself",
            calls[0].lineno,
        )
    if not isinstance(whole, ast.BinOp) or {whole.left, whole.right} != {activation, calls[1]}:
        raise Refused(
            "different-branches",
            f"the product does not take {act.target}({gate.target}(x)) and {up.target}(x) "
            "where they are made",
            whole.lineno,
        )
    if activation.args != [calls[0]]:
        raise Refused(
            "different-branches",
            f"{act.target} does not take {gate.target}(x) where it is made",
            activation.lineno,
        )
    argument = calls[0].args[0]
    proof = movable(view, [gate, act, up, product], frozenset({ast.unparse(argument)}))
    storage, insertion, names = merged_line(view, "glu", nodes, argument, proof)
    fused = f"{kernels}.act_and_mul({names[0]}, {names[1]}, {view.text(activation.func)})"
    return Match(
        "glu",
        (str(gate.target), str(up.target)),
        (insertion, Edit(Span.of(whole), fused)),
        whole.lineno,
        storage=storage,
        order=order_of(view, nodes),
        norms=proof.norms,
        activations=frozenset({str(act.target)}),
        linears=proof.linears,
    )
