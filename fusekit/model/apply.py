"""Applying a plan in place, all of it or nothing, and taking it back."""

import os
from collections.abc import Iterable
from types import TracebackType
from typing import Any

import torch.nn as nn

from fusekit.errors import FusekitError
from fusekit.forward import original_class
from fusekit.fusions import Match, Refusal, analyse
from fusekit.model.binding import applied_matches, bind, fused_class, is_fused, unbind
from fusekit.model.checks import Uses, refusal_of
from fusekit.model.plan import Plan, Site, plan
from fusekit.model.selection import Selection
from fusekit.shown import Shown


class Fused(Shown):
    """A plan that was applied. `revert()` gives back exactly what was there.

    As a context manager it reverts at the end of the block.
    """

    def __init__(self, plan: Plan, sites: tuple[Site, ...]):
        self.plan, self.sites = plan, sites
        self._before = {id(site.module): original_class(site.module) for site in sites}

    @property
    def model(self) -> nn.Module:
        return self.plan.model

    @property
    def reverted(self) -> bool:
        """Whether every site is off again, by `revert()` here or by `fusekit.revert(model)`."""
        return bool(self.sites) and not self._left()

    def revert(self) -> None:
        """Take the sites of this plan off again: same modules, parameters, forward and hooks as before.

        Parameters keep their present values. Raises `FusekitError`, with nothing changed, when
        that was done already or when another tool replaced a forward or a class meanwhile. One
        that was interrupted is taken up where it stopped.
        """
        if self.reverted:
            raise FusekitError(
                f"this plan of {self.plan.model_name} is reverted already; apply a plan again first"
            )
        _take_off(_taken_off(self._left()))

    def _left(self) -> list[Site]:
        return [site for site in self.sites if not self._is_off(site)]

    def _is_off(self, site: Site) -> bool:
        if site.match in applied_matches(site.module):
            return False
        return is_fused(site.module) or type(site.module) is self._before[id(site.module)]

    def __enter__(self) -> "Fused":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self.reverted:
            self.revert()


def apply(plan: Plan, model: nn.Module | None = None) -> Fused:
    """Apply every site of `plan`; see `Plan.apply`."""
    if model is not None and model is not plan.model:
        raise FusekitError(
            f"this plan belongs to another {plan.model_name}: a plan names the modules of the model it was "
            "made from; make one with fk.plan(model)"
        )
    uses = Uses.of(plan.model)
    changes = [_change(module, sites, uses) for module, sites in _by_module(plan.sites)]
    done: list[Any] = []
    try:
        for module, before, after, cls, added in changes:
            done.append((module, before, added))
            bind(module, cls, after)
        return Fused(plan, plan.sites)
    except BaseException:
        for module, before, added in reversed(done):
            unbind(module, before, added)
        raise


def _by_module(sites: Iterable[Site]) -> list[tuple[nn.Module, list[Site]]]:
    groups: dict[int, tuple[nn.Module, list[Site]]] = {}
    for site in sites:
        groups.setdefault(id(site.module), (site.module, []))[1].append(site)
    return list(groups.values())


def _change(
    module: nn.Module, sites: list[Site], uses: Uses
) -> tuple[nn.Module, type, tuple[Match, ...], type, tuple[Match, ...]]:
    """(module, its class now, all matches then, its class then, the matches added), or an error."""
    first = sites[0]
    at = first.name or first.type_name
    done = applied_matches(module)
    for site in sites:
        if site.match in done:
            raise FusekitError(f"{at}: {site.fusion} is applied already; make a new plan to see what is left")
    if done and not is_fused(module):
        raise FusekitError(f"{at}: another tool replaced the class that fusekit gave it; undo that first")
    if "forward" in module.__dict__:
        raise FusekitError(
            f"{at}: another tool put a forward on this instance since the plan was made; plan again"
        )
    now = analyse(module, first.analysis.inputs)
    for site in sites:
        if site.match not in now.matches:
            raise FusekitError(
                f"{at}: it changed since the plan was made, and {site.fusion} no longer fits; plan again"
            )
        refusal = refusal_of(site.name, module, now, site.match, uses)
        if refusal:
            raise FusekitError(f"{refusal.message} (it changed since the plan was made; plan again)")
    added = tuple(site.match for site in sites)
    after = (*done, *added)
    assert now.source is not None
    cls = fused_class(original_class(module), now.source, now.kernels, after)
    return module, type(module), after, cls, added


def _taken_off(left: Iterable[Site]) -> list[tuple[nn.Module, type, tuple[Match, ...]]]:
    """(module, its class without the sites, their matches) of each module, or an error."""
    changes = []
    for module, sites in _by_module(left):
        at = sites[0].name or sites[0].type_name
        if not is_fused(module) or any(site.match not in applied_matches(module) for site in sites):
            raise FusekitError(
                f"{at}: its class is now {type(module).__module__}.{type(module).__qualname__}, not the one "
                "that fusekit gave it; undo what replaced it first, then revert"
            )
        if "forward" in module.__dict__:
            raise FusekitError(
                f"{at}: another tool put a forward on this instance after it was fused; take that off first, "
                "then revert"
            )
        off = tuple(site.match for site in sites)
        rest = tuple(match for match in applied_matches(module) if match not in off)
        cls = original_class(module)
        if rest:
            known = sites[0].analysis
            assert known.source is not None
            cls = fused_class(cls, known.source, known.kernels, rest)
        changes.append((module, cls, off))
    return changes


def _take_off(changes: list[tuple[nn.Module, type, tuple[Match, ...]]]) -> None:
    for module, cls, off in changes:
        unbind(module, cls, off)


def fuse(model: nn.Module, *, strict: bool = False, **options: Any) -> Fused:
    """Plan and apply in one step; `options` are those of `plan`.

    With `strict`, raises `FusekitError`, with nothing changed, when anything that looks fusable was
    refused.
    """
    found = plan(model, **options)
    if strict and found.refusals:
        raise FusekitError(_refused(found))
    return found.apply()


def _refused(plan: Plan, most: int = 6) -> str:
    """What stands against a strict `fuse`: each reason with its number and the first place."""
    by_reason: dict[tuple[str, str], list[Refusal]] = {}
    for refusal in plan.refusals:
        by_reason.setdefault((refusal.reason, refusal.fusion), []).append(refusal)
    ordered = sorted(by_reason.items(), key=lambda item: -len(item[1]))
    lines = []
    for (reason, _), same in ordered[:most]:
        path, line = same[0].path, same[0].line
        at = f" ({os.path.basename(path)}:{line})" if path and line else ""
        lines.append(f"  {len(same)} x [{reason}] {same[0].message}{at}")
    if len(ordered) > most:
        lines.append(f"  and {len(ordered) - most} reasons more: fk.plan(model).refusals has all")
    number = len(plan.refusals)
    places = f"{number} place{'s' if number > 1 else ''} that look{'' if number > 1 else 's'} fusable"
    return "\n".join(
        [
            f"strict: {places} in {plan.model_name} {'were' if number > 1 else 'was'} refused, so nothing "
            "was fused:",
            *lines,
            "leave out what is refused with exclude= (fusions) or layers= (patterns of modules), or fuse the "
            f"{len(plan.sites)} others without strict",
        ]
    )


def revert(
    model: nn.Module,
    *,
    only: Iterable[str] | str | None = None,
    exclude: Iterable[str] | str = (),
    layers: Iterable[str] | str | None = None,
) -> None:
    """Take the fusions off `model`, whichever plan applied them: all, or those chosen as in `plan`.

    A module keeps the rewrites that are not chosen: its forward is compiled from the original again.
    Raises `FusekitError`, with nothing changed, when nothing is applied there.
    """
    if not isinstance(model, nn.Module):
        raise FusekitError(f"revert() takes a module, not {type(model).__name__}")
    chosen = Selection.of(model, only, exclude, layers)
    left = [
        Site(name, match.fusion, match.parts, module, match, analyse(module), True)
        for name, module in chosen.modules.items()
        for match in applied_matches(module)
        if chosen.takes(match.fusion)
    ]
    if not left:
        what = "that was chosen " if only or exclude or layers else ""
        raise FusekitError(
            f"nothing {what}is fused in this {type(model).__name__}: there is nothing to revert"
        )
    _take_off(_taken_off(left))
