"""Root-mean-square norm with a gate before it or behind it, every place of rounding said by an argument."""

import dataclasses
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from fusekit.kernels.activations import ACTIVATIONS
from fusekit.kernels.norm_form import (
    ComputeDtype,
    Inverse,
    Normalized,
    NormForm,
    Output,
    Scaled,
    WeightDtype,
    norm_forms,
)
from fusekit.kernels.rms_norm import check_tensors, compute_dtype_of, normalise

GateDtype = Literal["float32"] | None
Gated = Literal["compute", "input"]
Rounded = Literal["input"] | None

VALID: dict[str, tuple[str | None, ...]] = {
    "gate_dtype": ("float32", None),
    "activated": (None, "input"),
    "gated": ("compute", "input"),
    "normed": (None, "input"),
}


@dataclass(frozen=True)
class GatedNormForm:
    """Keyword arguments of `gated_rms_norm` but `act` and `group_size`; see there for their meaning.

    Raises `ValueError` for a value that `gated_rms_norm` would refuse.
    """

    gate_first: bool = False
    gate_dtype: GateDtype = "float32"
    activated: Rounded = None
    gated: Gated = "compute"
    normed: Rounded = None
    norm: NormForm = field(default_factory=NormForm)

    def __post_init__(self) -> None:
        for name, valid in VALID.items():
            if getattr(self, name) not in valid:
                choices = ", ".join(_literal(choice) for choice in valid)
                raise ValueError(
                    f"gated_rms_norm: {name} is {getattr(self, name)!r}; it must be one of {choices}"
                )

    def keywords(self) -> dict[str, bool | float | str | None]:
        """The arguments that are not `gated_rms_norm`'s defaults, in the order of its signature."""
        own = {one.name: getattr(self, one.name) for one in dataclasses.fields(self)}
        fields = {one.name: one.default for one in dataclasses.fields(self)}
        found = {name: value for name, value in own.items() if name != "norm" and value != fields[name]}
        return {**found, **self.norm.keywords()}

    def source(self) -> str:
        """`keywords()` as Python source, "" for the default; needs no name in scope."""
        return ", ".join(f"{name}={_literal(value)}" for name, value in self.keywords().items())


def gated_norm_forms(
    *, gate_first: bool, weight: bool = True, inverse: Inverse | None = None
) -> Iterator[GatedNormForm]:
    """Every form worth trying on a gated norm, fewest departures from the default first."""
    gates = itertools.product(
        ("float32", None), (None, "input"), ("compute", "input") if gate_first else ("compute",)
    )
    forms = [
        GatedNormForm(gate_first, gate_dtype, activated, gated, normed, norm)  # type: ignore[arg-type]
        for gate_dtype, activated, gated in gates
        for normed in ((None,) if gate_first else (None, "input"))
        for norm in norm_forms(weight=weight, inverse=inverse)
    ]
    if not weight and not gate_first:  # without a weight nothing but the gate could ask for a last cast
        forms += [
            dataclasses.replace(form, norm=dataclasses.replace(form.norm, output="input")) for form in forms
        ]
    yield from sorted(forms, key=lambda form: len(form.keywords()))  # stable: else as listed


def gated_rms_norm(
    x: Tensor,
    gate: Tensor,
    weight: Tensor | None = None,
    eps: float = 1e-6,
    *,
    act: str | Callable[[Tensor], Tensor] = "silu",
    group_size: int | None = None,
    gate_first: bool = False,
    gate_dtype: GateDtype = "float32",
    activated: Rounded = None,
    gated: Gated = "compute",
    normed: Rounded = None,
    offset: float = 0.0,
    compute_dtype: ComputeDtype = "float32",
    normalized: Normalized = "input",
    weight_dtype: WeightDtype = None,
    output: Output = None,
    inverse: Inverse = "rsqrt",
    scaled: Scaled = "compute",
) -> Tensor:
    """rms_norm(x) * act(gate), or rms_norm(x * act(gate)) with `gate_first`.

    `x` is floating point of shape [..., d], `gate` of that shape or one that broadcasts to it,
    `weight` of shape [d], [1] or None; the result has the shape of `x`. Neither is written. `act` is a
    name in `ACTIVATIONS` or a callable, which is called. With `group_size`, which divides d, the mean is
    taken over each so many features by themselves (Mamba2 split over several ranks).

    The gate is a = act(gate): `gate_dtype` is the dtype that act computes in, "float32" or the gate's own
    for None; a is rounded to x's dtype where `activated` is "input". Then, as `gate_first` says,

    - True (Mamba2, Zamba2, Bamba): x times a is normed by `rms_norm` with the arguments that both
      share. For `gated="compute"` x is cast to `compute_dtype` before the product, for "input" the
      product is taken as it is. "input" of any other argument means the dtype of x itself.
    - False (Qwen3-Next, KimiLinear): `rms_norm` of x with the arguments that both share, `output`
      aside, rounded to x's dtype where `normed` is "input", times a, and then the cast of `output`.

    With no keyword but `output="input"` the result equals `Qwen3NextRMSNormGated` bit for bit.

    Raises `ValueError` where `rms_norm` would, for a gate that is no tensor, an unknown `act`, and a
    `group_size` that does not divide d. Source: Dao and Gu, Transformers are SSMs, 2024
    (arXiv:2405.21060), section 8; the forms are those of the gated norms in Transformers 5.24.
    """
    if not isinstance(gate, Tensor):
        raise ValueError(f"gated_rms_norm: gate is a {type(gate).__name__}; it must be a tensor like x")
    if (isinstance(act, str) and act not in ACTIVATIONS) or not (isinstance(act, str) or callable(act)):
        raise ValueError(
            f"gated_rms_norm: act is {act!r}; it must be a callable or one of {', '.join(ACTIVATIONS)}"
        )
    norm = NormForm(offset, compute_dtype, normalized, weight_dtype, output, inverse, scaled)
    form = GatedNormForm(gate_first, gate_dtype, activated, gated, normed, norm)
    check_tensors(x, weight, eps, norm, gated=True)
    if group_size is not None and (group_size < 1 or x.shape[-1] % group_size):
        raise ValueError(
            f"gated_rms_norm: group_size is {group_size} and x has shape {list(x.shape)}; "
            "the last dimension must be a multiple of it"
        )

    function = ACTIVATIONS[act] if isinstance(act, str) else act
    a = function(gate if form.gate_dtype is None else gate.to(torch.float32))
    if form.activated == "input":
        a = a.to(x.dtype)
    if gate_first:
        base = x if gated == "input" or compute_dtype is None else x.to(compute_dtype_of(norm, x.dtype))
        return normalise(base * a, weight, eps, norm, x.dtype, group_size or 0)
    inner = dataclasses.replace(norm, output=None)
    y = normalise(x, weight, eps, inner, x.dtype, group_size or 0)
    y = (y.to(x.dtype) if form.normed == "input" else y) * a
    if output == "weight" and weight is not None:
        y = y.to(weight.dtype)
    return y.to(x.dtype) if output == "input" else y


def _literal(value: bool | float | str | None) -> str:
    return f'"{value}"' if isinstance(value, str) else repr(value)
