"""What autograd sees of merged linears: parameters that are rows, outputs that are slices."""

from collections.abc import Callable
from typing import Any

import torch


class Rows(torch.autograd.Function):
    """The merged tensor as a function of the parameters whose rows it holds."""

    @staticmethod
    def forward(
        ctx: Any, whole: torch.Tensor, sizes: tuple[int, ...], *parts: torch.Tensor | None
    ) -> torch.Tensor:
        ctx.sizes = sizes
        return whole.view_as(whole)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        rows = grad.split(ctx.sizes)
        wanted = ctx.needs_input_grad[2:]
        return None, None, *(row if want else None for row, want in zip(rows, wanted, strict=True))


class Slices(torch.autograd.Function):
    """The outputs of the parts out of their common product, each with a version counter of its own.

    So writing into one in place neither is forbidden, as it is for what `split` gives, nor spoils
    what autograd saved of another. `checked` are weights whose rows backward reads: written since,
    they raise, as they would for the linear that they belong to. `frozen` are the numbers of the
    parts that nothing asks a gradient of: their outputs ask for none.
    """

    @staticmethod
    def forward(
        ctx: Any,
        out: torch.Tensor,
        slices: Callable[[torch.Tensor], list[torch.Tensor]],
        sizes: tuple[int, ...],
        checked: list[torch.Tensor],
        frozen: list[int],
    ) -> tuple[torch.Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.sizes = sizes
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
        given = next((grad for grad in grads if grad is not None), None)
        if given is None:
            return None, None, None, None, None
        pieces = [
            given.new_zeros(*given.shape[:-1], size) if grad is None else grad
            for grad, size in zip(grads, ctx.sizes, strict=True)
        ]
        return torch.cat(pieces, -1), None, None, None, None
