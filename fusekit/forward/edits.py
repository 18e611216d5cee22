"""Rewrites as edits of the text: a short list of (span, new text) over the original file."""

import difflib
from collections.abc import Iterable
from dataclasses import dataclass

from fusekit.errors import FusekitError
from fusekit.forward.span import Span, lines_of
from fusekit.shown import Shown


@dataclass(frozen=True, order=True)
class Edit:
    """Put `text` in the place of `span`; a span of no length is an insertion."""

    span: Span
    text: str

    def overlaps(self, other: "Edit") -> bool:
        """Whether only one of both can be made: `apply_edits` takes insertions next to a span, not in it."""
        mine, theirs = self.span, other.span
        return mine.start < theirs.end and theirs.start < mine.end


def apply_edits(text: str, edits: Iterable[Edit]) -> str:
    """`text` with every edit made; raises `FusekitError` when two of them overlap or one is no place in it.

    Insertions at one place come in the order given by their texts, so the result is a function
    of the set of edits.
    """
    lines = [line.encode() for line in lines_of(text)]
    starts = [0]
    for line in lines:
        starts.append(starts[-1] + len(line))
    data = b"".join(lines)
    pieces: list[bytes] = []
    done = 0
    for edit in sorted(edits):
        start = _offset(lines, starts, edit.span.line, edit.span.column)
        end = _offset(lines, starts, edit.span.end_line, edit.span.end_column)
        if end < start:
            raise FusekitError(f"an edit ends before it starts, at line {edit.span.line}: {edit.text!r}")
        if start < done:
            raise FusekitError(f"two edits overlap at line {edit.span.line}: {edit.text!r}")
        pieces += [data[done:start], edit.text.encode()]
        done = end
    return b"".join([*pieces, data[done:]]).decode()


def _offset(lines: list[bytes], starts: list[int], line: int, column: int) -> int:
    """Where (line, column) is in the joined `lines`."""
    if (line, column) == (len(lines) + 1, 0):
        return starts[-1]
    # A column past its line's end would be a place in another line.
    if not 1 <= line <= len(lines) or not 0 <= column <= len(lines[line - 1]):
        raise FusekitError(f"there is no line {line}, column {column} in the text to edit")
    if lines[line - 1][column : column + 1] and 0x80 <= lines[line - 1][column] < 0xC0:
        raise FusekitError(
            f"column {column} of line {line} lies inside a character: columns count utf-8 bytes"
        )
    return starts[line - 1] + column


def text_at(text: str, span: Span) -> str:
    """The text of `span` in a file."""
    lines = [line.encode() for line in lines_of(text)][span.line - 1 : span.end_line]
    lines[-1] = lines[-1][: span.end_column]
    lines[0] = lines[0][span.column :]
    return b"".join(lines).decode()


@dataclass(frozen=True, repr=False)
class SourceDiff(Shown):
    """A forward before and after a rewrite; `str()` is a unified diff.

    `before` and `after` are the lines of the `def`, indented as in the file at `path`, where
    both start at `line`.
    """

    before: str
    after: str
    path: str
    line: int
    title: str

    def __str__(self) -> str:
        lines = difflib.unified_diff(
            self.before.splitlines(),
            self.after.splitlines(),
            self.title,
            f"{self.title} (fused)",
            lineterm="",
        )
        return "\n".join(lines)
