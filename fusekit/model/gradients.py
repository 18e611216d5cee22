"""What autograd sees of merged linears: parameters that are rows, outputs that are slices."""

from collections.abc import Callable
from typing import Any

import torch


class Rows(torch.autograd.Function):
    """The merged tensor as a function of the parameters whose rows it holds.

    `used` are the numbers of the parts whose outputs reached what backward started from, filled in by
    `Slices` on the way back; the others get no gradient, not one of zeros. None: all of them.
    """

    @staticmethod
    def forward(
        ctx: Any,
        whole: torch.Tensor,
        sizes: tuple[int, ...],
        used: set[int] | None,
        *parts: torch.Tensor | None,
    ) -> torch.Tensor:
        ctx.sizes, ctx.used = sizes, used
        return whole.view_as(whole)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        rows = grad.split(ctx.sizes)
        wanted = ctx.needs_input_grad[3:]
        used = range(len(rows)) if ctx.used is None else ctx.used
        found = [
            row if want and i in used else None
            for i, (row, want) in enumerate(zip(rows, wanted, strict=True))
        ]
        return None, None, None, *found


class Slices(torch.autograd.Function):
    """The outputs of the parts out of their common product, each with a version counter of its own.

    So writing into one in place neither is forbidden, as it is for what `split` gives, nor spoils
    what autograd saved of another. `checked` are weights whose rows backward reads: written since,
    they raise, as they would for the linear that they belong to. `frozen` are the numbers of the
    parts that nothing asks a gradient of: their outputs ask for none. `used` tells `Rows` whose outputs
    were used.
    """

    @staticmethod
    def forward(
        ctx: Any,
        out: torch.Tensor,
        slices: Callable[[torch.Tensor], list[torch.Tensor]],
        sizes: tuple[int, ...],
        checked: list[torch.Tensor],
        frozen: list[int],
        used: set[int],
    ) -> tuple[torch.Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.sizes, ctx.used = sizes, used
        ctx.checked = [(weight, weight._version) for weight in checked]
        pieces = tuple(piece.data for piece in slices(out))
        ctx.mark_non_differentiable(*(pieces[number] for number in frozen))
        return pieces

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:
        for (weight, version), grad in zip(ctx.checked, grads, strict=bool(ctx.checked)):
            if grad is not None and weight._version != version:
                raise RuntimeError(
                    "one of the variables needed for gradient computation has been modified by an inplace "
                    f"operation: a weight {list(weight.shape)} is at version {weight._version}; "
                    f"expected version {version} instead"
                )
        ctx.used.clear()
        ctx.used.update(number for number, grad in enumerate(grads) if grad is not None)
        given = next((grad for grad in grads if grad is not None), None)
        if given is None:
            return None, None, None, None, None, None
        pieces = [
            given.new_zeros(*given.shape[:-1], size) if grad is None else grad
            for grad, size in zip(grads, ctx.sizes, strict=True)
        ]
        return torch.cat(pieces, -1), None, None, None, None, None
