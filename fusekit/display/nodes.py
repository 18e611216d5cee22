"""The nodes of a dataflow graph in words: each one's target, inputs and value, and the table of all."""

from collections.abc import Callable

import torch
import torch.fx

from fusekit.display.markup import Html, clip, columns, fold, line, many, pre, table, tag
from fusekit.display.theme import notice

TABLE = 300  # nodes in one table; more are listed as text
ROWS = 1500


def target_of(target: object) -> str:
    """A call's target as a reader would write it; never an address."""
    if isinstance(target, str):
        return target
    if isinstance(target, torch._ops.OpOverload | torch._ops.OpOverloadPacket):
        return str(target)
    name = getattr(target, "__name__", None) or type(target).__name__
    module = getattr(target, "__module__", None) or ""
    if module in ("_operator", "operator"):
        return f"operator.{name}"
    if module.startswith("torch") or (not module and getattr(torch, name, None) is target):
        return f"torch.{name}"
    return str(name)


def value_of(node: torch.fx.Node) -> str:
    """Shape and dtype of what a node made, or "" where it is not known."""
    return _value(node.meta["val"]) if "val" in node.meta else ""


def _value(value: object, depth: int = 0) -> str:
    if isinstance(value, torch.Tensor):
        shape = ", ".join(str(size) for size in value.shape)
        return f"[{shape}] {str(value.dtype).removeprefix('torch.')}"
    if isinstance(value, tuple | list):
        inside = "; ".join(_value(item, depth + 1) for item in value[:6]) if depth < 2 else "…"
        return f"({inside}{'; …' if len(value) > 6 else ''})"
    if value is None or isinstance(value, bool | int | float | torch.dtype | torch.device):
        return str(value)
    return type(value).__name__


def arguments_of(node: torch.fx.Node) -> str:
    """The arguments as they would be typed, nodes by their names."""
    words = [_argument(arg) for arg in node.args]
    words += [f"{key}={_argument(value)}" for key, value in node.kwargs.items()]
    return ", ".join(words)


def _argument(value: object) -> str:
    if isinstance(value, torch.fx.Node):
        return value.name
    if isinstance(value, tuple | list):
        inside = ", ".join(_argument(item) for item in value)
        return f"[{inside}]" if isinstance(value, list) else f"({inside}{',' if len(value) == 1 else ''})"
    if isinstance(value, slice):
        ends = [value.start, value.stop] + ([value.step] if value.step is not None else [])
        return ":".join("" if end is None else _argument(end) for end in ends)
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_argument(k)}: {_argument(v)}" for k, v in value.items()) + "}"
    if value is Ellipsis:
        return "..."
    if value is None or isinstance(value, bool | int | float | str):
        return repr(value)
    if isinstance(value, torch.dtype | torch.device):
        return str(value)
    return type(value).__name__


Place = Callable[[torch.fx.Node], tuple[str, str]]  # the line of the source, and what stands there
HEAD = ["node", "op", "target", "inputs", "shape and dtype", "line", "source"]


def node_rows(graph: torch.fx.Graph, place: Place) -> list[list[str]]:
    """A row of `HEAD` for each node; without the last two where no node has a place."""
    rows = [
        [
            node.name,
            node.op,
            "" if node.op in ("placeholder", "output") else target_of(node.target),
            arguments_of(node),
            value_of(node),
            *place(node),
        ]
        for node in graph.nodes
    ]
    return rows if any(row[5] for row in rows) else [row[:5] for row in rows]


def graph_text(graph: torch.fx.Graph, place: Place, most: int = 120) -> list[str]:
    rows = node_rows(graph, place)
    head = HEAD[: len(rows[0])] if rows else HEAD[:5]
    lines = columns([head, *rows[:most]], [24, 13, 24, 34, 32, 0, 46])
    if len(rows) > most:
        lines.append(f"  ... and {len(rows) - most} nodes more; the graph is at .graph")
    return lines


def _unbroken(value: str) -> Html:
    """A shape and its dtype stay on one line; of several, each does."""
    return Html(
        "; ".join(tag("span", one, "white-space:nowrap") for one in value.split("; ")) if value else ""
    )


def graph_table(graph: torch.fx.Graph, place: Place, caption: str) -> Html:
    rows = node_rows(graph, place)
    if len(rows) > TABLE:
        return many(line(tag("b", caption)), *_runs(rows))
    cells: list[list[object]] = []
    for name, op, target, inputs, value, *source in rows:
        cut = [clip(target, 60), clip(inputs, 300), _unbroken(clip(value, 120))]
        cells.append([name, op, *cut, *(clip(text, 90) for text in source)])
    head = HEAD[: len(rows[0])] if rows else HEAD[:5]
    return table(caption, head, cells, mono=(0, 2, 3, 4, 5, 6), whole=(0, 1, 2, 5))


def _runs(rows: list[list[str]]) -> list[Html]:
    """A long graph as aligned text in closed folds: a fifth of the bytes, and quick to open."""
    parts = []
    for start in range(0, min(len(rows), ROWS), 100):
        some = rows[start : start + 100]
        title = f"nodes {start + 1} to {start + len(some)}: {some[0][0]} … {some[-1][0]}"
        lines = columns([HEAD[: len(rows[0])], *some], [40, 13, 40, 60, 40, 0, 60], "")
        parts.append(fold(title, pre("\n".join(lines))))
    if len(rows) > ROWS:
        parts.append(notice(f"{len(rows)} nodes, the first {ROWS} listed; the rest is in the graph itself."))
    return parts
