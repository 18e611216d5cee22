"""The gated product of an MLP: act(gate) * up."""

from collections.abc import Callable

from torch import Tensor

from fusekit.kernels.activations import named_activation


def act_and_mul(gate: Tensor, up: Tensor, act: str | Callable[[Tensor], Tensor] = "silu") -> Tensor:
    """act(gate) * up.

    `gate` and `up` have one shape [..., d]: two tensors, or two slices of one packed tensor, whose
    rows are then not contiguous. Other shapes broadcast, as in the product itself. The result has the
    dtype that torch's promotion gives. Neither argument is written (unless a callable `act` does so).

    `act` is a name of Transformers' ACT2CLS, equal bit for bit to the module of that name, or a
    callable, which is called: a module keeps its parameters, hooks and subclass.

    Raises `ValueError` for an unknown name, for a name whose activation carries
    parameters (prelu, xielu: pass the module), and for an act that is neither.
    Source: Shazeer, GLU Variants Improve Transformer, 2020 (arXiv:2002.05202).
    """
    if isinstance(act, str):
        return named_activation(act)(gate) * up
    if not callable(act):
        raise ValueError(f"act_and_mul: act is {act!r}; it must be the name of an activation or a callable")
    return act(gate) * up
