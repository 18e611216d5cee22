"""weight * (x * rsqrt(mean(x ** 2) + eps)) -> kernels.rms_norm(x, weight, eps), in every spelling.

The graph says that the function is an RMSNorm, and where weight, eps and offset come from
(`norm_graph.py`); the text, that it does nothing else (`norm_source.py`); a probe (`norm_probe.py`)
then looks for the rounding order that gives the same bits as the module itself.
"""

from collections.abc import Iterator

from fusekit.forward import Edit, Span
from fusekit.fusions.match import Match, Objection, Refused
from fusekit.fusions.norm_graph import Norm, inner_norms, looks_like_norm, no_norm, read_norm
from fusekit.fusions.norm_probe import probe
from fusekit.fusions.norm_source import Frame, Text, read_text
from fusekit.fusions.norm_text import is_docstring, joined
from fusekit.fusions.view import ForwardView

LINE = 110  # what a line of a rewritten forward may be long


def find_norms(view: ForwardView, kernels: str) -> Iterator[Match | Objection]:
    """A match when the forward as a whole is an RMSNorm, an objection when it only looks like one.

    Norms written inside of a larger forward are objections too.
    """
    if not looks_like_norm(view):
        yield from _inside(view)
        return
    try:
        yield _match(view, kernels)
    except Refused as refused:
        yield refused.objection("rms_norm", ())


def _inside(view: ForwardView) -> Iterator[Objection]:
    lines = set()
    for node in inner_norms(view):
        span = node.meta.get("span")
        line = span.line if span else None
        if line not in lines:
            lines.add(line)
            yield Objection(
                "rms_norm",
                "not-this-function",
                "it takes a root of a mean of squares inside of a larger forward; an RMSNorm is fused where "
                "it is the whole forward of a module",
                line,
            )


def _match(view: ForwardView, kernels: str) -> Match:
    norm = read_norm(view)
    if norm.gate is not None:
        raise no_norm("it multiplies by an activated second input", norm.act)
    if norm.groups is not None:
        raise no_norm("it normalises groups of features by themselves", norm.groups)
    text, frame = read_text(view, norm)
    eps = eps_text(view, norm, text, frame)
    form = probe(view, norm, text.kept > 0)
    arguments = [str(norm.input.target), *weight_and_eps(view, norm, eps)]
    if form.source():
        arguments.append(form.source())
    edits = norm_edits(view, text, f"{kernels}.rms_norm", ", ".join(arguments))
    return Match("rms_norm", (), edits, view.source.tree.lineno)


def weight_and_eps(view: ForwardView, norm: Norm, eps: str) -> list[str]:
    """The arguments of a norm's kernel that say its weight, where it has one, and its eps."""
    if norm.weight is None:
        return [f"eps={eps}"]
    return [f"{view.source.self_name}.{norm.weight.target}", eps]


def eps_text(view: ForwardView, norm: Norm, text: Text, frame: Frame) -> str:
    """What eps is read from, per instance: an attribute of the module, a number, or an input."""
    if norm.eps_node is None:
        return "0.0"
    found = frame.eps_text()
    if found is None and norm.inverse is None and norm.eps is None:
        return "None"
    if found is None:
        span = norm.eps_node.meta.get("span")
        raise Refused(
            "not-this-function",
            "it looks like an RMSNorm, but its eps is neither a number nor an attribute of the module",
            span.line if span else None,
        )
    if found.isidentifier() and found not in ("None", "True", "False"):
        if "isinstance" in view.names - {found} and view.stores("isinstance"):
            raise no_norm("isinstance is a name of its own", norm.eps_node)
        text.guards.append(f"isinstance({found}, float)")
    return found


def norm_edits(view: ForwardView, text: Text, kernel: str, arguments: str) -> tuple[Edit, ...]:
    """`return kernel(arguments)` in the place of the body; above it, under a test, where it branches."""
    body = view.source.tree.body
    body = body[1 if is_docstring(body[0]) else 0 :][text.kept :]
    start, end = Span.of(body[0]), Span.of(body[-1])
    place, indent, begins = view.statement_start(body[0])
    if not text.guards:
        call = _call(kernel, arguments, indent if begins else None)
        return (Edit(Span(start.line, start.column, end.end_line, end.end_column), call),)
    if not begins:
        raise no_norm("there is no line for the test that it needs", None)
    inner = indent + _step(indent)
    return (Edit(place, f"if {joined(text.guards)}:\n{inner}{_call(kernel, arguments, inner)}\n{indent}"),)


def _call(kernel: str, arguments: str, indent: str | None) -> str:
    """The line that returns the kernel's result, cut where it would be longer than LINE."""
    line = f"return {kernel}({arguments})"
    if indent is None or len(indent) + len(line) <= LINE:
        return line
    return f"return {kernel}(\n{indent}{_step(indent)}{arguments}\n{indent})"


def _step(indent: str) -> str:
    return "\t" if indent.endswith("\t") else "    "
