"""Root-mean-square norm, with every place where a model may round or cast said by an argument.

Two norms of one formula differ in bits, and over depth in text, by where they cast (field report
20), by the dtype a zero-centred weight gets its one in (19), and by eps (29). So each is an argument,
the defaults are Llama's, and `NormForm` names a combination.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from fusekit.kernels.norm_form import (
    ComputeDtype,
    Inverse,
    Normalized,
    NormForm,
    Output,
    Scaled,
    WeightDtype,
)

TORCH = NormForm(compute_dtype="opmath", normalized=None, output="input")  # of PyTorch's own rms_norm
TORCH_WEIGHTLESS = NormForm(compute_dtype="opmath")  # the same without a weight
HALVES = (torch.bfloat16, torch.float16)


def rms_norm(
    x: Tensor,
    weight: Tensor | None = None,
    eps: float | None = 1e-6,
    *,
    offset: float = 0.0,
    compute_dtype: ComputeDtype = "float32",
    normalized: Normalized = "input",
    weight_dtype: WeightDtype = None,
    output: Output = None,
    inverse: Inverse = "rsqrt",
    scaled: Scaled = "compute",
) -> Tensor:
    """`x` divided by its root mean square over the last dimension, times `weight`.

    `x` is floating point of shape [..., d], `weight` of shape [d] or None; the result has the shape
    of `x`. A weight of shape [1] counts for every column, and an x of shape [..., 1] is spread over
    a weight of any length, as in `weight * x`. With no keyword the result equals `LlamaRMSNorm` bit
    for bit. In the order computed:

    1. `compute_dtype`: h is x in "float32", "float64", "opmath" (float64 for a float64 x, else
       float32) or, for None, in its own dtype.
    2. m is the mean of h squared, plus `eps`. For `eps=None` that is what
       `torch.nn.functional.rms_norm` of torch 2.13 adds: the eps of float64 for a float64 x, else
       that of float32 (not that of x's own dtype: 0.0078 for bfloat16).
    3. `inverse`: h * rsqrt(m) for "rsqrt", h / sqrt(m) for "sqrt", h * (1 / sqrt(m)) for
       "reciprocal", h * m ** -0.5 for "pow".
       `scaled`: what is scaled so: h for "compute"; x itself, by promotion, for "input" (T5, which
       shows for a float64 x only); x itself, by a factor first rounded to x's dtype, for "rounded";
       the product of h and the weight of step 5 for "weighted", which then takes no step 4.
    4. `normalized`: h is rounded to x's dtype for "input", to the weight's where that is bfloat16 or
       float16 for "weight" (T5), and kept for None (Olmo2, Gemma).
    5. `weight_dtype`: the weight as it is for None, in the dtype of step 1 for "compute" (Gemma).
       `offset` is added to it in that dtype (Gemma, Qwen3-Next: 1.0); for "sum" it is added in the
       weight's own dtype and the sum cast.
    6. The product of both, by torch's promotion, then `output`: as it is for None (Llama: a float32
       weight makes a float32 result), in x's dtype for "input", in the weight's for "weight".

    Without a weight steps 5 and 6 are the cast of `output` alone. The form of `torch.nn.RMSNorm` is
    computed by PyTorch's own operator.

    Raises `ValueError` for an argument outside these values, a weight of another shape, an x
    that is not floating point or has no dimension, and, without a weight, for an argument that speaks
    of it. Source: Zhang and Sennrich, 2019 (arXiv:1910.07467); the forms are those of the norms
    in Transformers 5.24 and of `torch.nn.RMSNorm` (compute_dtype="opmath", normalized=None,
    output="input").
    """
    form = NormForm(offset, compute_dtype, normalized, weight_dtype, output, inverse, scaled)
    check_tensors(x, weight, eps, form)
    of_torch = form == TORCH or (weight is None and form == TORCH_WEIGHTLESS)
    if of_torch and (weight is None or weight.shape == x.shape[-1:]):
        return F.rms_norm(x, x.shape[-1:], weight, eps)
    return normalise(x, weight, eps, form, x.dtype)


def normalise(
    x: Tensor, weight: Tensor | None, eps: float | None, form: NormForm, own: torch.dtype, group: int = 0
) -> Tensor:
    """`rms_norm` in a form, arguments unchecked; `own` is what counts as x's dtype for step 4 and 6.

    With `group`, the mean is over each so many features by themselves.
    """
    compute = compute_dtype_of(form, x.dtype)
    h = x if form.compute_dtype is None else x.to(compute)
    added = torch.finfo(_opmath(x.dtype)).eps if eps is None else eps
    if weight is not None:
        scale = weight.to(compute) if form.weight_dtype == "compute" else weight
        scale = scale + form.offset if form.offset != 0 else scale
        scale = scale.to(compute) if form.weight_dtype == "sum" else scale
    base = scale * h if form.scaled == "weighted" else h if form.scaled == "compute" else x
    if group:
        base, h = base.unflatten(-1, (-1, group)), h.unflatten(-1, (-1, group))
    mean_square = h.pow(2).mean(-1, keepdim=True) + added
    h = _divide_by_root(base, mean_square, form.inverse, rounded=form.scaled == "rounded")
    h = h.flatten(-2) if group else h

    if form.normalized == "input":
        h = h.to(own)
    if weight is not None:
        if form.normalized == "weight" and weight.dtype in HALVES:
            h = h.to(weight.dtype)
        if form.scaled != "weighted":
            h = scale * h
        if form.output == "weight":
            h = h.to(weight.dtype)
    return h.to(own) if form.output == "input" else h


def _divide_by_root(h: Tensor, mean_square: Tensor, inverse: Inverse, rounded: bool) -> Tensor:
    if inverse == "rsqrt":
        scale = torch.rsqrt(mean_square)
    elif inverse == "pow":
        scale = torch.pow(mean_square, -0.5)
    else:
        scale = torch.sqrt(mean_square)
        if inverse == "reciprocal":
            scale = 1.0 / scale
    if rounded:
        scale = scale.to(h.dtype)
    return h / scale if inverse == "sqrt" else h * scale


def compute_dtype_of(form: NormForm, own: torch.dtype) -> torch.dtype:
    """The dtype of step 1 for an x of dtype `own`."""
    if form.compute_dtype is None:
        return own
    if form.compute_dtype == "opmath":
        return _opmath(own)
    return torch.float32 if form.compute_dtype == "float32" else torch.float64


def _opmath(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def check_tensors(
    x: Tensor, weight: Tensor | None, eps: float | None, form: NormForm, gated: bool = False
) -> None:
    """Raise `ValueError` for what `rms_norm`, or its gated version, cannot take, naming it."""
    name = "gated_rms_norm" if gated else "rms_norm"
    if not x.is_floating_point():
        raise ValueError(f"{name}: x has dtype {x.dtype}; it must be a floating point dtype")
    if x.ndim == 0:
        raise ValueError(f"{name}: x has shape []; it needs a last dimension to take the mean over")
    if weight is not None and weight.shape != x.shape[-1:]:
        if weight.ndim != 1 or 1 not in (weight.shape[0], x.shape[-1]):
            raise ValueError(
                f"{name}: weight has shape {list(weight.shape)} and x has shape {list(x.shape)}; "
                f"weight must have shape {list(x.shape[-1:])}, the last dimension of x, or [1]"
            )
    if eps is not None and not (isinstance(eps, float | int) and eps >= 0):
        raise ValueError(
            f"{name}: eps is {eps!r}; it must be a number of at least 0, or None for torch's default"
        )
    if weight is None:
        _check_weightless(form, name)
    elif form.scaled == "weighted" and form.normalized is not None:
        raise ValueError(f'{name}: scaled="weighted" needs normalized=None, which nothing would round')


def _check_weightless(form: NormForm, name: str) -> None:
    # Ignoring one of these would be a norm other than the one that was asked for.
    spoken = [
        f"{key}={value!r}"
        for key, value, idle in (
            ("offset", form.offset, form.offset == 0),
            ("normalized", form.normalized, form.normalized != "weight"),
            ("weight_dtype", form.weight_dtype, form.weight_dtype is None),
            ("output", form.output, form.output != "weight"),
            ("scaled", form.scaled, form.scaled != "weighted"),
        )
        if not idle
    ]
    if spoken:
        raise ValueError(
            f"{name}: {', '.join(spoken)} needs a weight and weight is None; leave it out or pass one"
        )
