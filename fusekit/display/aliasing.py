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
from fusekit.tracing import AliasReport, AliasSet, Evidence, Write


def seen(observed: bool | None) -> str:
    """What the run on meta tensors says."""
    return {True: "yes", False: "no", None: "not run"}[observed]


def _seen(found: Evidence | Write) -> str:
    return f"{seen(found.observed)}: {found.not_run}" if found.not_run else seen(found.observed)


def _seen_html(found: Evidence | Write) -> Html:
    return ink("name", tag("b", seen(True))) if found.observed else soft(_seen(found))


def _why(evidence: Evidence) -> str:
    at = f"line {evidence.line}: " if evidence.line else ""
    text = clip(evidence.text, 60)
    if not evidence.rule:
        return f"{at}{evidence.kind}: {text}"
    return f"{at}{text}: {evidence.rule}" if text else f"{at}{evidence.rule}"


def _names(names: tuple[str, ...]) -> str:
    return ", ".join(names)


def _shared(report: AliasReport) -> list[AliasSet]:
    return [one for one in report.sets if len(one.names) > 1]


def _alone(report: AliasReport) -> tuple[str, ...]:
    """Names that share with none anywhere; one that shares at some point of the forward is left out."""
    shared = {name for one in _shared(report) for name in one.names}
    return tuple(dict.fromkeys(name for one in report.sets for name in one.names if name not in shared))


def _until(report: AliasReport) -> str:
    """What the text says holds behind the place where the run stopped, too."""
    known = report.source is not None and report.failed is None
    return " up to there" if report.stopped and not known else ""


def _sure(report: AliasReport) -> list[Write]:
    return [write for write in report.writes if write.surely]


def _unsure(report: AliasReport) -> list[Write]:
    return [write for write in report.writes if not write.surely]


def _written(write: Write) -> tuple[str, ...]:
    """The names that a write may change, and what no name holds in brackets."""
    return (*write.names, *(f"({what})" for what in write.elsewhere))


def _title(report: AliasReport) -> str:
    sets = count(len(_shared(report)), "alias set")
    sure, unsure = _sure(report), _unsure(report)
    writes = count(len(sure), "write") if sure else "writes nothing"
    if unsure:
        writes += f"{'' if sure else ' for certain'}, {count(len(unsure), 'more place')} may"
    return f"{sets}, {writes}{_until(report)}"


FAILED = "There may be more than what stands here: the text could not be followed to its end: "


@as_text.register
def _(report: AliasReport) -> str:
    lines = [f"{report.name}: {_title(report)}"]
    if report.source:
        lines[0] += f"  ({place(report.source.path, report.source.line)})"
    if report.stopped:
        lines.append(f"  {stop_text(report.stopped)}")
    if report.failed:
        lines.append(f"  {FAILED}{report.failed}")
    rows = []
    for n, one in enumerate(_shared(report), 1):
        why: tuple[Evidence | None, ...] = one.evidence or (None,)
        for i, step in enumerate(why):
            head = [str(n), _names(one.names)] if i == 0 else ["", ""]
            rows.append([*head, *([_why(step), _seen(step)] if step else ["no step is known", ""])])
    if rows:
        lines += columns([["set", "may share storage", "why", "seen on meta"], *rows], [0, 48, 130, 60])
    else:
        lines.append(f"  no two names share storage{_until(report)}")
    if _alone(report):
        lines.append(f"  share with no other name: {clip(_names(_alone(report)), 200)}")
    for title, writes in (("writes", _sure(report)), ("may write", _unsure(report))):
        if writes:
            found = [[str(w.line), w.text, _names(_written(w)), w.rule, _seen(w)] for w in writes]
            heads = ["line", title, "seen by", "why", "seen on meta"]
            lines += ["", *columns([heads, *found], [0, 50, 48, 70, 60])]
    if not _sure(report):
        lines.append(f"  writes nothing{_until(report)}{' for certain' if report.writes else ''}")
    lines += [f"  {note}" for note in report.notes]
    return "\n".join([*lines, *assumptions_text(report.assumptions)])


@as_html.register
def _(report: AliasReport) -> Html:
    where = place(report.source.path, report.source.line) if report.source else "no source"
    return many(
        line(tag("b", report.name), "  ", _title(report), "  ", soft(where)),
        stop_notice(report.stopped),
        line(FAILED, report.failed) if report.failed else "",
        _sets(report),
        _writes(report),
        *(line(soft(note)) for note in report.notes),
        line(
            soft(
                "What may be holds for every way through the forward. Seen on meta: whether a run on meta "
                "tensors shared, or wrote, the storage on its path."
            )
        ),
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
            text = _step_html(step) if step else soft("no step is known")
            at = str(step.line) if step and step.line else ""
            rows.append(row_of([str(n) if i == 0 else "", names, at, text, _observed(step)], 5))
    head = ["set", "names that may share storage", "line", "why", "seen on meta"]
    return many(frame("Alias sets", head, rows), alone)


def _step_html(step: Evidence) -> Html:
    text = code(step.text) if step.text else ""
    return many(text, " ", soft(f"({step.kind})"), " ", soft(step.rule))


def _observed(step: Evidence | None) -> Html:
    return _seen_html(step) if step else Html("")


def _by_comma(names: tuple[str, ...]) -> list[object]:
    parts: list[object] = []
    for name in names:
        parts += [", ", code(name)] if parts else [code(name)]
    return parts


def _writes(report: AliasReport) -> Html:
    parts: list[Html] = []
    if not _sure(report):
        said = "" if report.stopped else " No statement of this forward is known to write a tensor."
        certain = " for certain" if report.writes else ""
        parts.append(line(tag("b", f"Writes nothing{_until(report)}{certain}."), soft(said)))
    head = ["line", "statement", "seen by", "why", "seen on meta"]
    for title, writes in (("Writes", _sure(report)), ("May write", _unsure(report))):
        rows = [
            [str(w.line), code(w.text), many(*_by_comma(_written(w))), soft(w.rule), _seen_html(w)]
            for w in writes
        ]
        if rows:
            parts.append(table(title, head, rows))
    return many(*parts)


def _marked(report: AliasReport) -> dict[int, str]:
    """Lines to mark in the source: `w` for a write, `=` for a step that joins names."""
    steps = {step.line: "= " for group in report.sets for step in group.evidence}
    return steps | {write.line: "w " for write in report.writes}
