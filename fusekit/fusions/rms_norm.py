"""weight * (x * rsqrt(mean(x ** 2) + eps)) -> kernels.rms_norm(x, weight, eps), in every spelling.

The graph says that the function is an RMSNorm, and where weight, eps and offset come from; a probe
(`norm_probe.py`) then looks for the rounding order that gives the same bits as the module itself.
"""

import ast
import operator
import types
from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

from fusekit.forward import Edit, Span, text_at
from fusekit.forward.reads import attribute_chain, resolve
from fusekit.fusions.match import Match, Objection, Refused
from fusekit.fusions.norm_probe import Norm, no_norm, probe
from fusekit.fusions.reading import Reading, reads_plainly
from fusekit.fusions.view import ForwardView, evaluation
from fusekit.tracing.schema import operator_name

CASTS = frozenset({"to", "type_as"})


def find_norms(view: ForwardView, kernels: str) -> Iterator[Match | Objection]:
    """A match when the forward as a whole is an RMSNorm, an objection when it only looks like one."""
    if not _looks_like_norm(view):
        return
    try:
        yield _match(view, kernels)
    except Refused as refused:
        yield refused.objection("rms_norm", ())


def _looks_like_norm(view: ForwardView) -> bool:
    names = {operator_name(node) for node in view.trace.graph.nodes}
    calls = any(node.op == "call_module" for node in view.trace.graph.nodes)
    return (
        not calls and bool(names & {"rsqrt", "sqrt", "pow"}) and bool(names & {"mean", "sum", "norm", "var"})
    )


def _match(view: ForwardView, kernels: str) -> Match:
    norm = read_norm(view)
    _check_source(view, norm)
    eps = _eps_text(view, norm)
    form = probe(view, norm)
    own = view.source.self_name
    arguments = [str(norm.input.target)]
    if norm.weight is not None:
        arguments.append(f"{own}.{norm.weight.target}")
        arguments.append(eps)
    else:
        arguments.append(f"eps={eps}")
    if form.source():
        arguments.append(form.source())
    body = view.source.tree.body
    first = body[1] if len(body) > 1 and _is_docstring(body[0]) else body[0]
    start, end = Span.of(first), Span.of(body[-1])
    span = Span(start.line, start.column, end.end_line, end.end_column)
    text = f"return {kernels}.rms_norm({', '.join(arguments)})"
    return Match("rms_norm", (), (Edit(span, text),), view.source.tree.lineno)


# -- the graph --------------------------------------------------------------------------------


def read_norm(view: ForwardView) -> Norm:
    """The RMSNorm that the graph is, or `Refused` naming the step that is not one."""
    trace = view.trace
    output = next(node for node in trace.graph.nodes if node.op == "output")
    seen: set[fx.Node] = {output}
    result = output.args[0]
    if not isinstance(result, fx.Node):
        raise no_norm("it returns more than the normalised tensor", None)
    node = _uncast(result, seen)
    factors = _operands(node, "mul")
    weight, offset, normalised = None, 0.0, node
    if factors:
        for scale, rest in (factors, factors[::-1]):
            found = _weight(scale)
            if found:
                weight, offset, used = found
                normalised = rest
                seen |= {node, *used}
                break
    normalised = _uncast(normalised, seen)
    x, eps_node, inverse = _inverse(normalised, seen)
    mean = next(argument for argument in eps_node.args if isinstance(argument, fx.Node))
    eps = next(argument for argument in eps_node.args if isinstance(argument, float))
    square = _mean_of(mean, seen)
    squared = _square(square, seen)
    inputs = {_uncast(x, seen), _uncast(squared, seen)}
    if len(inputs) != 1:
        raise no_norm("what is squared is not what is scaled", square)
    source = inputs.pop()
    if source.op != "placeholder":
        raise no_norm("its input is changed before it is normalised", source)
    seen.add(source)
    left = [node for node in trace.graph.nodes if node not in seen and node.op != "placeholder"]
    left = [node for node in left if node.users or node.meta.get("written")]
    if left:
        raise no_norm(f"{left[0].name} has no place in an RMSNorm", left[0])
    return Norm(source, weight, eps, eps_node, inverse, offset)


def _uncast(node: fx.Node, seen: set[fx.Node]) -> fx.Node:
    """The value under casts of dtype."""
    while node.op == "call_method" and operator_name(node) in CASTS and isinstance(node.args[0], fx.Node):
        seen.add(node)
        node = node.args[0]
    return node


def _operands(node: fx.Node, name: str) -> tuple[Any, Any] | None:
    targets = {
        "mul": (operator.mul, torch.mul),
        "div": (operator.truediv, torch.div),
        "add": (operator.add, torch.add),
    }
    is_it = node.op == "call_function" and node.target in targets[name]
    if (
        (is_it or (node.op == "call_method" and node.target == name))
        and len(node.args) == 2
        and not node.kwargs
    ):
        return node.args[0], node.args[1]
    return None


def _weight(node: Any) -> tuple[fx.Node, float, set[fx.Node]] | None:
    """(parameter, constant added to it, nodes on the way) when `node` is a weight."""
    if not isinstance(node, fx.Node):
        return None
    used: set[fx.Node] = set()
    node = _uncast(node, used)
    offset = 0.0
    added = _operands(node, "add")
    if added:
        numbers = [item for item in added if isinstance(item, (int, float))]
        inner = [item for item in added if isinstance(item, fx.Node)]
        if len(numbers) != 1 or len(inner) != 1:
            return None
        used.add(node)
        offset, node = float(numbers[0]), _uncast(inner[0], used)
    if node.op != "get_attr" or node.meta["val"].dim() != 1:
        return None
    return node, offset, used | {node}


def _inverse(node: fx.Node, seen: set[fx.Node]) -> tuple[fx.Node, fx.Node, str]:
    """(x, the node that adds eps, kind of inverse root) of x * rsqrt(...) in its spellings."""
    seen.add(node)
    quotient = _operands(node, "div")
    if quotient and isinstance(quotient[1], fx.Node):
        root = _uncast(quotient[1], seen)
        if operator_name(root) == "sqrt":
            seen.add(root)
            return quotient[0], _eps_node(root.args[0], seen), "sqrt"
    factors = _operands(node, "mul")
    for x, scale in (factors, factors[::-1]) if factors else ():
        if not isinstance(x, fx.Node) or not isinstance(scale, fx.Node):
            continue
        root = _uncast(scale, set())
        name = operator_name(root)
        if name == "rsqrt" or (name == "pow" and root.args[1:] == (-0.5,)):
            _uncast(scale, seen)
            seen.add(root)
            return x, _eps_node(root.args[0], seen), "rsqrt" if name == "rsqrt" else "pow"
        one_over = _operands(root, "div")
        is_reciprocal = (one_over and one_over[0] in (1, 1.0)) or name == "reciprocal"
        inner = one_over[1] if one_over else root.args[0] if root.args else None
        if is_reciprocal and isinstance(inner, fx.Node) and operator_name(inner) == "sqrt":
            _uncast(scale, seen)
            seen |= {root, inner}
            return x, _eps_node(inner.args[0], seen), "reciprocal"
    raise no_norm("its last step is no multiplication by an inverse root", node)


def _eps_node(node: Any, seen: set[fx.Node]) -> fx.Node:
    node = _uncast(node, seen) if isinstance(node, fx.Node) else node
    added = _operands(node, "add") if isinstance(node, fx.Node) else None
    if not added or sum(isinstance(item, float) for item in added) != 1:
        raise no_norm(
            "no eps is added to the mean under the root", node if isinstance(node, fx.Node) else None
        )
    seen.add(node)
    return node


def _mean_of(node: fx.Node, seen: set[fx.Node]) -> fx.Node:
    node = _uncast(node, seen)
    seen.add(node)
    if operator_name(node) != "mean":
        raise no_norm(f"{node.name} is no mean", node)
    dims = node.kwargs.get("dim", node.args[1] if len(node.args) > 1 else None)
    keep = node.kwargs.get("keepdim", node.args[2] if len(node.args) > 2 else False)
    if dims not in (-1, (-1,), [-1]) or keep is not True or set(node.kwargs) - {"dim", "keepdim"}:
        raise no_norm("the mean is not over the last dimension, kept", node)
    square = node.args[0]
    assert isinstance(square, fx.Node)
    return square


def _square(node: fx.Node, seen: set[fx.Node]) -> fx.Node:
    node = _uncast(node, seen)
    seen.add(node)
    name = operator_name(node)
    factors = _operands(node, "mul")
    inner = node.args[0] if node.args else None
    if (
        name == "square"
        or (name == "pow" and node.args[1:] in ((2,), (2.0,)))
        or (factors and factors[0] is factors[1])
    ):
        assert isinstance(inner, fx.Node)
        return inner
    raise no_norm(f"the mean is of {node.name}, which is no square", node)


# -- the source -------------------------------------------------------------------------------


def _check_source(view: ForwardView, norm: Norm) -> None:
    """The rewrite replaces the whole body: nothing in it may do anything else."""
    tree = view.source.tree
    arguments = tree.args
    inputs = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs][1:]
    if len(inputs) != 1 or arguments.vararg or arguments.kwarg:
        raise no_norm("it takes more than one input", None)
    for span, truth in view.trace.branches.items():
        test = " ".join(text_at(view.source.file_text, span).split())
        raise Refused(
            "not-this-function",
            f"it looks like an RMSNorm, but it branches on `{test}` (which was {truth} while tracing)",
            span.line,
        )
    _check_methods(view)
    for node in view.trace.graph.nodes:
        if node.meta.get("written"):
            raise Refused("input-written", f"{node.name} writes in place", node.meta["span"].line)
    reading = Reading(view)
    for statement in tree.body:
        try:
            reading.statement(statement)
            for expression, _ in evaluation(statement):
                reading.expression(expression)
        except Refused as refused:
            line = view.text(statement).splitlines()[0]
            raise Refused(
                "not-this-function",
                f"it looks like an RMSNorm, but it also does this: {line}",
                refused.line,
            ) from None


def _check_methods(view: ForwardView) -> None:
    """What a method of the module does is in the graph, but not in the text that is replaced."""
    calls = [node for node in ast.walk(view.source.tree) if isinstance(node, ast.Call)]
    for call in sorted(calls, key=lambda call: (call.lineno, call.col_offset)):
        chain = attribute_chain(call.func, view.source.self_name)
        if chain and isinstance(resolve(view.module, chain), types.MethodType):
            raise Refused(
                "not-this-function",
                f"it looks like an RMSNorm, but it calls {view.text(call.func)}(), a method of the module, "
                "which is not followed yet",
                call.lineno,
            )


def _eps_text(view: ForwardView, norm: Norm) -> str:
    """The expression that eps is read from, per instance: an attribute of the module, or a number."""
    expression = view.expression(norm.eps_node)
    if isinstance(expression, ast.BinOp):
        for side in (expression.left, expression.right):
            if isinstance(side, ast.Constant):
                return view.text(side)
            chain = attribute_chain(side, view.source.self_name)
            if chain and reads_plainly(view.module, chain) and resolve(view.module, chain) == norm.eps:
                return view.text(side)
    raise Refused(
        "not-this-function",
        "it looks like an RMSNorm, but its eps is neither a number nor an attribute of the module",
        norm.eps_node.meta["span"].line if norm.eps_node.meta.get("span") else None,
    )


def _is_docstring(statement: ast.stmt) -> bool:
    return (
        isinstance(statement, ast.Expr)
        and isinstance(statement.value, ast.Constant)
        and isinstance(statement.value.value, str)
    )
