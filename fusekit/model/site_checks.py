"""Each site of a plan by itself, with what its module was called with in a run of the model."""

import copy
from collections.abc import Iterable
from dataclasses import replace

import torch
import torch.nn as nn

from fusekit.model.apply import Fused, apply
from fusekit.model.compare import compare
from fusekit.model.lifted import Lifted
from fusekit.model.plan import Plan, Site
from fusekit.model.report import Check
from fusekit.model.runs import Call, as_double, first_output, said


def site_checks(
    sites: Iterable[Site], model: nn.Module, calls: dict[str, Call], dtype: torch.dtype
) -> tuple[list[Check], list[str]]:
    """The checks of `sites` on copies of the modules of `model`, and why others have none.

    `model` is an unfused copy of the model of the plan, `calls` are by module.
    """
    found: list[Check] = []
    reasons: dict[str, list[str]] = {}
    for site in sites:
        check: Check | str = "it was not called in this run"
        if site.name in calls:
            module = copy.deepcopy(model.get_submodule(site.name))
            check = _site_check(site, module, calls[site.name], dtype)
        if isinstance(check, Check):
            found.append(check)
        else:
            reasons.setdefault(check, []).append(site.name or site.type_name)
    return found, [f"{_first_of(names)}: {reason}" for reason, names in reasons.items()]


def _first_of(names: list[str]) -> str:
    names = list(dict.fromkeys(names))  # two fusions of one module
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _site_check(site: Site, module: nn.Module, call: Call, dtype: torch.dtype) -> Check | str:
    """The check, or why there is none."""
    try:
        unfused, chosen = first_output(module, call)
    except Exception as error:
        return f"the unfused module fails by itself: {said(error)}"
    with apply_copied([replace(site, name="", module=module)], module, site.module):
        try:
            fused, _ = first_output(module, call, chosen)
        except Exception as error:
            detail = f"the fused module fails: {said(error)}"
            return Check("site", site.name, site.fusion, False, detail)
    try:
        module.double()
        with Lifted():
            exact, _ = first_output(module, as_double(call), chosen)
    except Exception as error:
        return f"the module fails in float64: {said(error)}"
    if unfused is None or fused is None or exact is None:
        return "it returns no floating tensor"
    return compare("site", site.name, unfused, fused, exact, dtype=dtype, fusion=site.fusion)


def apply_copied(sites: list[Site], model: nn.Module, original: nn.Module) -> Fused:
    """The sites applied to `model`, a copy, in the mode that `original` is in: a match may depend on it."""
    for mine, its in zip(model.modules(), original.modules(), strict=True):
        mine.training = its.training
    try:
        return apply(Plan(model, tuple(replace(site, applied=False) for site in sites), (), ()))
    finally:
        model.eval()
