"""rms_norm(x) * act(gate), or the norm of x * act(gate) -> kernels.gated_rms_norm(x, gate, weight, eps)."""

import ast
from collections.abc import Iterator

import torch.nn as nn

from fusekit.forward import ForwardSource
from fusekit.fusions.match import Match, Objection, Refused
from fusekit.fusions.norm_graph import Norm, activation_of, looks_like_norm, no_norm, peeled, read_norm
from fusekit.fusions.norm_probe import probe_gated
from fusekit.fusions.norm_source import Frame, read_text
from fusekit.fusions.rms_norm import eps_text, norm_edits, weight_and_eps
from fusekit.fusions.view import ForwardView
from fusekit.tracing import Trace
from fusekit.tracing.trace import run_trace


def trace_with_gate(module: nn.Module, source: ForwardSource) -> Trace | None:
    """The trace of a forward of two inputs with both given, None where it takes no two."""
    arguments = source.tree.args
    named = [argument.arg for argument in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]
    if len(named) != 3:
        return None
    loaded = {node.id for node in ast.walk(source.tree) if isinstance(node, ast.Name)}
    return run_trace(module, also=frozenset(named[1:])) if set(named[1:]) <= loaded else None


def find_gated_norms(view: ForwardView, kernels: str) -> Iterator[Match | Objection]:
    """A match when the forward as a whole is a gated RMSNorm, an objection when it only looks like one.

    `view` is of a trace with the gate given. Where the forward takes None for it too, the fused line
    stands behind a test for that.
    """
    if not _is_gated(view):
        return
    try:
        norm = read_norm(view)
        if norm.gate is not None:
            yield _match(view, norm, kernels)
    except Refused as refused:
        message = refused.message.replace("an RMSNorm", "a gated RMSNorm", 1)
        yield Objection("gated_rms_norm", refused.reason, message, refused.line)


def _is_gated(view: ForwardView) -> bool:
    """Whether a forward could be meant for a gated norm: it activates one of its inputs."""
    inputs = [node for node in view.trace.graph.nodes if node.op == "placeholder"]
    activated = {peeled(node.args[0]) for node in view.trace.graph.nodes if activation_of(node)}
    return looks_like_norm(view) and len(inputs) > 1 and bool(activated & set(inputs))


def _match(view: ForwardView, norm: Norm, kernels: str) -> Match:
    assert norm.gate is not None and norm.act is not None
    text, frame = read_text(view, norm)
    eps = eps_text(view, norm, text, frame)
    name, act = _act(view, norm, frame)
    groups = [f"group_size={_group_size(view, norm, frame)}"] if norm.groups is not None else []
    form = probe_gated(view, norm, name, text.kept > 0)
    inputs = [str(norm.input.target), str(norm.gate.target)]
    arguments = [*inputs, *weight_and_eps(view, norm, eps)]
    if act != '"silu"':
        arguments.append(f"act={act}")
    arguments += groups
    if form.source():
        arguments.append(form.source())
    edits = norm_edits(view, text, f"{kernels}.gated_rms_norm", ", ".join(arguments))
    return Match("gated_rms_norm", (), edits, view.source.tree.lineno)


def _act(view: ForwardView, norm: Norm, frame: Frame) -> tuple[str, str]:
    """(the name of the activation, the text that gives it)."""
    assert norm.act is not None
    name = activation_of(norm.act)
    index = frame.act_name()
    if index is None or name is None:
        return str(name), f'"{name}"'
    text = view.text(index)
    known = frame.value_of(index)
    if not isinstance(known, str) or activation_of(norm.act) != _canonical(known):
        raise no_norm(f"{text} is no name of a known activation", norm.act)
    return known, text


def _canonical(name: str) -> str:
    return "silu" if name == "swish" else name


def _group_size(view: ForwardView, norm: Norm, frame: Frame) -> str:
    size = frame.group_size()
    if size is None:
        raise no_norm("the size of its groups is no attribute of the module", norm.groups)
    return view.text(size)
