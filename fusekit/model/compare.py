"""Verdicts: how far fused and unfused are from a float64 run, and whether that is near enough."""

import math
from collections.abc import Callable
from typing import Any

import torch

from fusekit.model.report import Check

RATIO = 1.5  # fused may be this much further from float64 than unfused is
LUCK = 3.0  # the largest of a gradient's errors may be, where their root-mean-square is not: it is luck
EPS = 8  # ... or this many eps of the dtype, relative to the largest magnitude


def compare(
    what: str,
    name: str,
    unfused: torch.Tensor,
    fused: torch.Tensor,
    reference: torch.Tensor,
    *,
    dtype: torch.dtype,
    fusion: str = "",
    noise: tuple[float, float] = (0.0, 0.0),
) -> Check:
    """The check of one tensor: `reference` is its float64 value, `dtype` the one that the model runs in.

    `noise` is (largest, root-mean-square) error that rounding is known to make all the same.
    """
    unfused_max, unfused_rms = errors(unfused, reference)
    fused_max, fused_rms = errors(fused, reference)
    size = scale(reference)
    floor = EPS * torch.finfo(dtype).eps * size
    allowed_max = max(RATIO * unfused_max, noise[0], floor)
    allowed_rms = max(RATIO * unfused_rms, noise[1], floor)
    shapes = unfused.shape == fused.shape and unfused.dtype == fused.dtype
    ok = shapes and fused_max <= allowed_max and fused_rms <= allowed_rms
    detail = (
        f"largest error {fused_max:.3g} of {size:.3g}, {unfused_max:.3g} unfused; allowed {allowed_max:.3g}"
    )
    if fused_max <= allowed_max and fused_rms > allowed_rms:
        detail += f"; rms error {fused_rms:.3g}, {unfused_rms:.3g} unfused; allowed {allowed_rms:.3g}"
    if not shapes:
        detail = (
            f"fused gives {fused.dtype} {list(fused.shape)}, unfused {unfused.dtype} {list(unfused.shape)}"
        )
    same = shapes and same_bits(unfused, fused)
    return Check(what, name, fusion, bool(ok), detail, fused_max, unfused_max, fused_rms, unfused_rms, same)


def errors(found: torch.Tensor, reference: torch.Tensor) -> tuple[float, float]:
    """(largest, root-mean-square) absolute error; infinite where only the reference is finite."""
    if found.shape != reference.shape:
        return math.inf, math.inf
    if not found.numel():
        return 0.0, 0.0
    difference = (found.double() - reference.double()).abs()
    difference = torch.where(found.double() == reference.double(), 0.0, difference)  # equal infinities
    difference = torch.nan_to_num(difference, nan=math.inf, posinf=math.inf)
    both = torch.isnan(found) & torch.isnan(reference)
    difference = torch.where(both, 0.0, difference)
    return float(difference.max()), float(difference.square().mean().sqrt())


def scale(reference: torch.Tensor) -> float:
    """The largest finite magnitude."""
    return float(torch.where(reference.isfinite(), reference, 0.0).abs().max()) if reference.numel() else 0.0


# -- gradients --------------------------------------------------------------------------------


def gradient_checks(
    unfused: dict[str, torch.Tensor],
    fused: dict[str, torch.Tensor],
    reference: dict[str, torch.Tensor],
    *,
    dtype: torch.dtype,
) -> list[Check]:
    """A check of each parameter's gradient; `verify` states the rule."""
    eps = torch.finfo(dtype).eps
    scales = {name: scale(exact) for name, exact in reference.items()}
    largest = max(scales.values(), default=0.0)
    relative = _noise(unfused, reference, scales, eps)
    checks = []
    for name, exact in reference.items():
        if name not in unfused or name not in fused:
            checks.append(Check("gradients", name, "", False, "it has no gradient in one of the runs"))
            continue
        noise = tuple(max(part * scales[name], eps * largest) for part in relative)
        pair = unfused[name], fused[name]
        checks.append(compare("gradients", name, *pair, exact, dtype=dtype, noise=(noise[0], noise[1])))
    for name in fused.keys() - reference.keys():
        checks.append(Check("gradients", name, "", False, "only the fused model has a gradient for it"))
    return checks


def _noise(
    unfused: dict[str, torch.Tensor], reference: dict[str, torch.Tensor], scales: dict[str, float], eps: float
) -> tuple[float, float]:
    """(largest, root-mean-square) error that rounding makes, relative to a parameter's own scale.

    A gradient that is zero but for rounding (of a key's bias, under a softmax) has no scale of its
    own: an error relative to that would let anything pass. So would one of more than half the digits.
    """
    least = eps * max(scales.values(), default=0.0)
    counted = [name for name in unfused if name in scales and scales[name] >= least and scales[name] > 0]
    found = [[error / scales[name] for error in errors(unfused[name], reference[name])] for name in counted]
    worst = [max((pair[i] for pair in found), default=0.0) for i in (0, 1)]
    return min(LUCK * worst[0], math.sqrt(eps)), min(RATIO * worst[1], math.sqrt(eps))


# -- state dict -------------------------------------------------------------------------------


def state_check(before: dict[str, Any], after: dict[str, Any]) -> Check:
    """The same names in the same order, and every tensor with the same bits."""
    if list(before) != list(after):
        return Check("state dict", "", "", False, "the names are not the same, or not in the same order")
    wrong = [name for name, value in before.items() if not _is_same_entry(value, after[name])]
    detail = f"{len(before)} tensors, the same names and bits" if not wrong else f"{wrong[0]} differs"
    return Check("state dict", "", "", not wrong, detail, same_bits=not wrong)


def _is_same_entry(left: Any, right: Any) -> bool:
    if isinstance(left, torch.Tensor) and isinstance(right, torch.Tensor):
        return same_bits(left, right)
    return type(left) is type(right)  # a module's extra state: any object, and a copy need not equal it


def same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Whether two tensors have one shape and dtype and the same bits: 0.0 is not -0.0, a NaN is itself."""
    if left.shape != right.shape or left.dtype != right.dtype or left.layout != right.layout:
        return False
    try:
        return torch.equal(_bits(left), _bits(right))
    except RuntimeError:  # quantized or sparse: no bits to look at
        return torch.equal(left, right)


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    plain = tensor.detach().resolve_conj().resolve_neg()
    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    if plain.element_size() not in kinds:
        plain = torch.view_as_real(plain)  # complex128 has 16 bytes
    return plain.view(kinds[plain.element_size()])


# -- tokens -----------------------------------------------------------------------------------


def top1_check(unfused: torch.Tensor, fused: torch.Tensor, reference: torch.Tensor) -> Check:
    """Fused must pick the unfused token wherever the reference tells the first two tokens apart."""
    best = reference.topk(2, -1).values
    noise = (unfused.double() - reference).abs().amax(-1) + (fused.double() - reference).abs().amax(-1)
    clear = best[..., 0] - best[..., 1] > noise
    same = unfused.argmax(-1) == fused.argmax(-1)
    ok = bool((same | ~clear).all())
    exact = int((fused.argmax(-1) == reference.argmax(-1)).sum())
    detail = f"{int(same.sum())} of {same.numel()} positions agree with unfused, {exact} with float64"
    return Check("top-1", "", "", ok, detail, same_bits=bool(same.all()))


def text_check(
    before: torch.Tensor,
    after: torch.Tensor,
    new: int,
    noise: float,
    exact_logits: Callable[[int, torch.Tensor], torch.Tensor | None],
) -> Check:
    """The same `new` tokens, or a fork between two that float64 tells apart by less than the noise.

    `exact_logits(row, tokens)` are the float64 logits after `tokens`; None where there are none, and
    then the tokens must be the same.
    """
    if before.shape != after.shape:
        lengths = f"{list(after.shape)} tokens, unfused {list(before.shape)}"
        return Check("generation", "", "", False, f"fused gives {lengths}", same_bits=False)
    start = before.shape[1] - new
    same = before == after
    detail = f"{int(same[:, start:].sum())} of {new * before.shape[0]} tokens, greedy, are the same"
    ok = True
    for row in (~same).any(1).nonzero().flatten().tolist():
        fork = int((~same[row]).nonzero()[0])
        detail += f"; sequence {row} forks at token {fork - start}"
        logits = exact_logits(row, before[row, :fork])
        if logits is None:
            ok = False
            detail += ", with no float64 run to judge it by"
            continue
        margin = abs(float(logits[before[row, fork]] - logits[after[row, fork]]))
        ok &= margin <= noise
        detail += f": in float64 the two are {margin:.2g} apart (rounding noise {noise:.2g})"
    return Check("generation", "", "", ok, detail, same_bits=bool(same.all()))
