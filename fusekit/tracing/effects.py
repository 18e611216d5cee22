"""The effects of a forward, told by its trace where there were tensors."""

import ast
import inspect
from typing import Any

import torch
import torch.nn as nn

from fusekit.forward import ForwardSource, Span
from fusekit.forward.effects import Effects, effects_of
from fusekit.tracing.result import Trace

# Nodes whose spans say where a value is named: nothing is evaluated for them.
UNEVALUATED = frozenset({"placeholder", "get_attr", "output"})


def effects_of_trace(trace: Trace, module: nn.Module, source: ForwardSource) -> Effects:
    """What the forward of `source` may write, and which of its values may share storage, on every way."""
    given: dict[str, Any] = {}
    try:
        args, kwargs = trace.inputs
        given = dict(inspect.signature(source.function).bind_partial(module, *args, **kwargs).arguments)
    except (TypeError, ValueError):
        pass
    tensors = {
        node.meta["span"]
        for node in trace.graph.nodes
        if node.op not in UNEVALUATED
        and node.meta.get("direct")
        and isinstance(node.meta.get("val"), torch.Tensor)
    }
    seen = {node for span, node in expressions_of(source.tree).items() if span in tensors}
    return effects_of(source, module, given, seen.__contains__)


def expressions_of(tree: ast.AST) -> dict[Span, ast.expr]:
    """The expressions of a forward by where they stand, and by where the bytecode says that they do."""
    found: dict[Span, ast.expr] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.expr):
            found.setdefault(Span.of(node), node)
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                found.setdefault(_method_call_span(node, node.func), node)
    return found


def _method_call_span(call: ast.Call, function: ast.Attribute) -> Span:
    """Where the bytecode of a method call says it starts when the chain runs over several lines."""
    span = Span.of(call)
    assert function.end_lineno is not None and function.end_col_offset is not None
    if function.lineno == function.end_lineno:
        return span
    start = function.end_col_offset - len(function.attr.encode())
    return Span(function.end_lineno, start, span.end_line, span.end_column)
