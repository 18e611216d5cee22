"""Sites and refusals, alone and in tables where repeated layers are one row each."""

from collections.abc import Callable, Hashable, Sequence
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
from fusekit.display.source import place, shown_path
from fusekit.display.theme import TINTS, ink
from fusekit.fusions import Refusal
from fusekit.model import Site

DIFF_BYTES = 80_000  # of all diffs in one plan
ROWS = 80  # of one table


def group_sites(sites: Sequence[Site]) -> list[Group[Site]]:
    """Sites that are one row: equal fusion, parts and class, paths that differ in numbers only."""
    return group(sites, lambda s: s.name, lambda s: (s.fusion, tuple(s.parts), s.type_name))


def group_refusals(refusals: Sequence[Refusal]) -> list[Group[Refusal]]:
    """Refusals that are one row: everything equal but the number in the path, also in the sentence."""
    return group(refusals, lambda r: r.name, _same_refusal)


def _same_refusal(refusal: Refusal) -> Hashable:
    said = sentence(refusal)
    if refusal.name:
        said = said.replace(refusal.name, "\0")  # where it names its module, the number differs
    return (refusal.fusion, refusal.reason, said, refusal.path, refusal.line, tuple(refusal.parts))


def sentence(refusal: Refusal) -> str:
    """The message without what the row says already: the module's path and the fusion before it."""
    message = str(refusal.message)
    head, found, rest = message.partition(f": cannot fuse {refusal.fusion}: ")
    if found and " " not in head:
        return rest
    return message.removeprefix(f"{refusal.name}: ") if refusal.name else message


def _where(one: Group[Any]) -> str:
    return one.label or "(the model itself)"


def _where_html(one: Group[Any]) -> Html:
    return code(_where(one), whole=True) if one.label else soft(_where(one))


def _times(one: Group[Any]) -> str:
    return f"× {len(one.items)}" if len(one.items) > 1 else ""


def got(read: Callable[[Any], Any], of: Any, otherwise: Any) -> Any:
    """What `read` gives, unless it fails: one broken site must not hide the others."""
    try:
        return read(of)
    except Exception:
        return otherwise


def _site_cells(one: Group[Site]) -> list[str]:
    site = one.first
    return [_where(one), _times(one), site.fusion, ", ".join(site.parts), site.type_name]


def _refusal_cells(one: Group[Refusal]) -> list[str]:
    first = one.first
    at = place(first.path, first.line)
    return [_where(one), _times(one), first.fusion, first.reason, at, sentence(first)]


def sites_text(title: str, sites: Sequence[Site], most: int) -> list[str]:
    """At most `most` rows of sites, for a terminal."""
    return _listed(title, [_site_cells(one) for one in group_sites(sites)], [52, 0, 0, 44, 36], most)


def refusals_text(refusals: Sequence[Refusal], most: int) -> list[str]:
    cells = [_refusal_cells(one) for one in group_refusals(refusals)]
    return _listed("refusals", cells, [44, 0, 0, 0, 36, 100], most)


def _listed(title: str, rows: list[list[str]], widths: Sequence[int], most: int) -> list[str]:
    if not rows:
        return []
    lines = [f"  {title}", *columns(rows[:most], widths, "    ")]
    if len(rows) > most:
        lines.append(f"    ... and {count(len(rows) - most, 'row')} more; .to_frame() has all")
    return lines


@as_text.register
def _(site: Site) -> str:
    """One line, since `plan.sites` prints as a tuple of these; `site.diff` prints the change."""
    parts = f" of {', '.join(site.parts)}" if site.parts else ""
    state = ", applied" if site.applied else ""
    roles = "".join(f"; {role}: {', '.join(paths)}" for role, paths in _by_role(site).items())
    return (
        f"<Site {site.name or '(the model itself)'}: {site.fusion}{parts} ({site.type_name}{state}){roles}>"
    )


def _by_role(site: Site) -> dict[str, list[str]]:
    """The linears at a site by their role under tensor parallelism."""
    found: dict[str, list[str]] = {}
    for path, role in got(lambda one: one.roles, site, {}).items():
        found.setdefault(role, []).append(path)
    return found


@as_text.register
def _(refusal: Refusal) -> str:
    at = f" at {place(refusal.path, refusal.line)}" if refusal.path else ""
    head = f"{refusal.name or '(the model itself)'}: {refusal.fusion} ({refusal.reason})"
    return f"<Refusal {head}{at}: {sentence(refusal)}>"


SITE_HEAD = ["module", "places", "fusion", "parts", "class"]


def _site_row(one: Group[Site], paper: str) -> Html:
    site = one.first
    where = _where_html(one)
    parts = code(", ".join(site.parts)) if site.parts else soft("–")
    return row_of(
        [where, _times(one), tag("b", site.fusion), parts, site.type_name], 5, whole=(0, 1, 2), paper=paper
    )


def _diff_fold(one: Group[Site], open_: bool = False) -> Html:
    """The first site's diff behind a click, or why there is none."""
    site = one.first
    try:
        body = diff_table(site.diff)
    except Exception as error:
        said = clip(f"{type(error).__name__}: {got(str, error, '')}", 200)
        return soft(f"no diff to show ({said})")
    title = many("before and after", soft(f", {site.name or site.type_name}") if len(one.items) > 1 else "")
    return fold(title, body, open_)


def site_table(caption: str, sites: Sequence[Site], room: int = DIFF_BYTES) -> Html:
    """A row for each group and, while there is room, its diff below it."""
    groups = group_sites(sites)
    rows: list[Html] = []
    without = 0
    for one in groups[:ROWS]:
        rows.append(_site_row(one, TINTS["quiet"] if room > 0 else ""))
        diff = _diff_fold(one) if room > 0 else ""
        room -= len(diff)
        if room > 0:
            rows.append(row_of([tag("div", diff, "margin-left:16px")], 5, paper="transparent"))
        else:
            without += 1
    if without and len(rows) > without:
        said = f"{count(without, 'diff')} left out, to keep this output small: .diff of the site has it"
        rows.append(row_of([soft(said)], 5))
    if len(groups) > ROWS:
        rows.append(row_of([soft(f"… and {len(groups) - ROWS} rows more; .to_frame() has all")], 5))
    return frame(caption, SITE_HEAD, rows)


def refusal_table(refusals: Sequence[Refusal]) -> Html:
    rows: list[list[object]] = []
    groups = group_refusals(refusals)
    for one in groups[:ROWS]:
        first = one.first
        why = many(sentence(first), soft(f" [{', '.join(first.parts)}]") if first.parts else "")
        where = _where_html(one)
        at = code(place(first.path, first.line), whole=True)
        rows.append([where, _times(one), first.fusion, code(first.reason, whole=True), why, at])
    if len(groups) > ROWS:
        rows.append([soft(f"… and {len(groups) - ROWS} rows more; .to_frame() has all")])
    return table(
        "Refusals", ["module", "places", "fusion", "reason", "why not", "where"], rows, whole=(0, 1, 2, 3, 5)
    )


@as_html.register
def _(site: Site) -> Html:
    state = ink("good", tag("b", "applied")) if site.applied else soft("not applied")
    head = line(tag("b", code(site.name or "(the model itself)")), "  ", tag("b", site.fusion), "  ", state)
    merged = code(", ".join(site.parts)) if site.parts else "no linears"
    rows: list[list[object]] = [["class", site.type_name], ["parts, in row order", merged]]
    rows += [
        [f"{role} under tensor parallelism", code(", ".join(paths))] for role, paths in _by_role(site).items()
    ]
    diff = _diff_fold(Group((site.name,), (site,)), open_=True)
    return many(head, table("Site", ["what", "value"], rows), diff)


@as_html.register
def _(refusal: Refusal) -> Html:
    rows: list[list[object]] = [
        ["module", code(refusal.name or "(the model itself)")],
        ["fusion", refusal.fusion],
        ["reason", code(refusal.reason)],
        ["why not", sentence(refusal)],
    ]
    if refusal.parts:
        rows.append(["parts", code(", ".join(refusal.parts))])
    if refusal.path:
        rows.append(["where", code(f"{shown_path(refusal.path)}:{refusal.line}")])
    return table("Refusal", ["what", "value"], rows)
