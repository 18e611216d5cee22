"""A source diff: before and after side by side, words marked, what is equal folded away.

A changed line carries `-` or `+`, its words are underlined as well as tinted, so nothing is told
by colour alone.
"""

import difflib
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from fusekit.display.code import Piece, highlight, indent_of, line_html, outdent, row
from fusekit.display.dispatch import as_html, as_text
from fusekit.display.markup import CODE, Html, count, fold, line, lines_of, many, soft, tag
from fusekit.display.source import place
from fusekit.display.theme import TINTS
from fusekit.forward import SourceDiff

CONTEXT = 3
LEAST_FOLD = 4  # fewer unchanged lines than this are shown, not folded

Marks = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Pair:
    """One row: a line before, the line after that answers it, or one of them alone.

    Numbers count from 0 in the text; `equal` when nothing changed.
    """

    before: int | None
    after: int | None
    equal: bool = False


def pairs(before: Sequence[str], after: Sequence[str]) -> list[Pair]:
    """All lines of both, in order, paired where they are equal or alike."""
    out: list[Pair] = []
    for op, i, j, k, m in difflib.SequenceMatcher(None, before, after, autojunk=False).get_opcodes():
        if op == "equal":
            out += [Pair(i + n, k + n, True) for n in range(j - i)]
        else:
            out += _answer(before, after, range(i, j), range(k, m))
    return out


def _answer(before: Sequence[str], after: Sequence[str], old: range, new: range) -> list[Pair]:
    """Pairs the lines of a changed block so that the sum of their likeness is largest."""
    if len(old) * len(new) > 900:
        alike = {(i, j): 0.5 for i, j in zip(old, new, strict=False)}
    else:
        alike = {(i, j): _likeness(before[i], after[j]) for i in old for j in new}
    best: dict[tuple[int, int], float] = {}
    for i in reversed(range(old.start, old.stop + 1)):
        for j in reversed(range(new.start, new.stop + 1)):
            skip = max(best.get((i + 1, j), 0.0), best.get((i, j + 1), 0.0))
            take = alike.get((i, j), 0.0)
            best[i, j] = max(skip, take + best.get((i + 1, j + 1), 0.0)) if take else skip
    out, i, j = [], old.start, new.start
    while i < old.stop or j < new.stop:
        take = alike.get((i, j), 0.0)
        if take and best[i, j] == take + best.get((i + 1, j + 1), 0.0):
            out.append(Pair(i, j))
            i, j = i + 1, j + 1
        elif i < old.stop and best.get((i + 1, j), 0.0) >= best.get((i, j + 1), 0.0):
            out.append(Pair(i, None))
            i += 1
        elif j < new.stop:
            out.append(Pair(None, j))
            j += 1
        else:
            out.append(Pair(i, None))
            i += 1
    return out


def _likeness(old: str, new: str) -> float:
    """0 for lines that share too little to be read as one changed line."""
    if not old.strip() or not new.strip():
        return 0.0
    ratio = difflib.SequenceMatcher(None, _words(old), _words(new), autojunk=False).ratio()
    return ratio if ratio >= 0.5 else 0.0


def _words(text: str) -> list[str]:
    return re.findall(r"\w+|\s+|[^\w\s]", text)


def word_marks(old: str, new: str) -> tuple[Marks, Marks]:
    """Ranges of characters of `old` and of `new` that the other lacks."""
    a, b = _words(old), _words(new)
    gone, come = [], []
    at = _offsets(a), _offsets(b)
    for op, i, j, k, m in difflib.SequenceMatcher(None, a, b, autojunk=False).get_opcodes():
        if op != "equal":
            gone += [(at[0][i], at[0][j])] if j > i else []
            come += [(at[1][k], at[1][m])] if m > k else []
    return _joined(gone), _joined(come)


def _joined(marks: list[tuple[int, int]]) -> Marks:
    """Marks with a gap of one or two characters as one: a dot between two changed names is no island."""
    out: list[tuple[int, int]] = []
    for start, end in marks:
        if out and start - out[-1][1] <= 2:
            out[-1] = (out[-1][0], end)
        else:
            out.append((start, end))
    return tuple(out)


def _offsets(words: Sequence[str]) -> list[int]:
    out = [0]
    for word in words:
        out.append(out[-1] + len(word))
    return out


def chunks(rows: Sequence[Pair]) -> Iterator[tuple[bool, list[Pair]]]:
    """Rows in runs: (folded?, rows). Near a change nothing is folded."""
    near = [False] * len(rows)
    for n, pair in enumerate(rows):
        if not pair.equal:
            for m in range(max(0, n - CONTEXT), min(len(rows), n + CONTEXT + 1)):
                near[m] = True
    start = 0
    runs: list[tuple[bool, list[Pair]]] = []
    for n in range(1, len(rows) + 1):
        if n == len(rows) or near[n] != near[start]:
            run = list(rows[start:n])
            hidden = not near[start] and len(run) >= LEAST_FOLD
            if runs and not runs[-1][0] and not hidden:
                runs[-1][1].extend(run)
            else:
                runs.append((hidden, run))
            start = n
    yield from runs


_DEL = Html(f'<del style="text-decoration:underline;background:{TINTS["removed-word"]}">')
_INS = Html(f'<ins style="text-decoration:underline;background:{TINTS["added-word"]}">')
_CELL = "text-align:left;vertical-align:top;padding:0;border:none;white-space:normal"


@dataclass(frozen=True)
class _Side:
    pieces: list[list[Piece]]
    lines: list[str]


def diff_table(diff: SourceDiff) -> Html:
    """The table alone, without a title."""
    by = min(indent_of(diff.before), indent_of(diff.after))
    texts = outdent(diff.before, by), outdent(diff.after, by)
    old, new = (_Side(highlight(text), lines_of(text)) for text in texts)
    width = len(str(diff.line + max(len(old.lines), len(new.lines))))
    rows = []
    for hidden, run in chunks(pairs(old.lines, new.lines)):
        if hidden:
            rows.append(_hidden(run, old, diff.line, width))
        else:
            left = [_line(pair, old, new, diff.line, width, True) for pair in run]
            right = [_line(pair, old, new, diff.line, width, False) for pair in run]
            rows.append(tag("tr", many(*_cells(left), *_cells(right)), "background:transparent"))
    caption = f"{place(diff.path, diff.line)}: lines with - are gone, lines with + are new"
    heads = many(
        *(
            tag("th", name, _CELL + ";font-weight:bold;padding:2px 0", scope="colgroup", colspan="2")
            for name in ("before", "after")
        )
    )
    title = tag("caption", soft(caption), "text-align:left;caption-side:top;padding:2px 0")
    number = f"width:{0.65 * (width + 3):.1f}em"
    cols = f'<colgroup><col style="{number}"><col></colgroup>' * 2
    style = "border-collapse:collapse;table-layout:fixed;width:100%;min-width:640px;border:none;margin:2px 0"
    body = many(title, Html(cols), tag("thead", tag("tr", heads)), tag("tbody", many(*rows)))
    return tag("div", tag("table", body, style), "overflow-x:auto")


def _cells(lines: list[tuple[Html, Html]]) -> tuple[Html, Html]:
    gutter = tag("pre", many(*(g for g, _ in lines)), CODE + ";opacity:0.8", class_="fk-numbers")
    inner = tag("div", many(*(body for _, body in lines)), "display:inline-block;min-width:100%")
    body = tag("div", tag("pre", inner, CODE), "overflow-x:auto")
    return tag("td", gutter, _CELL), tag("td", body, _CELL + ";padding-right:8px")


def _line(pair: Pair, old: _Side, new: _Side, first: int, width: int, left: bool) -> tuple[Html, Html]:
    """Gutter and body of one side of one row."""
    index, side = (pair.before, old) if left else (pair.after, new)
    if index is None:
        return row(" "), row(" ", "quiet")
    number = f"{first + index:>{width}}"
    if pair.equal:
        return row(f"  {number}"), row(line_html(side.pieces[index]))
    marks: Marks = ()
    if pair.before is not None and pair.after is not None:
        marks = word_marks(old.lines[pair.before], new.lines[pair.after])[0 if left else 1]
    tint = "removed" if left else "added"
    body = line_html(side.pieces[index], marks, _DEL if left else _INS)
    return row(f"{'-' if left else '+'} {number}", tint), row(body, tint)


def _hidden(run: list[Pair], old: _Side, first: int, width: int) -> Html:
    numbers = [pair.before for pair in run if pair.before is not None]
    lines = [many(row(f"  {first + n:>{width}}  ")[:-1], row(line_html(old.pieces[n]))) for n in numbers]
    body = tag("div", tag("pre", many(*map(Html, lines)), CODE), "overflow-x:auto")
    title = soft(f"{len(run)} unchanged lines, {first + numbers[0]} to {first + numbers[-1]}")
    return tag("tr", tag("td", fold(title, body), _CELL, colspan="4"), "background:transparent")


def changes(diff: SourceDiff) -> tuple[int, int]:
    """How many lines are gone and how many are new."""
    rows = [p for p in pairs(lines_of(diff.before), lines_of(diff.after)) if not p.equal]
    return sum(p.before is not None for p in rows), sum(p.after is not None for p in rows)


@as_text.register
def _(diff: SourceDiff) -> str:
    return str(diff) or f"{diff.title}: nothing changes"


@as_html.register
def _(diff: SourceDiff) -> Html:
    gone, new = changes(diff)
    if not gone and not new:
        said: object = "nothing changes"
    else:
        said = f"{count(gone, 'line')} gone (-), {count(new, 'line')} new (+)"
    return many(line(tag("b", diff.title), "  ", soft(said)), diff_table(diff))
