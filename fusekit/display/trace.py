"""A trace: where it stopped, its drawing, its nodes, its assumptions."""

import torch.fx

from fusekit.display.dispatch import as_html, as_text
from fusekit.display.drawing import drawing
from fusekit.display.markup import Html, columns, count, fold, line, lines_of, many, soft, table, tag
from fusekit.display.nodes import graph_table, graph_text
from fusekit.display.source import folded_source, place
from fusekit.display.theme import ink, notice
from fusekit.forward import ForwardSource
from fusekit.forward.span import Span
from fusekit.tracing import Assumption, Stopped, Trace


def expression(source: ForwardSource | None, span: Span) -> str:
    """What stands at `span`, on one line; columns count utf-8 bytes."""
    if source is None:
        return ""
    lines = [text.encode() for text in lines_of(source.text)]
    some = lines[max(span.line - source.line, 0) : span.end_line - source.line + 1]
    if not some or span.line < source.line:
        return ""
    some[-1] = some[-1][: span.end_column]
    some[0] = some[0][span.column :]
    return " ".join(part.strip() for part in b"\n".join(some).decode(errors="replace").splitlines())


def _place(trace: Trace, node: torch.fx.Node) -> tuple[str, str]:
    span = node.meta.get("span")
    if not isinstance(span, Span):
        return "", ""
    return str(span.line), expression(trace.source, span)


def _title(trace: Trace) -> str:
    modules = sum(node.op == "call_module" for node in trace.graph.nodes)
    said = f"{count(len(trace.graph.nodes), 'node')}, {count(modules, 'module call')}"
    return f"{trace.name}: {said}, {'complete' if trace.stopped is None else 'incomplete'}"


def stop_text(stopped: Stopped) -> str:
    return f"stopped at {place(stopped.path, stopped.line)}: {stopped.message}"


def stop_notice(stopped: Stopped | None) -> Html:
    if stopped is None:
        return Html("")
    where = tag("b", f"Stopped at {place(stopped.path, stopped.line)}: ")
    return notice(where, stopped.message, soft("  What follows that line is not here."))


def assumptions_text(assumptions: tuple[Assumption, ...], most: int = 12) -> list[str]:
    if not assumptions:
        return []
    rows = [[a.kind, "" if a.line is None else f"line {a.line}", a.text] for a in assumptions]
    lines = columns(rows[:most], [10, 0, 90], "    ")
    more = [f"    ... and {len(rows) - most} more"] if len(rows) > most else []
    return [f"  {count(len(rows), 'assumption')}", *lines, *more]


def assumptions_html(assumptions: tuple[Assumption, ...], open_: bool = False) -> Html:
    if not assumptions:
        return Html("")
    rows = [[a.kind, a.text, "" if a.line is None else str(a.line)] for a in assumptions[:200]]
    title = f"{count(len(assumptions), 'assumption')}, taken because no input says otherwise"
    return fold(title, table("", ["kind", "taken for granted", "line"], rows, mono=(1,)), open_)


@as_text.register
def _(trace: Trace) -> str:
    stop = [f"  {stop_text(trace.stopped)}"] if trace.stopped else []
    nodes = graph_text(trace.graph, lambda node: _place(trace, node))
    return "\n".join([_title(trace), *stop, *nodes, *assumptions_text(trace.assumptions)])


@as_html.register
def _(trace: Trace) -> Html:
    name, _, rest = _title(trace).partition(": ")
    head = line(tag("b", name), "  ", rest if trace.complete else ink("bad", rest))
    where = f" ({place(trace.source.path, trace.source.line)})" if trace.source else ""
    return many(
        head,
        stop_notice(trace.stopped),
        drawing(trace.graph, f"the dataflow of {trace.name}"),
        graph_table(trace.graph, lambda node: _place(trace, node), f"Nodes{where}"),
        assumptions_html(trace.assumptions, open_=len(trace.assumptions) <= 6),
        folded_source(trace.source),
    )
