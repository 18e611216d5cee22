"""From a module to a trace: the dataflow of its forward, on meta tensors, nothing patched."""

from fusekit.tracing.aliasing import AliasReport, AliasSet, Evidence, Write, aliasing
from fusekit.tracing.inputs import reference_weight
from fusekit.tracing.leaf import LeafCall, as_leaf_call, is_leaf_call, leaf_attention_interfaces
from fusekit.tracing.questions import (
    downstream_linear,
    find_node,
    is_fn,
    is_linear,
    is_method,
    is_op,
    output_value,
    peel,
    returned_linear,
    upstream_linear,
)
from fusekit.tracing.result import Assumption, Binding, Stopped, Trace
from fusekit.tracing.signature import forward_input_count, forward_parameters
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
    "as_leaf_call",
    "downstream_linear",
    "find_node",
    "forward_input_count",
    "forward_parameters",
    "is_fn",
    "is_leaf_call",
    "is_linear",
    "is_method",
    "is_op",
    "leaf_attention_interfaces",
    "output_value",
    "peel",
    "reference_weight",
    "returned_linear",
    "trace",
    "upstream_linear",
]
