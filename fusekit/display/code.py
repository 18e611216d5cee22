"""Source text with colours: a highlighter on `tokenize`, and lines with their numbers.

Half a function, tabs, a syntax error: whatever cannot be read stays plain.
"""

import io
import keyword
import token
import tokenize
from collections.abc import Sequence
from itertools import pairwise

from fusekit.display.markup import CODE, Html, esc, lines_of, many, tag
from fusekit.display.theme import TINTS, ink

Piece = tuple[str, str]  # a colour's name or "", and the text


def highlight(text: str) -> list[list[Piece]]:
    """The lines of `text`, each as pieces that join to the line again."""
    lines = lines_of(text)
    runs: list[list[tuple[int, int, str]]] = [[] for _ in lines]  # start, end, colour
    before = ""
    try:
        for tok in tokenize.generate_tokens(io.StringIO("\n".join(lines) + "\n").readline):
            colour = _colour(tok, before)
            if tok.type not in (token.NEWLINE, token.NL, token.INDENT, token.DEDENT):
                before = tok.string
            if colour:
                for row in range(tok.start[0], tok.end[0] + 1):
                    start = tok.start[1] if row == tok.start[0] else 0
                    end = tok.end[1] if row == tok.end[0] else len(lines[row - 1])
                    runs[row - 1].append((start, end, colour))
    except (tokenize.TokenError, SyntaxError, IndexError):
        pass
    return [_pieces(line, found) for line, found in zip(lines, runs, strict=True)]


def _colour(tok: tokenize.TokenInfo, before: str) -> str:
    if tok.type == token.COMMENT:
        return "comment"
    if tok.type == token.STRING or token.tok_name[tok.type].startswith("FSTRING"):
        return "string"
    if tok.type == token.NUMBER:
        return "number"
    if tok.type == token.NAME:
        if keyword.iskeyword(tok.string):
            return "keyword"
        return "name" if before in ("def", "class", "@") else ""
    return ""


def _pieces(line: str, runs: list[tuple[int, int, str]]) -> list[Piece]:
    pieces, at = [], 0
    for start, end, colour in sorted(runs):
        if start < at or end <= start:
            continue
        pieces += [("", line[at:start])] if start > at else []
        pieces.append((colour, line[start:end]))
        at = end
    return pieces + ([("", line[at:])] if at < len(line) else [])


def line_html(
    pieces: Sequence[Piece], marks: Sequence[tuple[int, int]] = (), mark: Html | None = None
) -> Html:
    """One line; the ranges in `marks` are wrapped in the tag that `mark` opens."""
    out, at = [], 0
    name = mark[1:].partition(" ")[0].rstrip(">") if mark else ""
    for colour, text in pieces:
        for start, end, inside in _split(at, at + len(text), marks):
            part = esc(text[start - at : end - at])
            if colour:
                part = ink(colour, part)
            out.append(Html(f"{mark}{part}</{name}>") if inside and mark else part)
        at += len(text)
    return many(*out)


def _split(start: int, end: int, marks: Sequence[tuple[int, int]]) -> list[tuple[int, int, bool]]:
    cuts = sorted({start, end, *(c for pair in marks for c in pair if start < c < end)})
    return [(a, b, any(x <= a and b <= y for x, y in marks)) for a, b in pairwise(cuts)]


def indent_of(*texts: str) -> int:
    """How many leading blanks every line of every text has."""
    full = [line for text in texts for line in lines_of(text) if line.strip()]
    return min((len(line) - len(line.lstrip(" ")) for line in full), default=0)


def outdent(text: str, by: int) -> str:
    """`text` without `by` leading blanks a line (a shorter line loses what it has)."""
    return "\n".join(line[by:] if not line[:by].strip() else line.lstrip() for line in lines_of(text))


def numbered(text: str, first: int, marked: dict[int, str] | None = None) -> Html:
    """`text` with line numbers beside it, so that copying the code copies code alone.

    `marked` gives lines that are tinted, with the sign that stands before their number.
    """
    marked = marked or {}
    lines = [line_html(pieces) for pieces in highlight(outdent(text, indent_of(text)))]
    width = len(str(first + len(lines)))
    sign = max(map(len, marked.values()), default=0)
    numbers, codes = [], []
    for number, body in enumerate(lines, first):
        tint = "marked" if number in marked else ""
        numbers.append(row(f"{marked.get(number, ''):{sign}}{number:>{width}}", tint))
        codes.append(row(body, tint))
    gutter = tag("pre", many(*numbers), CODE + ";opacity:0.7;text-align:right", class_="fk-numbers")
    body = tag("pre", tag("div", many(*codes), "display:inline-block;min-width:100%"), CODE)
    cell = "vertical-align:top;text-align:left;padding:0;border:none;white-space:normal"
    left = tag("td", gutter, cell + ";padding-right:10px;width:1%")
    right = tag("td", tag("div", body, "overflow-x:auto"), cell)
    style = "border-collapse:collapse;width:100%;table-layout:auto;border:none;margin:2px 0"
    lines_and_code = tag("tr", many(left, right), "background:transparent")
    return tag("div", tag("table", lines_and_code, style), "overflow-x:auto")


def row(body: object, tint: str = "") -> Html:
    """A line of a `<pre>`, with its line break, so that it also copies and reads as a line."""
    if not tint:
        return many(body, "\n")
    return tag("span", many(body, "\n"), f"display:block;background:{TINTS[tint]}")
