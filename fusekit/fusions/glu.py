"""act(gate(x)) * up(x) -> gate, up = merged(x); kernels.act_and_mul(gate, up, act)."""

import ast
import operator
import types
from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

from fusekit.forward import Edit, Span
from fusekit.forward.reads import attribute_chain, resolve
from fusekit.fusions.match import Match, Objection, Refused
from fusekit.fusions.merge import is_linear_like, linear_calls, merged_calls, merged_line, order_of
from fusekit.fusions.prover import movable
from fusekit.fusions.reading import may_be_activation, reads_plainly
from fusekit.fusions.roles import sources
from fusekit.fusions.view import ForwardView
from fusekit.kernels import activation_name
from fusekit.tracing.schema import operator_name


class _NoGlu(Refused):
    """It is no gated product as it stands, but its two linears may still be merged."""


def find_glus(view: ForwardView, kernels: str) -> Iterator[Match | Objection]:
    """A match or an objection for each product of an activated linear and another linear of one input."""
    seen: set[Span] = set()
    fused: set[str] = set()
    freed: set[str] = set()
    linears = linear_calls(view)
    for node in view.trace.graph.nodes:
        found = _gated(view, node, linears)
        span = node.meta.get("span")
        if found is None or span in seen:  # the same product again, in another round of a loop
            continue
        if span:
            seen.add(span)
        gate, act, up = found
        parts = (str(gate.target), str(up.target))
        try:
            yield _match(view, kernels, gate, act, up, node)
            fused.update(parts)
        except Refused as refused:
            yield refused.objection("glu", parts)
            freed.update(parts if isinstance(refused, _NoGlu) else ())
    view.freed |= freed - fused


# -- the graph --------------------------------------------------------------------------------


def _gated(
    view: ForwardView, product: fx.Node, linears: list[fx.Node]
) -> tuple[fx.Node, fx.Node, fx.Node] | None:
    """(gate, act, up) when `product` is, or looks like, act(gate(x)) * up(x) in either order."""
    operands = _product(product)
    for act, up in [operands, operands[::-1]] if operands else []:
        if up not in linears or act in linears:
            continue
        gates = sources(act, linears)
        gate = gates.pop() if len(gates) == 1 else None
        if gate is not None and gate.args == up.args and gate.target != up.target:
            if _looks_like_activation(view, gate, act):
                return gate, act, up
    return None


def _product(node: fx.Node) -> tuple[fx.Node, fx.Node] | None:
    is_product = node.op == "call_function" and node.target in (operator.mul, torch.mul)
    if (is_product or (node.op == "call_method" and node.target == "mul")) and len(node.args) == 2:
        left, right = node.args
        if isinstance(left, fx.Node) and isinstance(right, fx.Node):
            return left, right
    return None


def _looks_like_activation(view: ForwardView, gate: fx.Node, act: fx.Node) -> bool:
    """Whether `act` is one step from `gate` that could be an activation: a known one, or one to name."""
    if _shape(act) != _shape(gate):
        return False
    if act.all_input_nodes == [gate]:
        if act.op == "call_module":
            module = view.submodule(str(act.target))
            return may_be_activation(module) or not _is_something_else(module)
        return operator_name(act) in LIKE_ACTIVATIONS
    # A function of several steps: written as one call of the gate's value.
    call, inner = view.expression_at(act), view.expression(gate)
    return isinstance(call, ast.Call) and inner is not None and call.args == [inner]


LIKE_ACTIVATIONS = frozenset(
    {"celu", "elu", "gelu", "hardsigmoid", "hardswish", "hardtanh", "leaky_relu", "logsigmoid", "mish"}
    | {"prelu", "relu", "relu6", "selu", "sigmoid", "silu", "softmax", "softplus", "softsign", "tanh"}
    | {"relu_", "sigmoid_", "silu_", "tanh_", "leaky_relu_", "elu_"}
)


def _is_something_else(module: torch.nn.Module | None) -> bool:
    """A submodule that nobody would call an activation: a norm, or one that holds linears."""
    if module is None or "norm" in type(module).__name__.lower():
        return True
    return any(is_linear_like(child) for child in module.modules())


def _shape(node: fx.Node) -> Any:
    return getattr(node.meta.get("val"), "shape", None)


# -- the source -------------------------------------------------------------------------------


def _match(
    view: ForwardView, kernels: str, gate: fx.Node, act: fx.Node, up: fx.Node, product: fx.Node
) -> Match:
    nodes = [gate, up]
    calls = merged_calls(view, nodes)
    activation = _activation_call(view, act, calls[0])
    whole = view.expression(product)
    if whole is None:
        raise _NoGlu("module-escapes", "the product is no expression of the forward itself", calls[0].lineno)
    text = view.text(activation.func)
    if not isinstance(whole, ast.BinOp):
        why = f"the product is written as {view.text(whole)}, not with *"
        raise _NoGlu("different-branches", why, whole.lineno)
    if {whole.left, whole.right} != {activation, calls[1]}:
        raise _NoGlu(
            "different-branches",
            f"the product does not take {text}({gate.target}(x)) and {up.target}(x) where they are made",
            whole.lineno,
        )
    if activation.args != [calls[0]]:
        raise _NoGlu(
            "different-branches",
            f"{text} does not take {gate.target}(x) where it is made",
            activation.lineno,
        )
    argument = calls[0].args[0]
    proof = movable(view, [gate, act, up, product], frozenset({ast.unparse(argument)}))
    storage, insertion, names = merged_line(view, "glu", nodes, argument, proof)
    fused = f"{kernels}.act_and_mul({names[0]}, {names[1]}, {text})"
    own = {str(act.target)} if act.op == "call_module" else set()
    return Match(
        "glu",
        (str(gate.target), str(up.target)),
        (insertion, Edit(Span.of(whole), fused)),
        whole.lineno,
        storage=storage,
        order=order_of(view, nodes),
        norms=proof.norms,
        activations=proof.activations | own,
        linears=proof.linears,
    )


def _activation_call(view: ForwardView, act: fx.Node, gate_call: ast.Call) -> ast.Call:
    """The call `f(value)` in the forward that `act` came from, where `f` is a known activation."""
    expression = view.expression_at(act)
    line = expression.lineno if expression is not None else gate_call.lineno
    if not isinstance(expression, ast.Call):
        raise _NoGlu("module-escapes", f"{act.name} is no call in the forward itself", line)
    text = " ".join(view.text(expression.func).split())
    if act.op == "call_module":
        if not may_be_activation(view.submodule(str(act.target))):
            kind = type(view.submodule(str(act.target))).__name__
            raise _NoGlu("not-this-function", f"{text} is a {kind}, which is no known activation", line)
        if view.call_of(act) is None:
            why = f"{act.target} is called as {view.text(expression)}, not by a plain self.name(...)"
            raise _NoGlu("module-escapes", why, line)
    else:
        function = _function(view, expression.func, line)
        name = activation_name(function)
        # `F.tanh(x)` calls `x.tanh()`: the trace has the method.
        is_it = name is not None and name in (activation_name(act.target), act.target)
        if not is_it or not act.meta.get("direct"):
            raise _NoGlu("not-this-function", f"{text} is no activation that act_and_mul knows", line)
    if len(expression.args) != 1 or expression.keywords:
        why = f"{view.text(expression)} is not called with one value and nothing else, as act_and_mul does"
        raise _NoGlu("not-this-function", why, line)
    return expression


def _function(view: ForwardView, callee: ast.expr, line: int) -> Any:
    """What a callee is, where reading it a little earlier or later gives the same and runs no code."""
    chain = attribute_chain(callee, view.source.self_name)
    if chain and reads_plainly(view.module, chain):
        value = resolve(view.module, chain)
        if isinstance(value, (types.FunctionType, types.BuiltinFunctionType)):
            return value  # anything else (a partial, an object) may be another thing on a like instance
        if not isinstance(value, torch.Tensor):
            kind = type(value).__name__
            why = f"{view.text(callee)} is a {kind}, and only plain functions and modules are known"
            raise _NoGlu("not-this-function", why, line)
    elif not chain:
        names = []
        base = callee
        while isinstance(base, ast.Attribute):
            names.append(base.attr)
            base = base.value
        if isinstance(base, ast.Name) and not view.stores(base.id):
            names_of_module: dict[str, Any] = view.source.function.__globals__  # type: ignore[attr-defined]
            value = names_of_module.get(base.id)
            while names and isinstance(value, types.ModuleType):
                value = vars(value).get(names.pop())
            if not names and value is not None:
                return value
    why = (
        f"{view.text(callee)} is a local name or belongs to an object; call the activation as a function, "
        "F.silu(...), or as an attribute of self"
    )
    raise _NoGlu("not-this-function", why, line)
