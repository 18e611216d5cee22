"""Which fusions of which modules: `only`, `exclude` and `layers`."""

import difflib
import fnmatch
from collections.abc import Iterable
from dataclasses import dataclass

import torch.nn as nn

from fusekit.errors import FusekitError
from fusekit.fusions import FUSIONS, own_fusions
from fusekit.model.binding import applied_matches


@dataclass(frozen=True)
class Selection:
    """The chosen modules by their paths, and which fusions of them."""

    modules: dict[str, nn.Module]
    only: frozenset[str] | None  # None: any
    exclude: frozenset[str]

    @classmethod
    def of(
        cls,
        model: nn.Module,
        only: Iterable[str] | str | None,
        exclude: Iterable[str] | str,
        layers: Iterable[str] | str | None,
    ) -> "Selection":
        """Raises `FusekitError` for a fusion that does not exist or a pattern that matches no module."""
        modules = dict(model.named_modules())
        if layers is not None:
            modules = _matching(modules, [layers] if isinstance(layers, str) else layers)
        # One that its user took out again may still be applied.
        applied = (match.fusion for module in modules.values() for match in applied_matches(module))
        known = tuple(dict.fromkeys((*FUSIONS, *own_fusions, *applied)))
        return cls(modules, _fusions(only, known) or None, _fusions(exclude, known))

    def takes(self, fusion: str) -> bool:
        return fusion not in self.exclude and (self.only is None or fusion in self.only)


def _fusions(names: Iterable[str] | str | None, known: tuple[str, ...]) -> frozenset[str]:
    chosen = [names] if isinstance(names, str) else list(names or ())
    for name in chosen:
        if name not in known:
            raise FusekitError(
                f"there is no fusion {name!r}{did_you_mean(name, known)}; there are {', '.join(known)}"
            )
    return frozenset(chosen)


def _matching(modules: dict[str, nn.Module], patterns: Iterable[str]) -> dict[str, nn.Module]:
    patterns = list(patterns)
    for pattern in patterns:
        if not any(fnmatch.fnmatchcase(name, pattern) for name in modules):
            raise FusekitError(f"layers={pattern!r} matches no module{did_you_mean(pattern, modules)}")
    return {name: module for name, module in modules.items() if lies_under(name, patterns)}


def lies_under(name: str, patterns: Iterable[str]) -> bool:
    """Whether a pattern matches the path `name`, or that of something it lies in."""
    words = name.split(".")
    heads = [".".join(words[:length]) for length in range(1, len(words) + 1)]
    return any(fnmatch.fnmatchcase(head, pattern) for pattern in patterns for head in heads)


def did_you_mean(name: str, names: Iterable[str]) -> str:
    """` (did you mean 'x'?)` with the nearest of `names`, nothing where none is near."""
    close = difflib.get_close_matches(name, list(names), n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""
