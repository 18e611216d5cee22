"""What became of a plan: what is lost first, repeated layers as one row each."""

from collections.abc import Hashable, Sequence

from fusekit.display.dispatch import as_html, as_text
from fusekit.display.groups import Group, group
from fusekit.display.markup import Html, code, columns, count, line, many, soft, table, tag
from fusekit.display.plan import name_of
from fusekit.display.source import place
from fusekit.display.theme import verdict
from fusekit.model.changes import Change, PlanChanges

ROWS = 80  # of one kind
LINES = 20


def group_changes(changes: Sequence[Change]) -> list[Group[Change]]:
    """Changes that are one row: everything equal but a number in the path."""

    def key(change: Change) -> Hashable:
        said = change.message.replace(change.name, "\0") if change.name else change.message
        return change.kind, change.place.type_name, change.fusion, change.parts, said, _at(change)

    return group(changes, lambda change: change.name, key)


def _at(change: Change) -> str:
    """Where the reason stands that decides now; a site's own line says nothing."""
    now = change.after
    return place(now.path, now.line) if now is not None and hasattr(now, "reason") else ""


def _kinds(changes: PlanChanges) -> list[tuple[str, Sequence[Change]]]:
    return [
        ("sites that disappeared", changes.disappeared),
        ("changed", changes.changed),
        ("sites that appeared", changes.appeared),
        ("new refusals", changes.new_refusals),
        ("refusals that are gone", changes.gone_refusals),
    ]


def _summary(changes: PlanChanges) -> str:
    if not changes:
        now = changes.after
        sites = count(len(now.sites) + len(now.applied), "site")
        return f"no change: {sites} and {count(len(now.refusals), 'refusal')} as before"
    gone = count(len(changes.disappeared), "site") if changes.disappeared else "no site"
    counts = [
        f"{gone} disappeared",
        f"{len(changes.appeared)} appeared" if changes.appeared else "",
        f"{len(changes.changed)} changed" if changes.changed else "",
        count(len(changes.new_refusals), "new refusal") if changes.new_refusals else "",
        count(len(changes.gone_refusals), "refusal") + " gone" if changes.gone_refusals else "",
    ]
    return ", ".join(part for part in counts if part)


def _name(changes: PlanChanges) -> str:
    before, after = name_of(changes.before), name_of(changes.after)
    return after if before == after else f"{before} → {after}"


def _versions(changes: PlanChanges) -> str:
    """Each package with its version, both where they differ."""
    was, now = dict(changes.before.versions), dict(changes.after.versions)
    said = []
    for name in dict.fromkeys((*was, *now)):
        old, new = was.get(name, "none"), now.get(name, "none")
        said.append(f"{name} {old}" if old == new else f"{name} {old} → {new}")
    return ", ".join(said)


def _where(one: Group[Change]) -> str:
    return one.label or "(the model itself)"


def _times(one: Group[Change]) -> str:
    return f"× {len(one.items)}" if len(one.items) > 1 else ""


@as_text.register
def _(changes: PlanChanges) -> str:
    lines = [f"{_name(changes)}: {_summary(changes)}"]
    if changes and _versions(changes):
        lines.append(f"  {_versions(changes)}")
    for title, some in _kinds(changes):
        groups = group_changes(some)
        rows = [_cells(one) for one in groups[:LINES]]
        if rows:
            lines += [f"  {title}", *columns(rows, [52, 0, 50, 160, 36], "    ")]
        if len(groups) > LINES:
            lines.append(f"    ... and {count(len(groups) - LINES, 'row')} more; .to_frame() has all")
    return "\n".join(lines)


def _cells(one: Group[Change]) -> list[str]:
    change = one.first
    what = f"{change.fusion} of {', '.join(change.parts)}" if change.parts else change.fusion
    return [_where(one), _times(one), what, change.message, _at(change)]


@as_html.register
def _(changes: PlanChanges) -> Html:
    said = verdict(changes.ok, _summary(changes), _summary(changes))
    return many(
        line(tag("b", _name(changes)), "  ", said),
        _compared(changes),
        *(_table(title, some) for title, some in _kinds(changes) if some),
    )


def _compared(changes: PlanChanges) -> Html:
    """Before and after side by side: numbers and versions, what differs in bold."""
    was, now = changes.before, changes.after
    pairs = [
        ("sites", str(len(was.sites) + len(was.applied)), str(len(now.sites) + len(now.applied))),
        ("refusals", str(len(was.refusals)), str(len(now.refusals))),
    ]
    old, new = dict(was.versions), dict(now.versions)
    pairs += [(name, old.get(name, "–"), new.get(name, "–")) for name in dict.fromkeys((*old, *new))]
    rows = [[name, a, b if a == b else tag("b", b)] for name, a, b in pairs]
    return table("Compared", ["", "before", "after"], rows)


def _table(title: str, changes: Sequence[Change]) -> Html:
    rows: list[list[object]] = []
    groups = group_changes(changes)
    for one in groups[:ROWS]:
        change = one.first
        where = code(_where(one), whole=True) if one.label else soft(_where(one))
        parts = code(", ".join(change.parts)) if change.parts else soft("–")
        at = code(_at(change), whole=True) if _at(change) else ""
        rows.append([where, _times(one), tag("b", change.fusion), parts, change.message, at])
    if len(groups) > ROWS:
        rows.append([soft(f"… and {len(groups) - ROWS} rows more; .to_frame() has all")])
    head = ["module", "places", "fusion", "parts", "what became of it", "where"]
    return table(title[0].upper() + title[1:], head, rows, whole=(0, 1, 2, 5))


@as_text.register
def _(change: Change) -> str:
    what = f"{change.fusion} of {', '.join(change.parts)}" if change.parts else change.fusion
    return f"<Change {change.name or '(the model itself)'}: {change.kind}: {what}: {change.message}>"


@as_html.register
def _(change: Change) -> Html:
    rows: list[list[object]] = [
        ["module", code(change.name or "(the model itself)")],
        ["what", change.kind],
        ["fusion", change.fusion],
        ["parts", code(", ".join(change.parts)) if change.parts else "no linears"],
        ["what became of it", change.message],
    ]
    if _at(change):
        rows.append(["where", code(_at(change))])
    return table("Change", ["what", "value"], rows)
