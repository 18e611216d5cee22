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
        return func(*(_lift(value) for value in args), **lifted)


def _lift(value: Any) -> Any:
    return torch.float64 if isinstance(value, torch.dtype) and value in NARROW else value
