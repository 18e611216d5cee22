"""What PyTorch's operators write and what their results share storage with, from their schemas."""

import functools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

import torch

# Composite operators carry no alias annotation when they *may* return a view of their input.
# These never do, for any input: each allocates what it returns. (tests/tracing/test_schema.py
# runs every one of them over degenerate inputs.)
FRESH = frozenset(
    {
        "cosine_similarity",
        "cross_entropy_loss",
        "layer_norm",
        "linear",
        "log_softmax",
        "matmul",
        "one_hot",
        "rms_norm",
        "rsub",
        "scaled_dot_product_attention",
        "softmax",
        "stack",
        "where",
        "__and__",
        "__or__",
        "__xor__",
    }
)

# Names under which `torch` and `Tensor` offer an operator whose schema has another one.
SPELLINGS = {
    "truediv": "div",
    "floordiv": "floor_divide",
    "mod": "remainder",
    "invert": "bitwise_not",
    "and_": "bitwise_and",
    "or_": "bitwise_or",
    "xor": "bitwise_xor",
    "iadd": "add_",
    "isub": "sub_",
    "imul": "mul_",
    "itruediv": "div_",
    "ifloordiv": "floor_divide_",
    "imod": "remainder_",
    "ipow": "pow_",
    "iand": "__iand__",
    "ior": "__ior__",
    "ixor": "__ixor__",
    "ilshift": "__ilshift__",
    "irshift": "__irshift__",
    "__iadd__": "add_",
    "__isub__": "sub_",
    "__imul__": "mul_",
    "__idiv__": "div_",
    "__itruediv__": "div_",
    "__ifloordiv__": "floor_divide_",
    "__imod__": "remainder_",
    "__ipow__": "pow_",
    "__pow__": "pow",
    "__rpow__": "pow",
    "__rdiv__": "div",
    "float": "to",
    "half": "to",
    "double": "to",
    "bfloat16": "to",
    "int": "to",
    "long": "to",
    "bool": "to",
    "type": "to",
    "cpu": "to",
    "cuda": "to",
    "T": "numpy_T",
    "H": "matrix_H",
    "__rsub__": "rsub",
}

# These return views, or may, and their schemas do not say so.
LIARS = frozenset(
    {
        "unsafe_split",
        "unsafe_split_with_sizes",
        "unsafe_chunk",
        "_unsafe_view",
        "dequantize",
        "_reshape_alias",
    }
)

# Arguments that these write though their schemas do not say so: running statistics.
UNSAID = {
    "batch_norm": frozenset({"running_mean", "running_var"}),
    "instance_norm": frozenset({"running_mean", "running_var"}),
    "native_batch_norm": frozenset({"running_mean", "running_var"}),
    "cudnn_batch_norm": frozenset({"running_mean", "running_var"}),
    "miopen_batch_norm": frozenset({"running_mean", "running_var"}),
}

Returns = Literal["fresh", "view", "may be a view"]


@dataclass(frozen=True)
class Effect:
    """Of one operator: does it write an argument, and does its result share storage with one?"""

    writes: bool
    returns: Returns


@dataclass(frozen=True)
class Signature:
    """Which arguments an operator writes and which its result may be a view of, over all overloads.

    Arguments are (position, name) pairs; `views` is None where any argument may be meant.
    """

    writes: frozenset[tuple[int, str]]
    views: frozenset[tuple[int, str]] | None
    returns: Returns


@functools.cache
def operator_signature(name: str) -> Signature | None:
    """What `aten::name` does to its arguments, taken over every overload that could be meant.

    An overload with `out=` does not count: that argument is written, and is the result. An operator
    that is composed of others (CompositeImplicitAutograd) and says nothing about its result may return a
    view of any argument, unless it stands in `FRESH`. None where there is no operator of that name.
    """
    schemas = torch._C._jit_get_schemas_for_operator(f"aten::{name}")
    return _signature(name, schemas) if schemas else None


def signature_of(operator: Any) -> Signature | None:
    """`operator_signature` of a `torch.ops` operator or one overload of it, None for anything else."""
    if isinstance(operator, torch._ops.OpOverload):
        return _signature(operator._schema.name.partition("::")[2], [operator._schema])
    if isinstance(operator, torch._ops.OpOverloadPacket):
        schemas = [getattr(operator, overload)._schema for overload in operator.overloads()]
        return _signature(str(operator.__name__), schemas)
    return None


def _signature(name: str, schemas: Iterable[Any]) -> Signature:
    writes: set[tuple[int, str]] = set()
    views: set[tuple[int, str]] = set()
    says_view, may_view = False, False
    for schema in schemas:
        if any(argument.is_out for argument in schema.arguments):
            continue
        aliases = [one.alias_info for one in schema.returns if one.alias_info is not None]
        returned = {item for info in aliases for item in info.before_set}
        lists = len(returned) < len(aliases)  # of a list of views the set is not given
        for index, argument in enumerate(schema.arguments):
            info = argument.alias_info
            if argument.name in UNSAID.get(name, ()):
                writes.add((index, argument.name))
            if info is None:
                continue
            if info.is_write:
                writes.add((index, argument.name))
            if returned & info.before_set or (lists and not info.is_write):
                views.add((index, argument.name))
        says_view |= bool(aliases)
        may_view |= name in LIARS or (not aliases and name not in FRESH and _is_composite(schema))
    returns: Returns = "view" if says_view else "may be a view" if may_view else "fresh"
    return Signature(frozenset(writes), None if may_view else frozenset(views), returns)


def _is_composite(schema: Any) -> bool:
    full = f"{schema.name}.{schema.overload_name}" if schema.overload_name else schema.name
    if not schema.name.startswith("aten::"):
        return True  # whoever wrote the operator may have forgotten to say it
    try:
        return torch._C._dispatch_has_kernel_for_dispatch_key(full, "CompositeImplicitAutograd")
    except RuntimeError:  # an operator of TorchScript alone
        return False


@functools.cache
def operator_effect(name: str, out: bool = False) -> Effect | None:
    """The effect of `aten::name`, taken over every overload that could be meant; None if there is none.

    An overload with `out=` counts only when `out` says that the call gave one.
    """
    found = operator_signature(name)
    return Effect(bool(found.writes) or out, found.returns) if found else None
