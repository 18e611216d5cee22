"""A plan, and what was applied of one: counts first, repeated layers as one row each."""

from collections import Counter
from collections.abc import Sequence
from operator import attrgetter
from typing import Any

from fusekit.display.dispatch import as_html, as_text
from fusekit.display.markup import (
    Html,
    code,
    count,
    fold,
    line,
    many,
    soft,
    tag,
)
from fusekit.display.nothing import nothing_html, nothing_text
from fusekit.display.site import (
    got,
    group_refusals,
    group_sites,
    refusal_table,
    refusals_text,
    site_table,
    sites_text,
)
from fusekit.display.theme import notice
from fusekit.display.trace import assumptions_html, assumptions_text
from fusekit.model import Fused, Plan
from fusekit.model.saved import SavedPlan
from fusekit.tracing import Assumption


def tally(names: Sequence[str]) -> str:
    """Each name with how often it comes, most first: 32 qkv, 1 glu."""
    return ", ".join(f"{n} {name}" for name, n in Counter(names).most_common())


def _assumptions(plan: Plan) -> tuple[Assumption, ...]:
    """The plan's own, else those of the traces of one site of each group; each once."""
    own = getattr(plan, "assumptions", None)
    if own is None:
        own = [
            a for one in group_sites(plan.sites) for a in got(attrgetter("trace.assumptions"), one.first, ())
        ]
    return tuple(dict.fromkeys(own))


def name_of(plan: Plan | SavedPlan) -> str:
    return plan.model_name + (f", the part under {plan.scope}" if plan.scope else "")


def summary(plan: Plan | SavedPlan) -> str:
    sites = count(len(plan.sites), "site")
    if plan.sites:
        sites += f" ({tally([site.fusion for site in plan.sites])})"
    applied = f"{len(plan.applied)} applied" if plan.applied else "nothing applied"
    return f"{sites}, {count(len(plan.refusals), 'refusal')}, {applied}"


_ALL_APPLIED = "Nothing more to fuse: what can be fused is applied."


def _module(plan: Plan) -> Any:
    """What the plan is of, where that is there to look into."""
    return got(lambda of: of.model.get_submodule(of.scope), plan, None)


def _nothing_text(plan: Plan) -> list[str]:
    if plan.applied:
        return [f"  {_ALL_APPLIED}"]
    return nothing_text(name_of(plan), plan.refusals, plan.fusions, _module(plan))


def _nothing_html(plan: Plan) -> Html:
    if plan.applied:
        return notice(_ALL_APPLIED)
    return nothing_html(name_of(plan), plan.refusals, plan.fusions, _module(plan))


@as_text.register
def _(plan: Plan) -> str:
    few = len(group_sites(plan.sites)) < 20
    return "\n".join(
        [
            f"{name_of(plan)}: {summary(plan)}",
            *([] if plan.sites else _nothing_text(plan)),
            *sites_text("sites", plan.sites, 26),
            *sites_text("applied", plan.applied, 6),
            *refusals_text(plan.refusals, 20 if few else 10),
            *assumptions_text(_assumptions(plan), 3),
        ]
    )


def _fused_head(fused: Fused) -> str:
    names = tally([s.fusion for s in fused.sites])
    number = count(len(fused.sites), "site") + (f" ({names})" if names else "")
    return f"{fused.plan.model_name}: {number} {'reverted' if fused.reverted else 'applied'}"


def _fused_hint(fused: Fused) -> str:
    if fused.reverted:
        return "the model is as it was; .plan.apply() applies again"
    if not fused.sites:
        return "the model is as it was"
    return ".revert() gives back exactly what was there"


@as_text.register
def _(fused: Fused) -> str:
    nothing = [] if fused.sites else _nothing_text(fused.plan)
    sites = sites_text("sites", fused.sites, 26)
    return "\n".join([_fused_head(fused), *sites, *nothing, f"  {_fused_hint(fused)}"])


_HINT = line(
    soft("This plan changes nothing yet: "),
    code("plan.apply()"),
    soft(" does, "),
    code("plan.verify()"),
    soft(" checks."),
)


@as_html.register
def _(plan: Plan) -> Html:
    groups = group_sites(plan.sites)
    refusals = refusal_table(plan.refusals) if plan.refusals else Html("")
    if len(group_refusals(plan.refusals)) > 12:
        reasons = tally([refusal.reason for refusal in plan.refusals])
        refusals = fold(f"{count(len(plan.refusals), 'refusal')}: {reasons}", refusals)
    return many(
        line(tag("b", name_of(plan)), "  ", summary(plan)),
        _HINT if groups else _nothing_html(plan),
        site_table("Sites", plan.sites) if groups else "",
        site_table("Applied", plan.applied, room=0) if plan.applied else "",
        refusals,
        fold("0 refusals", "Whatever looked like a fusion is a site.") if groups and not refusals else "",
        assumptions_html(_assumptions(plan)),
    )


@as_html.register
def _(fused: Fused) -> Html:
    head = line(tag("b", _fused_head(fused)))
    if not fused.sites:
        return many(head, _nothing_html(fused.plan), line(soft("The model is as it was.")))
    hint = line(code("fused.revert()"), soft(" gives back exactly what was there."))
    if fused.reverted:
        hint = line(soft("The model is as it was. "), code("fused.plan.apply()"), soft(" applies again."))
    return many(head, hint, site_table("Was applied" if fused.reverted else "Applied", fused.sites))
