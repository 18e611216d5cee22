"""Verdicts: how far fused and unfused are from a float64 run, and whether that is near enough."""

import math

import torch

from fusekit.model.report import Check

RATIO = 1.5  # fused may be this much further from float64 than unfused is
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

    `noise` is (largest, root-mean-square) error that an unfused run is known to have all the same.
    """
    unfused_max, unfused_rms = errors(unfused, reference)
    fused_max, fused_rms = errors(fused, reference)
    floor = EPS * torch.finfo(dtype).eps * float(reference.abs().max() if reference.numel() else 0)
    allowed_max = max(RATIO * max(unfused_max, noise[0]), floor)
    allowed_rms = max(RATIO * max(unfused_rms, noise[1]), floor)
    shapes = unfused.shape == fused.shape and unfused.dtype == fused.dtype
    ok = shapes and fused_max <= allowed_max and fused_rms <= allowed_rms
    detail = f"largest error {fused_max:.3g}, {unfused_max:.3g} unfused; allowed {allowed_max:.3g}"
    if not shapes:
        detail = (
            f"fused gives {fused.dtype} {list(fused.shape)}, unfused {unfused.dtype} {list(unfused.shape)}"
        )
    same = shapes and torch.equal(unfused, fused)
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


def state_check(before: dict[str, torch.Tensor], after: dict[str, torch.Tensor]) -> Check:
    if list(before) != list(after):
        return Check("state dict", "", "", False, "the names are not the same, or not in the same order")
    wrong = [name for name, tensor in before.items() if not _same_bits(tensor, after[name])]
    detail = f"{len(before)} tensors, the same names and bits" if not wrong else f"{wrong[0]} differs"
    return Check("state dict", "", "", not wrong, detail, same_bits=not wrong)


def _same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    same = left.shape == right.shape and left.dtype == right.dtype
    return same and bool(((left == right) | (left.isnan() & right.isnan())).all())


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
