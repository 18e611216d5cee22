"""Which of several a model picks by a score: the experts of a router, say.

Where two scores are a rounding apart, float64 may pick another expert, and all that follows is
another computation: an error against it would say nothing, and allow anything. So the unfused run
picks, the others follow it, and what they would have picked themselves is judged by itself.
"""

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from fusekit.model.compare import EPS, RATIO, errors, scale
from fusekit.model.report import Check

TOPK = frozenset({torch.topk, torch.Tensor.topk})
ARGMAX = frozenset({torch.argmax, torch.Tensor.argmax})


@dataclass
class Choice:
    """Scores along `dim` and the positions picked there."""

    scores: torch.Tensor
    picked: torch.Tensor
    dim: int


@dataclass
class Choices:
    """Every choice of one run, in order; `strayed` when it could not follow the other run's."""

    made: list[Choice] = field(default_factory=list)
    strayed: bool = False


class Choosing(TorchFunctionMode):
    """While active, `topk` and `argmax` of floats are kept, and give what `followed` picked."""

    def __init__(self, followed: Choices | None = None):
        super().__init__()
        self.followed, self.found = followed, Choices()

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if func not in TOPK and func not in ARGMAX:
            return result
        scores = args[0] if args else kwargs.get("input")
        place = 2 if func in TOPK else 1
        dim = kwargs.get("dim", args[place] if len(args) > place else -1 if func in TOPK else None)
        if not isinstance(scores, torch.Tensor) or not scores.is_floating_point() or "out" in kwargs:
            return result
        if dim is None or not scores.dim():  # a flat argmax picks no expert for each token
            return result
        kept = kwargs.get("keepdim", args[2] if len(args) > 2 else False)
        picked = result.indices if func in TOPK else result if kept else result.unsqueeze(dim)
        wanted = self._choose(Choice(scores.detach().clone(), picked.clone(), dim))
        if wanted is None:
            return result
        if func in TOPK:
            return torch.return_types.topk((scores.gather(dim, wanted), wanted))
        return wanted if kept else wanted.squeeze(dim)

    def _choose(self, own: Choice) -> torch.Tensor | None:
        """What to pick in place of `own`, None where that stays."""
        self.found.made.append(own)
        if self.followed is None:
            return None
        made, index = self.followed.made, len(self.found.made) - 1
        if index >= len(made) or made[index].picked.shape != own.picked.shape:
            self.found.strayed = True
            return None
        other = made[index].picked
        return None if torch.equal(other, own.picked) else other.clone()


def routing_check(unfused: Choices, fused: Choices, reference: Choices, *, dtype: torch.dtype) -> Check:
    """Fused scores like unfused, and would pick the same wherever the reference tells the two apart.

    The scores of a choice may be as far from float64 as 1.5 times the worst unfused ones of the
    model, relative to their largest magnitude, but never by more than half of the digits, or 8 eps.
    Two sets of picks count as one where their exact scores, largest first, differ nowhere by more
    than such errors can turn round.
    """
    if fused.strayed or len(fused.made) != len(unfused.made):
        detail = f"fused chooses {len(fused.made)} times, unfused {len(unfused.made)}, or among others"
        return Check("routing", "", "", False, detail, same_bits=False)
    eps = torch.finfo(dtype).eps
    triples = list(zip(unfused.made, fused.made, reference.made, strict=True))
    scales = [scale(true.scores) for _, _, true in triples]
    offs = [[errors(one.scores, true.scores)[0] for one in pair] for *pair, true in triples]
    worst = max((off[0] / size for off, size in zip(offs, scales, strict=True) if size), default=0.0)
    relative = max(min(RATIO * worst, math.sqrt(eps)), EPS * eps)
    total = agree = exact = 0
    ok = True
    for (other, mine, true), off, size in zip(triples, offs, scales, strict=True):
        allowed = relative * size
        ok &= off[1] <= allowed
        picks = [_in_order(true.scores, one.picked, one.dim) for one in (mine, other)]
        apart = torch.where(picks[0] == picks[1], 0.0, (picks[0] - picks[1]).abs())
        ok &= bool((apart <= 2 * (off[0] + allowed)).all())
        total += apart.amax(mine.dim).numel()
        agree += _alike(mine, other)
        exact += _alike(mine, true)
    unfused_max, fused_max = (max(off[i] for off in offs) for i in (0, 1))
    detail = f"{agree} of {total} choices agree with unfused, {exact} with float64"
    return Check("routing", "", "", ok, detail, fused_max, unfused_max, same_bits=agree == total)


def _in_order(scores: torch.Tensor, picked: torch.Tensor, dim: int) -> torch.Tensor:
    return scores.gather(dim, picked).double().sort(dim, descending=True)[0]


def _alike(left: Choice, right: Choice) -> int:
    """How many of the choices pick the same, in whatever order."""
    pairs = [one.picked.sort(one.dim)[0] for one in (left, right)]
    return int((pairs[0] == pairs[1]).all(left.dim).sum())
