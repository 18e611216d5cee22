"""A place in a source file."""

import ast
from dataclasses import dataclass


@dataclass(frozen=True, order=True)
class Span:
    """From (line, column) up to (end_line, end_column) of a file.

    Lines count from 1; columns are offsets in utf-8 bytes from 0, as in `ast` and in
    `code.co_positions()`, so that an expression and the code compiled from it have equal spans.
    """

    line: int
    column: int
    end_line: int
    end_column: int

    @property
    def start(self) -> tuple[int, int]:
        return self.line, self.column

    @property
    def end(self) -> tuple[int, int]:
        return self.end_line, self.end_column

    @classmethod
    def of(cls, node: ast.expr | ast.stmt | ast.arg) -> "Span":
        """The span of an AST node that came from a parse."""
        assert node.end_lineno is not None and node.end_col_offset is not None
        return cls(node.lineno, node.col_offset, node.end_lineno, node.end_col_offset)


def lines_of(text: str) -> list[str]:
    """The lines of a source text as Python counts them, ends kept.

    `str.splitlines` would also split at form feeds and other separators that are no line ends.
    """
    lines = [line + "\n" for line in text.split("\n")]
    lines[-1] = lines[-1][:-1]
    return lines if lines[-1] else lines[:-1]
