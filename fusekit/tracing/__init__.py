"""From a module to a trace: the dataflow of its forward, on meta tensors, nothing patched."""

from fusekit.tracing.aliasing import AliasReport, AliasSet, Evidence, Write, aliasing
from fusekit.tracing.leaf import LeafCall, is_leaf_call
from fusekit.tracing.result import Assumption, Binding, Stopped, Trace
from fusekit.tracing.trace import trace

__all__ = [
    "AliasReport",
    "AliasSet",
    "Assumption",
    "Binding",
    "Evidence",
    "LeafCall",
    "Stopped",
    "Trace",
    "Write",
    "aliasing",
    "is_leaf_call",
    "trace",
]
