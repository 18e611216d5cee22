"""Alias sets and writes: which names may share storage, why, and what a run on meta saw."""

from fusekit.display.dispatch import as_html, as_text
from fusekit.display.markup import (
    Html,
    clip,
    code,
    columns,
    count,
    frame,
    line,
    many,
    row_of,
    soft,
    table,
    tag,
)
from fusekit.display.source import folded_source, place
from fusekit.display.theme import ink
from fusekit.display.trace import assumptions_html, assumptions_text, stop_notice, stop_text
from fusekit.tracing import AliasReport, AliasSet, Evidence


def seen(observed: bool | None) -> str:
    """What the run on meta tensors says."""
    return {True: "yes", False: "no", None: "not run"}[observed]


def _seen_html(observed: bool | None) -> Html:
    word = tag("b", seen(observed)) if observed else soft(seen(observed))
    return ink("name", word) if observed else word


def _why(evidence: Evidence) -> str:
    at = f"line {evidence.line}: " if evidence.line else ""
    return f"{at}{evidence.kind}: {clip(evidence.text, 100)}"


def _names(names: tuple[str, ...]) -> str:
    return ", ".join(names)


def _shared(report: AliasReport) -> list[AliasSet]:
    return [one for one in report.sets if len(one.names) > 1]


def _alone(report: AliasReport) -> tuple[str, ...]:
    """Names that share with none anywhere; one that shares at some point of the forward is left out."""
    shared = {name for one in _shared(report) for name in one.names}
    return tuple(dict.fromkeys(name for one in report.sets for name in one.names if name not in shared))


def _until(report: AliasReport) -> str:
    return " up to there" if report.stopped else ""


def _title(report: AliasReport) -> str:
    sets = count(len(_shared(report)), "alias set")
    return (
        f"{sets}, {count(len(report.writes), 'write') if report.writes else 'writes nothing'}{_until(report)}"
    )


@as_text.register
def _(report: AliasReport) -> str:
    lines = [f"{report.name}: {_title(report)}"]
    if report.source:
        lines[0] += f"  ({place(report.source.path, report.source.line)})"
    if report.stopped:
        lines.append(f"  {stop_text(report.stopped)}")
    rows = []
    for n, one in enumerate(_shared(report), 1):
        why: tuple[Evidence | None, ...] = one.evidence or (None,)
        for i, step in enumerate(why):
            head = [str(n), _names(one.names)] if i == 0 else ["", ""]
            rows.append([*head, *([_why(step), seen(step.observed)] if step else ["no step is known", ""])])
    if rows:
        lines += columns([["set", "may share storage", "why", "seen on meta"], *rows], [0, 64, 90, 0])
    else:
        lines.append(f"  no two names share storage{_until(report)}")
    if _alone(report):
        lines.append(f"  share with no other name: {clip(_names(_alone(report)), 200)}")
    if report.writes:
        writes = [[str(w.line), w.text, _names(w.names), seen(w.observed)] for w in report.writes]
        lines += ["", *columns([["line", "write", "may write", "seen on meta"], *writes], [0, 60, 40, 0])]
    else:
        lines.append(f"  writes nothing{_until(report)}")
    return "\n".join([*lines, *assumptions_text(report.assumptions)])


@as_html.register
def _(report: AliasReport) -> Html:
    where = place(report.source.path, report.source.line) if report.source else "no source"
    return many(
        line(tag("b", report.name), "  ", _title(report), "  ", soft(where)),
        stop_notice(report.stopped),
        _sets(report),
        _writes(report),
        line(soft("Seen on meta: whether a run on meta tensors shared, or wrote, the storage on its path.")),
        assumptions_html(report.assumptions),
        folded_source(report.source, _marked(report)),
    )


def _sets(report: AliasReport) -> Html:
    alone = (
        many(line(soft("Share with no other name: "), *_by_comma(_alone(report)))) if _alone(report) else ""
    )
    if not _shared(report):
        said = f"No two names share storage{_until(report)}."
        return many(table("Alias sets", [], [[said]]), alone)
    rows = []
    for n, one in enumerate(_shared(report), 1):
        why: tuple[Evidence | None, ...] = one.evidence or (None,)
        for i, step in enumerate(why):
            names = many(*_by_comma(one.names)) if i == 0 else ""
            text = many(code(step.text), soft(f" ({step.kind})")) if step else soft("no step is known")
            at = str(step.line) if step and step.line else ""
            rows.append(row_of([str(n) if i == 0 else "", names, at, text, _observed(step)], 5))
    head = ["set", "names that may share storage", "line", "why", "seen on meta"]
    return many(frame("Alias sets", head, rows), alone)


def _observed(step: Evidence | None) -> Html:
    return _seen_html(step.observed) if step else Html("")


def _by_comma(names: tuple[str, ...]) -> list[object]:
    parts: list[object] = []
    for name in names:
        parts += [", ", code(name)] if parts else [code(name)]
    return parts


def _writes(report: AliasReport) -> Html:
    if not report.writes:
        said = "" if report.stopped else " No statement of this forward writes a tensor."
        return line(tag("b", f"Writes nothing{_until(report)}."), soft(said))
    rows = [
        [str(w.line), code(w.text), many(*_by_comma(w.names)), _seen_html(w.observed)] for w in report.writes
    ]
    return table("Writes", ["line", "statement", "may write", "seen on meta"], rows)


def _marked(report: AliasReport) -> dict[int, str]:
    """Lines to mark in the source: `w` for a write, `=` for a step that joins names."""
    steps = {step.line: "= " for group in report.sets for step in group.evidence}
    return steps | {write.line: "w " for write in report.writes}
