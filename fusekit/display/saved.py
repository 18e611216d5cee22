"""A saved plan: as a plan, without diffs, and with the versions that it was made with."""

from collections.abc import Sequence
from typing import Any, cast

from fusekit.display.dispatch import as_html, as_text
from fusekit.display.markup import Html, code, count, fold, line, many, soft, table, tag
from fusekit.display.nothing import nothing_html, nothing_text
from fusekit.display.plan import name_of, summary, tally
from fusekit.display.site import (
    group_refusals,
    refusal_table,
    refusals_text,
    sentence,
    site_table,
    sites_text,
)
from fusekit.display.source import place
from fusekit.display.theme import notice
from fusekit.model.saved import SavedPlan, SavedRefusal, SavedSite


def versions(plan: SavedPlan) -> str:
    """fusekit 0.1.0, torch 2.13.0"""
    return ", ".join(f"{name} {number}" for name, number in plan.versions)


def _any(items: Sequence[Any]) -> Any:
    """Saved sites and refusals have the fields that the tables of a plan's own show."""
    return cast(Any, items)


@as_text.register
def _(plan: SavedPlan) -> str:
    lines = [f"{name_of(plan)}: {summary(plan)}"]
    if plan.versions:
        lines.append(f"  saved with {versions(plan)}")
    if not plan.sites and not plan.applied:
        lines += nothing_text(name_of(plan), plan.refusals, plan.fusions)
    lines += sites_text("sites", _any(plan.sites), 26)
    lines += sites_text("applied", _any(plan.applied), 6)
    lines += refusals_text(_any(plan.refusals), 20)
    return "\n".join(lines)


@as_html.register
def _(plan: SavedPlan) -> Html:
    refusals = refusal_table(_any(plan.refusals)) if plan.refusals else Html("")
    if len(group_refusals(_any(plan.refusals))) > 12:
        reasons = tally([refusal.reason for refusal in plan.refusals])
        refusals = fold(f"{count(len(plan.refusals), 'refusal')}: {reasons}", refusals)
    nothing: object = ""
    if not plan.sites:
        nothing = nothing_html(name_of(plan), plan.refusals, plan.fusions)
        if plan.applied:
            nothing = notice("Every site was applied when this plan was made.")
    return many(
        line(tag("b", name_of(plan)), "  ", summary(plan)),
        line(soft(f"Saved with {versions(plan)}.")) if plan.versions else "",
        nothing,
        site_table("Sites", _any(plan.sites), room=0) if plan.sites else "",
        site_table("Was applied", _any(plan.applied), room=0) if plan.applied else "",
        refusals,
    )


@as_text.register
def _(site: SavedSite) -> str:
    parts = f" of {', '.join(site.parts)}" if site.parts else ""
    state = ", applied" if site.applied else ""
    return f"<SavedSite {site.name or '(the model itself)'}: {site.fusion}{parts} ({site.type_name}{state})>"


@as_text.register
def _(refusal: SavedRefusal) -> str:
    at = f" at {place(refusal.path, refusal.line)}" if refusal.path else ""
    head = f"{refusal.name or '(the model itself)'}: {refusal.fusion} ({refusal.reason})"
    return f"<SavedRefusal {head}{at}: {sentence(cast(Any, refusal))}>"


def _rows(one: SavedSite | SavedRefusal) -> list[list[object]]:
    rows: list[list[object]] = [
        ["module", code(one.name or "(the model itself)")],
        ["class", one.type_name],
        ["fusion", one.fusion],
        ["parts, in row order", code(", ".join(one.parts)) if one.parts else "no linears"],
    ]
    if one.path:
        rows.append(["where", code(f"{one.path}:{one.line}")])
    return rows


@as_html.register
def _(site: SavedSite) -> Html:
    return table("Saved site", ["what", "value"], _rows(site))


@as_html.register
def _(refusal: SavedRefusal) -> Html:
    why: list[list[object]] = [["reason", code(refusal.reason)], ["why not", sentence(cast(Any, refusal))]]
    return table("Saved refusal", ["what", "value"], [*_rows(refusal), *why])
