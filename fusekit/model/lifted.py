"""A float64 run that stays float64: casts to a narrower type are lifted."""

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

NARROW = frozenset({torch.float32, torch.float16, torch.bfloat16})


class Lifted(TorchDispatchMode):
    """While active, whatever asks for float32, float16 or bfloat16 gets float64.

    A model in float64 alone is no float64 reference: an RMSNorm that computes in float32 still
    rounds there, and so do rotary tables and softmaxes. Casts, results asked for in a dtype and
    new tensors are lifted alike.
    """

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        lifted = {name: _lift(value) for name, value in (kwargs or {}).items()}
        if func is torch.ops.aten._grouped_mm.default and args[0].dtype is torch.float64:
            return _grouped_mm(*args, **lifted)
        return func(*(_lift(value) for value in args), **lifted)


def _lift(value: Any) -> Any:
    return torch.float64 if isinstance(value, torch.dtype) and value in NARROW else value


def _grouped_mm(
    left: torch.Tensor,
    right: torch.Tensor,
    offs: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """What `torch.nn.functional.grouped_mm` documents; `offs` are the ends of the groups.

    A matrix on the left is cut into groups of rows, one on the right into groups of columns, and
    two matrices along what they are multiplied over.
    """
    if offs is None:
        out = left @ right
    else:
        ends = offs.tolist()
        groups = [slice(start, end) for start, end in zip([0, *ends], ends, strict=False)]
        if left.dim() == right.dim() == 2:
            out = torch.stack([left[:, group] @ right[group] for group in groups])
        elif left.dim() == 2:
            out = left.new_zeros(left.shape[0], right.shape[-1])
            for group, matrix in zip(groups, right, strict=True):
                out[group] = left[group] @ matrix
        else:
            out = left.new_zeros(left.shape[1], right.shape[-1])
            for group, matrix in zip(groups, left, strict=True):
                out[:, group] = matrix @ right[:, group]
    return out if bias is None else out + bias
