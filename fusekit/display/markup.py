"""Text and html by hand: what is not `Html` is escaped, always.

Inline styles keep to what JupyterLab lets through in an untrusted notebook (no variables, no
`inherit`, no `currentColor`, colours in hex or rgba), and say nothing about ink or paper, so they
read on white and on black. Left alignment is spelled out on every cell because JupyterLab aligns
cells right.
"""

import html
import re
from collections.abc import Iterable, Sequence

_STEERING = "\x00-\x08\x0b-\x1f\x7f-\x9f"  # escapes, bells, carriage returns
_REORDERING = "\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff"  # and lone surrogates
_UNPRINTABLE = re.compile(f"[{_STEERING}{_REORDERING}]")

CELL = "text-align:left;vertical-align:top;padding:2px 10px 2px 0"
HEAD = CELL + ";border-bottom:1px solid rgba(128,128,128,0.5)"
CODE = "font-family:monospace;white-space:pre;margin:0;padding:0;background:transparent"
MONO = "font-family:monospace"


class Html(str):
    """Text that is html already."""


def clean(text: str) -> str:
    """`text` without what could steer a terminal or reorder what is read: shown as escapes instead."""
    return _UNPRINTABLE.sub(lambda m: m.group().encode("unicode_escape").decode("ascii"), text)


def join(parts: Iterable[str], by: str = " ") -> str:
    return by.join(part for part in parts if part)


def lines_of(text: str) -> list[str]:
    """Lines as a source file counts them; `splitlines` would also split at a form feed."""
    return text.removesuffix("\n").split("\n") if text else []


def clip(text: str, width: int) -> str:
    """`text` on one line, at most `width` long."""
    line = " ".join(text.split())
    return line if len(line) <= width else line[: width - 1] + "…"


def count(number: int, noun: str, plural: str = "") -> str:
    """A number with its noun: 1 site, 3 sites."""
    return f"{number} {noun if number == 1 else plural or noun + 's'}"


def columns(rows: Sequence[Sequence[str]], widths: Sequence[int] = (), indent: str = "  ") -> list[str]:
    """Rows of cells as aligned lines, each cell at most its width (0 or missing: no limit)."""
    limits = [*widths, *[0] * max((len(row) for row in rows), default=0)]
    cut = [[clip(cell, limits[i] or 10_000) for i, cell in enumerate(row)] for row in rows]
    wide = [max(len(row[i]) for row in cut if i < len(row)) for i in range(max(map(len, cut), default=0))]
    return [(indent + "  ".join(c.ljust(wide[i]) for i, c in enumerate(row))).rstrip() for row in cut]


def esc(text: object) -> Html:
    """`text` as html; html stays what it is."""
    return text if isinstance(text, Html) else Html(html.escape(clean(str(text)), quote=True))


def tag(name: str, body: object = "", style: str = "", **attributes: str) -> Html:
    """`<name style=... attribute=...>body</name>`; `class_` and the like lose their underscore."""
    given = ({"style": style} if style else {}) | attributes
    marks = "".join(f' {key.strip("_").replace("_", "-")}="{esc(value)}"' for key, value in given.items())
    return Html(f"<{name}{marks}>{esc(body)}</{name}>")


def many(*parts: object) -> Html:
    """Parts one after another."""
    return Html("".join(esc(part) for part in parts))


def line(*parts: object) -> Html:
    """One paragraph."""
    return tag("div", many(*parts), "margin:2px 0")


def code(text: object, whole: bool = False) -> Html:
    """Something to type; `whole` is never broken into lines (a cell's own rule does not reach into it)."""
    style = "font-family:monospace;background:transparent;padding:0"
    return tag("code", text, style + (";white-space:nowrap" if whole else ""))


def soft(text: object) -> Html:
    """Less important, still readable on any ground."""
    return tag("span", text, "opacity:0.75")


def pre(text: object) -> Html:
    return tag("div", tag("pre", text, CODE), "overflow-x:auto")


def fold(summary: object, body: object, open_: bool = False) -> Html:
    """What a click opens; find-in-page sees what is inside either way."""
    head = tag("summary", summary, "cursor:pointer;padding:1px 0")
    inner = tag("div", body, "margin:2px 0 6px 16px")
    mark = ' open=""' if open_ else ""
    return Html(f"<details{mark}>{head}{inner}</details>")


def table(
    caption: object,
    head: Sequence[object],
    rows: Iterable[Sequence[object]],
    mono: Sequence[int] = (),
    whole: Sequence[int] = (),
) -> Html:
    """A table in a scroll box of its own; the first cell of a row is its heading.

    Columns in `mono` hold code, those in `whole` are never broken into lines. A row of one cell
    in a wider table spans it.
    """
    return frame(caption, head, (row_of(row, len(head), mono, whole) for row in rows))


def frame(caption: object, head: Sequence[object], rows: Iterable[Html]) -> Html:
    """`table` of rows that are html already."""
    title = tag("caption", caption, "text-align:left;caption-side:top;padding:2px 0;font-weight:bold")
    heads = [tag("th", name, HEAD, scope="col") for name in head]
    parts = [title if caption else "", tag("thead", tag("tr", many(*heads))) if heads else ""]
    style = "border-collapse:collapse;margin:4px 0;table-layout:auto;border:none;font-size:12px"
    body = tag("table", many(*parts, tag("tbody", many(*rows))), style)
    return tag("div", body, "overflow-x:auto")


def row_of(
    row: Sequence[object], width: int, mono: Sequence[int] = (), whole: Sequence[int] = (), paper: str = ""
) -> Html:
    """One row of a table of `width` columns; `paper` overrides the stripes of a notebook's own style."""
    ground = f"background:{paper}" if paper else ""
    if len(row) == 1 and width > 1:
        return tag("tr", tag("td", row[0], CELL, colspan=str(width)), ground)
    cells = []
    for i, cell in enumerate(row):
        style = CELL + (";" + MONO if i in mono else "") + (";white-space:nowrap" if i in whole else "")
        if i == 0 and width > 1:
            cells.append(tag("th", cell, style + ";font-weight:normal", scope="row"))
        else:
            cells.append(tag("td", cell, style))
    return tag("tr", many(*cells), ground)
