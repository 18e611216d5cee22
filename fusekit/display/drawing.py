"""A dataflow graph as a drawing, where one can be made.

What makes a layout slow and a picture unreadable is not the number of nodes but one source that
everything uses (a mask, the rotary cosines): a source with more than `FAN_OUT` users is drawn once,
and at each user as a small dashed stub.
"""

import keyword
import operator
from dataclasses import dataclass, field

import torch.fx

from fusekit.display.layout import Item, Layout, NoLayout, Shape, lay_out
from fusekit.display.markup import Html, clip, count, esc, many, soft, tag
from fusekit.display.nodes import target_of, value_of

FAN_OUT = 8
BOXES = 300

KINDS = {  # kind: (what the legend says, DOT attributes, fill, stroke)
    "input": ("input (rounded)", {"style": "rounded"}, "rgba(47,127,208,0.16)", "#2f7fd0"),
    "stored": ("parameter or buffer (rounded)", {"style": "rounded"}, "rgba(122,130,142,0.16)", "#7a828e"),
    "module": ("module call (heavy frame)", {}, "rgba(44,138,75,0.18)", "#2c8a4b"),
    "op": ("tensor operation (plain)", {}, "rgba(128,128,128,0.08)", "#7a828e"),
    "attention": (
        "attention, opaque (double frame)",
        {"peripheries": "2"},
        "rgba(192,96,58,0.18)",
        "#c0603a",
    ),
    "output": ("output (rounded)", {"style": "rounded"}, "rgba(159,98,216,0.18)", "#9f62d8"),
    "stub": ("the same input again (dashed)", {"style": "rounded"}, "none", "#2f7fd0"),
}


KIND_OF_OP = {"placeholder": "input", "get_attr": "stored", "call_module": "module", "output": "output"}


def kind_of(node: torch.fx.Node) -> str:
    """Which of `KINDS` a node is."""
    if node.op == "call_function" and is_attention(node.target):
        return "attention"
    return KIND_OF_OP.get(node.op, "op")


def is_attention(target: object) -> bool:
    """Whether a call is an attention function: a trace says so, elsewhere its name does."""
    said = getattr(target, "attention", None)
    if isinstance(said, bool):
        return said
    name = target_of(target).lower()
    return "attention" in name or "sdpa" in name


@dataclass
class Boxes:
    """What is to be drawn: boxes by their name in the DOT source, and arrows between them."""

    nodes: dict[str, tuple[str, list[str]]] = field(default_factory=dict)  # title: (kind, label lines)
    edges: list[tuple[str, str]] = field(default_factory=list)


def boxes_of(graph: torch.fx.Graph) -> Boxes:
    """Boxes and arrows, with stubs for what more than `FAN_OUT` nodes use."""
    boxes = Boxes()
    title = {node: f"n{i}" for i, node in enumerate(graph.nodes)}
    for node, name in title.items():
        if not node.users and node.op in ("placeholder", "get_attr"):
            continue  # an argument nobody uses: it stands in the table
        label = _label(node)
        busy = len(node.users) > FAN_OUT
        if busy:
            label.append(f"{len(node.users)} users, dashed below")
        boxes.nodes[name] = (kind_of(node), label)
        for source in node.all_input_nodes:
            if len(source.users) > FAN_OUT:
                stub = f"{title[source]}_{name}"
                boxes.nodes[stub] = ("stub", [clip(source.name, 24)])
                boxes.edges.append((stub, name))
            else:
                boxes.edges.append((title[source], name))
    return boxes


def _label(node: torch.fx.Node) -> list[str]:
    first = clip(node.name, 28)
    if node.op == "call_module":
        called = str(node.target)
        first = clip(called, 28)
        if called.replace(".", "_") != node.name:
            first = clip(f"{node.name}: {called}", 36)
    elif node.op in ("call_function", "call_method"):
        called = target_of(node.target).removeprefix("operator.").removeprefix("torch.")
        if node.target is operator.getitem:
            first = clip(f"{node.name}", 28)
        elif not node.name.startswith(called.replace(".", "_")) and not keyword.iskeyword(called):
            first = clip(f"{node.name}: {called}", 40)
    value = value_of(node)
    return [first, *([clip(value, 40)] if value and node.op != "output" else [])]


def dot_source(boxes: Boxes) -> str:
    """The drawing in the DOT language."""
    import graphviz

    dot = graphviz.Digraph()
    dot.attr(rankdir="TB", ranksep="0.28", nodesep="0.22")
    dot.attr("node", shape="box", fontname="Courier", fontsize="11", margin="0.12,0.05", height="0.3")
    dot.attr("edge", arrowsize="0.6")
    for title, (kind, label) in boxes.nodes.items():
        words = "\\n".join(graphviz.escape(text) for text in label)
        size = {"fontsize": "9", "height": "0.2"} if kind == "stub" else {}
        dot.node(title, words, **KINDS[kind][1], **size)
    for start, end in boxes.edges:
        dot.edge(start, end)
    return str(dot.source)


def drawing(graph: torch.fx.Graph, what: str) -> Html:
    """The graph as a picture in a box that scrolls, or one line that says why there is none."""
    boxes = boxes_of(graph)
    if len(boxes.nodes) > BOXES:
        return soft(f"No drawing: {len(boxes.nodes)} boxes, and more than {BOXES} are not readable.")
    try:
        layout = lay_out(dot_source(boxes))
    except NoLayout as why:
        return soft(str(why))
    except ImportError:
        return soft("No drawing: the package graphviz is not installed (pip install graphviz graphviz-pure).")
    said = f"Drawing of {what}: {count(len(boxes.nodes), 'box', 'boxes')}; the table of nodes says the same."
    box = (
        "overflow:auto;max-height:560px;border:1px solid rgba(128,128,128,0.35);border-radius:4px;padding:6px"
    )
    kinds = list(dict.fromkeys(kind for kind, _ in boxes.nodes.values()))
    legend = soft("Boxes: " + "; ".join(KINDS[kind][0] for kind in KINDS if kind in kinds) + ".")
    rich = tag(
        "div", many(tag("div", _svg(layout, boxes, said), box), legend), "display:none", class_="fk-rich"
    )
    bare = tag(
        "div",
        soft("The drawing shows once the notebook is trusted; the table says the same."),
        class_="fk-bare",
    )
    return many(rich, bare)


def _svg(layout: Layout, boxes: Boxes, said: str) -> Html:
    groups = [_arrow(item) if item.kind == "edge" else _box(item, boxes) for item in layout.items]
    inner = f'<g transform="{esc(layout.transform)}">{"".join(groups)}</g>'
    size = f"width:{layout.width:.0f}px;height:{layout.height:.0f}px"
    look = f'style="{size};max-width:none;display:block;margin:0 auto"'
    return Html(
        f'<svg viewBox="{esc(layout.view_box)}" role="img" aria-label="{esc(said)}" {look}>{inner}</svg>'
    )


def _arrow(item: Item) -> str:
    shapes = "".join(
        _shape(shape, fill="none" if shape.name == "path" else "currentColor", stroke="currentColor")
        for shape in item.shapes
    )
    return f'<g opacity="0.55">{shapes}</g>'


def _box(item: Item, boxes: Boxes) -> str:
    kind = boxes.nodes[item.title][0] if item.title in boxes.nodes else "op"
    _, _, fill, stroke = KINDS[kind]
    extra = {"stub": {"stroke_dasharray": "4 3"}, "module": {"stroke_width": "2"}}.get(kind, {})
    shapes = [
        _shape(shape, fill="none" if i else fill, stroke=stroke, **extra)
        for i, shape in enumerate(item.shapes)
    ]
    size = 9 if kind == "stub" else 11
    words = [
        f'<text x="{esc(w.x)}" y="{esc(w.y)}" text-anchor="middle" font-size="{size}" font-family="monospace"'
        f' fill="currentColor" opacity="{0.8 if i else 1}">{esc(w.text)}</text>'
        for i, w in enumerate(item.words)
    ]
    return f"<g>{''.join(shapes)}{''.join(words)}</g>"


def _shape(shape: Shape, **attributes: str) -> str:
    given = dict(shape.attributes) | {key.replace("_", "-"): value for key, value in attributes.items()}
    marks = "".join(f' {key}="{esc(value)}"' for key, value in given.items())
    return f"<{shape.name}{marks}/>"
