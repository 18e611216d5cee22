"""The forms of `rms_norm`: which keyword arguments make it equal to a given norm, as plain data."""

import dataclasses
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch

ComputeDtype = Literal["float32", "float64", "opmath"] | None
Normalized = Literal["input", "weight"] | None
WeightDtype = Literal["compute", "sum"] | None
Output = Literal["input", "weight"] | None
Inverse = Literal["rsqrt", "sqrt", "reciprocal", "pow"]
Scaled = Literal["compute", "input", "rounded", "weighted"]

VALID: dict[str, tuple[str | None, ...]] = {
    "compute_dtype": ("float32", "float64", "opmath", None),
    "normalized": ("input", "weight", None),
    "weight_dtype": (None, "compute", "sum"),
    "output": (None, "input", "weight"),
    "inverse": ("rsqrt", "sqrt", "reciprocal", "pow"),
    "scaled": ("compute", "input", "rounded", "weighted"),
}

NORM_PROBES = (
    (torch.bfloat16, torch.bfloat16),
    (torch.bfloat16, torch.float32),
    (torch.bfloat16, torch.float16),
    (torch.float32, torch.float64),
    (torch.float64, torch.float64),
)
"""(dtype of x, dtype of weight): no two forms of one inverse agree in every bit over all these pairs.

On the first alone many do: T5 scales x itself and not its float32 copy, which a float64 x shows.
Take a random weight and some dozens of rows; ones and zeros hide what is asked.
"""


@dataclass(frozen=True)
class NormForm:
    """Keyword arguments of `rms_norm`, in the order of its signature; see there for their meaning.

    Raises `ValueError` for a value that `rms_norm` would refuse.
    """

    offset: float = 0.0
    compute_dtype: ComputeDtype = "float32"
    normalized: Normalized = "input"
    weight_dtype: WeightDtype = None
    output: Output = None
    inverse: Inverse = "rsqrt"
    scaled: Scaled = "compute"

    def __post_init__(self) -> None:
        check_form(**{field.name: getattr(self, field.name) for field in dataclasses.fields(self)})
        object.__setattr__(self, "offset", float(self.offset))

    def keywords(self) -> dict[str, float | str | None]:
        """The arguments that are not `rms_norm`'s defaults, in the order of its signature."""
        values = ((field, getattr(self, field.name)) for field in dataclasses.fields(self))
        return {field.name: value for field, value in values if value != field.default}

    def source(self) -> str:
        """`keywords()` as Python source: `offset=1.0, normalized=None, output="input"`; "" for the default.

        Needs no name in scope. Strings stand in double quotes.
        """
        return ", ".join(f"{name}={_literal(value)}" for name, value in self.keywords().items())


def norm_forms(*, weight: bool = True, inverse: Inverse | None = None) -> Iterator[NormForm]:
    """Every form worth trying on a norm, fewest departures from the default first.

    `weight=False` gives those of a norm without a weight, `inverse` those of one inverse root. Take
    the inverse from the traced operator where it is known: of a float32 m, torch on CPU gives
    `pow(m, -0.5)` and `rsqrt(m)` the same bits, so few probes tell the two apart. Forms of one inverse
    differ in bits on some pair of `NORM_PROBES`; those that are one function by definition are listed
    once (outside autocast, which on CUDA lifts `pow` and `rsqrt` to float32).
    Raises `ValueError` for an unknown inverse.
    """
    if inverse is not None:
        check_form(inverse=inverse)
    forms = _weighted() if weight else _weightless()
    chosen = (form for form in forms if inverse in (None, form.inverse))
    yield from sorted(chosen, key=lambda form: len(form.keywords()))  # stable: else as listed


INVERSES: tuple[Inverse, ...] = ("rsqrt", "sqrt", "reciprocal", "pow")
OUTPUTS: tuple[Output, ...] = (None, "input", "weight")

# Of two equal ways to compute h only one is listed. Scaling x itself shows only where the
# computing dtype is narrower than x's; a rounded factor leaves h in x's dtype, as "input" does.
HOW_H: tuple[tuple[ComputeDtype, Scaled], ...] = (
    ("float32", "compute"),
    (None, "compute"),
    ("opmath", "compute"),
    ("float32", "input"),
    ("float32", "rounded"),
    ("opmath", "rounded"),
    ("float64", "compute"),
    (None, "weighted"),
    ("float32", "weighted"),
)


def _weighted() -> Iterator[NormForm]:
    for (compute, scaled), offset, inverse in itertools.product(HOW_H, (0.0, 1.0), INVERSES):
        for normalized, weight_dtype, output in _roundings(compute, scaled, offset):
            yield NormForm(offset, compute, normalized, weight_dtype, output, inverse, scaled)


def _roundings(
    compute: ComputeDtype, scaled: Scaled, offset: float
) -> Iterator[tuple[Normalized, WeightDtype, Output]]:
    """(normalized, weight_dtype, output) that differ, given how h is made."""
    in_x_dtype = compute is None  # so is h then, rounded or not, and its product with a weight taken so
    rounded = scaled == "rounded"  # h is in x's dtype then too
    # No norm met so far computes in float64; a weight cast to it shows where an offset is added.
    only_own = compute == "float64" and not offset
    weight_dtypes: tuple[WeightDtype, ...] = (None,) if only_own else (None, "compute")
    if offset and compute == "float32" and not rounded:
        weight_dtypes += ("sum",)
    if scaled == "weighted":
        for weight_dtype, output in itertools.product(weight_dtypes, OUTPUTS):
            if not (in_x_dtype and weight_dtype and output == "input"):
                yield None, weight_dtype, output
        return
    for weight_dtype in weight_dtypes:
        if not in_x_dtype:
            yield from (("input", weight_dtype, None), ("input", weight_dtype, "input"))
        if not rounded:
            yield from ((None, weight_dtype, None), (None, weight_dtype, "weight"))
            if not (in_x_dtype and weight_dtype):
                yield (None, weight_dtype, "input")
    if not in_x_dtype and not rounded and compute != "float64":
        yield from (("weight", None, None), ("weight", None, "input"))


def _weightless() -> Iterator[NormForm]:
    for (compute, scaled), inverse in itertools.product(HOW_H, INVERSES):
        if scaled == "weighted":
            continue
        if compute is not None:
            yield NormForm(0.0, compute, "input", None, None, inverse, scaled)
        if scaled != "rounded":
            yield NormForm(0.0, compute, None, None, None, inverse, scaled)


def check_form(*, offset: float = 0.0, **chosen: str | None) -> None:
    """Raises `ValueError` naming the first argument whose value `rms_norm` does not know."""
    # By comparison, which NaN fails: torch.compile cannot trace math.isfinite of a symbolic float.
    number = isinstance(offset, float | int) and not isinstance(offset, bool)
    if not number or not -math.inf < offset < math.inf:
        raise ValueError(
            f"rms_norm: offset is {offset!r}; it must be a finite number (1.0 for a zero-centred weight)"
        )
    for name, value in chosen.items():
        if value not in VALID[name]:
            choices = ", ".join(_literal(choice) for choice in VALID[name])
            raise ValueError(f"rms_norm: {name} is {value!r}; it must be one of {choices}")


def _literal(value: float | str | None) -> str:
    return f'"{value}"' if isinstance(value, str) else repr(value)
