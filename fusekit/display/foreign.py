"""Graphs that are torch's own: `fx.Graph`, `GraphModule`, `ExportedProgram`."""

import torch.fx
from torch.export import ExportedProgram

from fusekit.display.dispatch import as_html, as_text
from fusekit.display.drawing import drawing
from fusekit.display.markup import Html, count, line, many, tag
from fusekit.display.nodes import graph_table, graph_text


def _nowhere(node: torch.fx.Node) -> tuple[str, str]:
    """Such a graph knows no forward source; the column is left out."""
    return "", ""


def _title(graph: torch.fx.Graph, name: str) -> str:
    calls = sum(node.op.startswith("call") for node in graph.nodes)
    return f"{name}: {count(len(graph.nodes), 'node')}, {count(calls, 'call')}"


def _plain(graph: torch.fx.Graph, name: str) -> str:
    return "\n".join([_title(graph, name), *graph_text(graph, _nowhere)])


def _rich(graph: torch.fx.Graph, name: str) -> Html:
    title = line(tag("b", _title(graph, name)))
    return many(title, drawing(graph, name), graph_table(graph, _nowhere, "Nodes"))


@as_text.register
def _(graph: torch.fx.Graph) -> str:
    return _plain(graph, "graph")


@as_html.register
def _(graph: torch.fx.Graph) -> Html:
    return _rich(graph, "graph")


@as_text.register
def _(module: torch.fx.GraphModule) -> str:
    return _plain(module.graph, module._get_name())


@as_html.register
def _(module: torch.fx.GraphModule) -> Html:
    return _rich(module.graph, module._get_name())


@as_text.register
def _(program: ExportedProgram) -> str:
    return _plain(program.graph, "exported program")


@as_html.register
def _(program: ExportedProgram) -> Html:
    return _rich(program.graph, "exported program")
