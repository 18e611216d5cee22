"""The forward that really runs: its source, what it reads, edits of its text, and its tree rewritten."""

from fusekit.forward.compile import compile_edited, edited_text
from fusekit.forward.edits import Edit, SourceDiff, apply_edits, text_at
from fusekit.forward.flow import aliasing_names
from fusekit.forward.fresh import returns_fresh
from fusekit.forward.names import DTYPE_CASTS, METADATA_ATTRS, arg_names, base_name, call_name, rebound_names
from fusekit.forward.rewriting import (
    block_chain,
    bypass_existence_guard,
    compile_forward,
    in_boolean_context,
    recover_forward,
    replace_expr,
    self_call_and_refs,
    single_self_call,
)
from fusekit.forward.sharing import aliasing_reads
from fusekit.forward.source import ForwardSource, NoSource, forward_chain, original_class, source, source_of
from fusekit.forward.span import Span
from fusekit.forward.writes import inplace_target, mutated_names, writes_through_args, written_names

__all__ = [
    "DTYPE_CASTS",
    "METADATA_ATTRS",
    "Edit",
    "ForwardSource",
    "NoSource",
    "SourceDiff",
    "Span",
    "aliasing_names",
    "aliasing_reads",
    "apply_edits",
    "arg_names",
    "base_name",
    "block_chain",
    "bypass_existence_guard",
    "call_name",
    "compile_edited",
    "compile_forward",
    "edited_text",
    "forward_chain",
    "in_boolean_context",
    "inplace_target",
    "mutated_names",
    "original_class",
    "rebound_names",
    "recover_forward",
    "replace_expr",
    "returns_fresh",
    "self_call_and_refs",
    "single_self_call",
    "source",
    "source_of",
    "text_at",
    "writes_through_args",
    "written_names",
]
