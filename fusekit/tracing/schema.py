"""What an operator writes and whether its result shares storage, from PyTorch's own schemas."""

import functools
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import fx

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
        "__and__",
        "__or__",
        "__xor__",
    }
)

# Names under which `torch` and `Tensor` offer an operator whose schema has another one.
# Operators that only change the dtype of a tensor, by `operator_name`.
CASTS = frozenset({"to", "type_as"})
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

Returns = Literal["fresh", "view", "may be a view"]


@dataclass(frozen=True)
class Effect:
    """Of one operator: does it write an argument, and does its result share storage with one?"""

    writes: bool
    returns: Returns


@functools.cache
def operator_effect(name: str, out: bool = False) -> Effect | None:
    """The effect of `aten::name`, taken over every overload that could be meant; None if there is none.

    An overload with `out=` counts only when `out` says that the call gave one. An operator that
    is composed of others (CompositeImplicitAutograd) and says nothing about its result may
    return a view of an argument, unless it stands in `FRESH`.
    """
    schemas = torch._C._jit_get_schemas_for_operator(f"aten::{name}")
    if not schemas:
        return None
    writes, view, maybe = False, False, False
    for schema in schemas:
        alias = [argument.alias_info for argument in schema.arguments if argument.alias_info is not None]
        is_out = any(argument.is_out for argument in schema.arguments)
        if is_out and not out:
            continue
        writes |= any(info.is_write for info in alias)
        view |= any(item.alias_info is not None for item in schema.returns) and not is_out
        full = f"{schema.name}.{schema.overload_name}" if schema.overload_name else schema.name
        try:
            composite = torch._C._dispatch_has_kernel_for_dispatch_key(full, "CompositeImplicitAutograd")
        except RuntimeError:  # an operator of TorchScript alone
            continue
        maybe |= composite and name not in FRESH
    return Effect(writes, "view" if view else "may be a view" if maybe else "fresh")


def node_effect(node: fx.Node) -> Effect | None:
    """The effect of a node that calls a torch operator, None for what has no schema.

    Flags that make a call write its argument (`inplace=True`, `out=`) count.
    """
    name = operator_name(node)
    if name is None:
        return None
    out = "out" in node.kwargs
    effect = operator_effect(name, out)
    if effect is None:
        # No schema to ask: a method that is named like one that writes does (`map_`, `apply_`).
        by_name = node.op == "call_method" and name.endswith("_") and not name.endswith("__")
        return Effect(True, "may be a view") if by_name else None
    if node.meta.get("written") or _asks_for_inplace(node):
        return Effect(True, effect.returns)
    return effect


def operator_name(node: fx.Node) -> str | None:
    """The name in the `aten` namespace of what a node calls, None for leaves and foreign functions."""
    if node.op == "call_method":
        name = str(node.target)
    elif node.op == "call_function":
        target: Any = node.target
        if target is getattr:
            name = str(node.args[1])
        elif target is setattr:
            name = f"set_{node.args[1]}"
        elif getattr(target, "__module__", None) in TORCH_MODULES:
            name = target.__name__
        else:
            return None
    else:
        return None
    if name in ("getitem", "setitem"):
        return {"getitem": "slice", "setitem": "copy_"}[name]
    return SPELLINGS.get(name, name)


TORCH_MODULES = {
    "_operator",
    "torch",
    "torch.nn.functional",
    "torch._C._nn",
    "torch._tensor",
    "torch.functional",
    None,
}


def _asks_for_inplace(node: fx.Node) -> bool:
    if node.kwargs.get("inplace") not in (None, False):
        return True
    # Functions of torch.nn.functional take the flag by position too.
    return getattr(node.target, "__module__", None) == "torch.nn.functional" and any(
        argument is True for argument in node.args[1:]
    )
