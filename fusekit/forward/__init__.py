"""The forward that really runs: its source, what it reads, and edits of its text."""

from fusekit.forward.compile import compile_edited, edited_text
from fusekit.forward.edits import Edit, SourceDiff, apply_edits, text_at
from fusekit.forward.source import ForwardSource, NoSource, forward_chain, original_class, source, source_of
from fusekit.forward.span import Span

__all__ = [
    "Edit",
    "ForwardSource",
    "NoSource",
    "SourceDiff",
    "Span",
    "apply_edits",
    "compile_edited",
    "edited_text",
    "forward_chain",
    "original_class",
    "source",
    "source_of",
    "text_at",
]
