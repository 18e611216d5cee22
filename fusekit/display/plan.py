"""A plan, its sites and refusals, and what was applied: repeated layers as one row each."""

from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from operator import attrgetter
from typing import Any

from fusekit.display.diff import diff_table
from fusekit.display.dispatch import as_html, as_text
from fusekit.display.groups import Group, group
from fusekit.display.markup import (
    Html,
    clip,
    code,
    columns,
    count,
    fold,
    frame,
    line,
    many,
    row_of,
    soft,
    table,
    tag,
)
from fusekit.display.source import place
from fusekit.display.theme import ink, notice
from fusekit.display.trace import assumptions_html, assumptions_text
from fusekit.fusions import Refusal
from fusekit.model import Fused, Plan, Site
from fusekit.tracing import Assumption

DIFF_BYTES = 80_000  # of all diffs in one plan
ROWS = 80  # of one table
TEXT_SITES, TEXT_REFUSALS = 26, 20  # lines in a terminal


def group_sites(sites: Sequence[Site]) -> list[Group[Site]]:
    """Sites that are one row: equal fusion, parts and class, paths that differ in numbers only."""
    return group(sites, lambda s: s.name, lambda s: (s.fusion, tuple(s.parts), s.type_name))


def group_refusals(refusals: Sequence[Refusal]) -> list[Group[Refusal]]:
    """Refusals that are one row: everything equal but the number in the path, also in the sentence."""
    return group(refusals, lambda r: r.name, _same_refusal)


def _same_refusal(refusal: Refusal) -> Hashable:
    return (
        refusal.fusion,
        refusal.reason,
        _sentence(refusal),
        refusal.path,
        refusal.line,
        tuple(refusal.parts),
    )


def _sentence(refusal: Refusal) -> str:
    """The message without the module's own path and the fusion, which the row says already."""
    message = str(refusal.message)
    head, found, rest = message.partition(f": cannot fuse {refusal.fusion}: ")
    if found and " " not in head:
        message = rest
    if not refusal.name:
        return message
    return message.removeprefix(f"{refusal.name}: ").replace(refusal.name, "it")


def _where(one: Group[Any]) -> str:
    return one.label or "(the model itself)"


def _times(one: Group[Any]) -> str:
    return f"× {len(one.items)}" if len(one.items) > 1 else ""


def _tally(names: Sequence[str]) -> str:
    """ "32 qkv, 32 glu", most first."""
    return ", ".join(f"{n} {name}" for name, n in Counter(names).most_common())


def _got(read: Callable[[Any], Any], of: Any, otherwise: Any) -> Any:
    """What `read` gives, unless it fails: one broken site must not hide the others."""
    try:
        return read(of)
    except Exception:
        return otherwise


def _assumptions(plan: Plan) -> tuple[Assumption, ...]:
    """The plan's own, else those of the traces of one site of each group; each once."""
    own = getattr(plan, "assumptions", None)
    if own is None:
        own = [
            a for one in group_sites(plan.sites) for a in _got(attrgetter("trace.assumptions"), one.first, ())
        ]
    return tuple(dict.fromkeys(own))


def _name(plan: Plan) -> str:
    return plan.model_name + (f", the part under {plan.scope}" if plan.scope else "")


def _summary(plan: Plan) -> str:
    sites = count(len(plan.sites), "site")
    if plan.sites:
        sites += f" ({_tally([site.fusion for site in plan.sites])})"
    applied = f"{len(plan.applied)} applied" if plan.applied else "nothing applied"
    return f"{sites}, {count(len(plan.refusals), 'refusal')}, {applied}"


def _nothing(plan: Plan) -> str:
    """For a plan without sites: what stood in the way most often."""
    if plan.applied:
        return "Nothing more to fuse: what can be fused is applied."
    if not plan.refusals:
        return "Nothing here looks like a known fusion, so nothing was refused either."
    return f"Nothing can be fused. Refused for: {_tally([r.reason for r in plan.refusals])}."


# ---- text ----


def _site_cells(one: Group[Site]) -> list[str]:
    site = one.first
    return [_where(one), _times(one), site.fusion, ", ".join(site.parts), site.type_name]


def _refusal_cells(one: Group[Refusal]) -> list[str]:
    first = one.first
    at = place(first.path, first.line)
    return [_where(one), _times(one), first.fusion, first.reason, at, _sentence(first)]


def _listed(title: str, rows: list[list[str]], widths: Sequence[int], most: int) -> list[str]:
    if not rows:
        return []
    lines = [f"  {title}", *columns(rows[:most], widths, "    ")]
    if len(rows) > most:
        lines.append(f"    ... and {count(len(rows) - most, 'row')} more; .to_frame() has all")
    return lines


SITE_WIDTHS = [52, 0, 0, 44, 36]


@as_text.register
def _(plan: Plan) -> str:
    sites = [_site_cells(one) for one in group_sites(plan.sites)]
    applied = [_site_cells(one) for one in group_sites(plan.applied)]
    refusals = [_refusal_cells(one) for one in group_refusals(plan.refusals)]
    return "\n".join(
        [
            f"{_name(plan)}: {_summary(plan)}",
            *([] if sites else [f"  {_nothing(plan)}"]),
            *_listed("sites", sites, SITE_WIDTHS, TEXT_SITES),
            *_listed("applied", applied, SITE_WIDTHS, 6),
            *_listed("refusals", refusals, [44, 0, 0, 0, 36, 100], TEXT_REFUSALS if len(sites) < 20 else 10),
            *assumptions_text(_assumptions(plan), 3),
        ]
    )


@as_text.register
def _(site: Site) -> str:
    """One line, since `plan.sites` prints as a tuple of these; `site.diff` prints the change."""
    parts = f" of {', '.join(site.parts)}" if site.parts else ""
    state = ", applied" if site.applied else ""
    return f"<Site {site.name or '(the model itself)'}: {site.fusion}{parts} ({site.type_name}{state})>"


@as_text.register
def _(refusal: Refusal) -> str:
    at = f" at {place(refusal.path, refusal.line)}" if refusal.path else ""
    head = f"{refusal.name or '(the model itself)'}: {refusal.fusion} ({refusal.reason})"
    return f"<Refusal {head}{at}: {_sentence(refusal)}>"


def _fused_head(fused: Fused) -> str:
    names = _tally([s.fusion for s in fused.sites])
    number = count(len(fused.sites), "site") + (f" ({names})" if names else "")
    return f"{fused.plan.model_name}: {number} {'reverted' if fused.reverted else 'applied'}"


def _fused_hint(fused: Fused) -> str:
    if fused.reverted:
        return "the model is as it was; .plan.apply() applies again"
    return ".revert() gives back exactly what was there"


@as_text.register
def _(fused: Fused) -> str:
    sites = [_site_cells(one) for one in group_sites(fused.sites)]
    return "\n".join(
        [_fused_head(fused), *_listed("sites", sites, SITE_WIDTHS, TEXT_SITES), f"  {_fused_hint(fused)}"]
    )


# ---- html ----

SITE_HEAD = ["module", "places", "fusion", "parts", "class"]


def _site_row(one: Group[Site]) -> Html:
    site = one.first
    where = code(_where(one)) if one.label else soft(_where(one))
    parts = code(", ".join(site.parts)) if site.parts else soft("–")
    return row_of([where, _times(one), tag("b", site.fusion), parts, site.type_name], 5, whole=(0, 1, 2))


def _diff_fold(one: Group[Site], open_: bool = False) -> Html:
    """The first site's diff behind a click, or why there is none."""
    site = one.first
    try:
        body = diff_table(site.diff)
    except Exception as error:
        said = clip(f"{type(error).__name__}: {_got(str, error, '')}", 200)
        return soft(f"no diff to show ({said})")
    title = many("before and after", soft(f", {site.name or site.type_name}") if len(one.items) > 1 else "")
    return fold(title, body, open_)


def _site_table(caption: str, sites: Sequence[Site], room: int = DIFF_BYTES) -> Html:
    """A row for each group and, while there is room, its diff below it."""
    groups = group_sites(sites)
    rows: list[Html] = []
    without = 0
    for one in groups[:ROWS]:
        rows.append(_site_row(one))
        diff = _diff_fold(one) if room > 0 else ""
        room -= len(diff)
        if room > 0:
            rows.append(row_of([tag("div", diff, "margin-left:16px")], 5))
        else:
            without += 1
    if without and len(rows) > without:
        said = f"{count(without, 'diff')} left out, to keep this output small: .diff of the site has it"
        rows.append(row_of([soft(said)], 5))
    if len(groups) > ROWS:
        rows.append(row_of([soft(f"… and {len(groups) - ROWS} rows more; .to_frame() has all")], 5))
    return frame(caption, SITE_HEAD, rows)


def _refusal_table(refusals: Sequence[Refusal]) -> Html:
    rows: list[list[object]] = []
    groups = group_refusals(refusals)
    for one in groups[:ROWS]:
        first = one.first
        why = many(_sentence(first), soft(f" [{', '.join(first.parts)}]") if first.parts else "")
        where = code(_where(one)) if one.label else soft(_where(one))
        at = code(place(first.path, first.line))
        rows.append([where, _times(one), first.fusion, code(first.reason), why, at])
    if len(groups) > ROWS:
        rows.append([soft(f"… and {len(groups) - ROWS} rows more; .to_frame() has all")])
    return table(
        "Refusals", ["module", "places", "fusion", "reason", "why not", "where"], rows, whole=(0, 1, 2, 3, 5)
    )


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
    refusals = _refusal_table(plan.refusals) if plan.refusals else Html("")
    if len(group_refusals(plan.refusals)) > 12:
        reasons = _tally([refusal.reason for refusal in plan.refusals])
        refusals = fold(f"{count(len(plan.refusals), 'refusal')}: {reasons}", refusals)
    return many(
        line(tag("b", _name(plan)), "  ", _summary(plan)),
        _HINT if groups else notice(_nothing(plan)),
        _site_table("Sites", plan.sites) if groups else "",
        _site_table("Applied", plan.applied, room=0) if plan.applied else "",
        refusals if plan.refusals else fold("0 refusals", "Whatever looked like a fusion is a site."),
        assumptions_html(_assumptions(plan)),
    )


@as_html.register
def _(site: Site) -> Html:
    state = ink("good", tag("b", "applied")) if site.applied else soft("not applied")
    head = line(tag("b", code(site.name or "(the model itself)")), "  ", tag("b", site.fusion), "  ", state)
    merged = code(", ".join(site.parts)) if site.parts else "no linears"
    rows: list[list[object]] = [["class", site.type_name], ["parts, in row order", merged]]
    diff = _diff_fold(Group((site.name,), (site,)), open_=True)
    return many(head, table("Site", ["what", "value"], rows), diff)


@as_html.register
def _(refusal: Refusal) -> Html:
    rows: list[list[object]] = [
        ["module", code(refusal.name or "(the model itself)")],
        ["fusion", refusal.fusion],
        ["reason", code(refusal.reason)],
        ["why not", _sentence(refusal)],
    ]
    if refusal.parts:
        rows.append(["parts", code(", ".join(refusal.parts))])
    if refusal.path:
        rows.append(["where", code(f"{refusal.path}:{refusal.line}")])
    return table("Refusal", ["what", "value"], rows)


@as_html.register
def _(fused: Fused) -> Html:
    head = line(tag("b", _fused_head(fused)))
    hint = line(code("fused.revert()"), soft(" gives back exactly what was there."))
    if fused.reverted:
        hint = line(soft("The model is as it was. "), code("fused.plan.apply()"), soft(" applies again."))
    return many(head, hint, _site_table("Was applied" if fused.reverted else "Applied", fused.sites))
