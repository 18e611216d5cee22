"""A verify report: the verdict, the checks with the worst of each kind first, what was not run."""

from collections.abc import Sequence
from math import isfinite

from fusekit.display.dispatch import as_html, as_text
from fusekit.display.markup import Html, code, columns, count, fold, line, many, pre, soft, table, tag
from fusekit.display.theme import TINTS, verdict
from fusekit.model import Check, LayerError, NotRun, VerifyReport

SHOWN = 20  # failed checks of one kind before the rest is folded
FOLDED = 400  # rows behind one fold


def worst_first(checks: Sequence[Check]) -> list[Check]:
    """Failed ones first, then by how many times the unfused error the fused one is."""
    return sorted(checks, key=lambda check: (check.ok, -_ratio(check)))


def _ratio(check: Check) -> float:
    if check.fused_max is None or check.unfused_max is None:
        return 0.0
    return check.fused_max / max(check.unfused_max, 1e-30)


def split(checks: Sequence[Check]) -> list[tuple[str, list[Check], list[Check]]]:
    """By kind: its name, the checks to show (every failed one, else the worst), and the rest."""
    kinds: dict[tuple[str, str], list[Check]] = {}
    for check in checks:
        kinds.setdefault((check.what, check.fusion), []).append(check)
    out = []
    for (what, fusion), some in kinds.items():
        order = worst_first(some)
        bad = sum(not check.ok for check in order)
        top = min(max(bad, 1), SHOWN)
        name = f"{what} {fusion}".strip()
        out.append((name, order[:top], order[top:]) if len(order) > 3 else (name, order, []))
    return out


def number(value: float | None) -> str:
    return "" if value is None else f"{value:.2g}" if value else "0"


def _verdict(report: VerifyReport) -> str:
    if not report.checks:
        return "nothing was checked"
    if report.ok:
        return "fused equals unfused within what float64 allows: ok"
    bad = [check for check in report.checks if not check.ok]
    if not bad:
        missing = ", ".join(dict.fromkeys(one.what for one in report.not_run if not one.excused))
        return f"UNDECIDED: every check that ran passed, but some could not be run ({missing})"
    what = dict.fromkeys(check.what for check in bad)
    return f"FAILED: {len(bad)} of {count(len(report.checks), 'check')} ({', '.join(what)})"


def _about(report: VerifyReport) -> str:
    return f"{count(report.sites, 'site')} fused, {report.dtype} on {report.device}, {report.inputs}"


def _bits(check: Check) -> str:
    return {True: "yes", False: "no", None: ""}[check.same_bits]


# ---- text ----


def _cells(check: Check) -> list[str]:
    state = "ok" if check.ok else "FAILED"
    name = check.name or ("" if check.what == "site" else "the model")
    return [state, f"{check.what} {check.fusion}".strip(), name, check.detail]


@as_text.register
def _(report: VerifyReport) -> str:
    lines = [f"{report.model_name}: {_verdict(report)}", f"  {_about(report)}"]
    rows, more = [], 0
    for _, shown, rest in split(report.checks):
        rows += [_cells(check) for check in shown]
        more += len(rest)
    lines += columns(rows, [0, 24, 44, 110], "    ")
    if more:
        lines.append(
            f"    ... and {count(more, 'more check')}, none further from unfused; .to_frame() has all"
        )
    if report.layers:
        last = report.layers[-1]
        errors = f"fused {number(last.fused_max)}, unfused {number(last.unfused_max)}"
        lines.append(f"  largest error after {last.name}: {errors}")
    for one in report.not_run:
        lines.append(f"  {'left out' if one.excused else 'NOT RUN'}: {one.what}: {one.reason}")
    return "\n".join(lines)


# ---- html ----

HEAD = [
    "check",
    "",
    "of",
    "largest error: fused",
    "unfused",
    "rms: fused",
    "unfused",
    "same bits",
    "what it says",
]


def _row(check: Check) -> list[object]:
    name: object = code(check.name) if check.name else soft("the model")
    errors = [check.fused_max, check.unfused_max, check.fused_rms, check.unfused_rms]
    kind = f"{check.what} {check.fusion}".strip()
    return [kind, verdict(check.ok), name, *map(number, errors), _bits(check), check.detail]


def _checks(report: VerifyReport) -> Html:
    shown: list[list[object]] = []
    folds: list[Html] = []
    for name, top, rest in split(report.checks):
        shown += [_row(check) for check in top]
        if rest:
            tail = soft(f"{len(rest) - FOLDED} more in .to_frame()") if len(rest) > FOLDED else ""
            good = "all ok" if all(check.ok for check in rest) else "with failures"
            lines = columns([_cells(check) for check in rest[:FOLDED]], [0, 24, 80, 110], "")
            body = many(pre("\n".join(lines)), tail)  # a tenth of a table's bytes
            folds.append(fold(f"{name}: {len(rest)} more, none further from unfused, {good}", body))
    return many(
        table("Checks against float64, of each kind those furthest from unfused", HEAD, shown), *folds
    )


def _bar(value: float, largest: float, tint: str) -> Html:
    share = value / largest if largest > 0 and isfinite(value) else float(not isfinite(value))
    width = round(120 * share)
    return tag("div", "", f"width:{max(width, 1)}px;height:6px;margin:2px 0;background:{TINTS[tint]}")


def _layers(layers: Sequence[LayerError]) -> Html:
    if not layers:
        return Html("")
    errors = [error for one in layers for error in (one.fused_max, one.unfused_max)]
    largest = max(filter(isfinite, errors), default=0.0)
    rows: list[list[object]] = []
    for one in layers:
        bars = many(_bar(one.unfused_max, largest, "bar-unfused"), _bar(one.fused_max, largest, "bar-fused"))
        cells = [one.unfused_max, one.fused_max, one.unfused_rms, one.fused_rms]
        rows.append([code(one.name), *map(number, cells), bars])
    head = ["after", "largest error: unfused", "fused", "rms: unfused", "fused", "bars: unfused above fused"]
    body = table("", head, rows)
    return fold(f"Error down the depth, {count(len(layers), 'layer')}", body, open_=len(layers) <= 12)


def _not_run(left: Sequence[NotRun]) -> Html:
    if not left:
        return Html("")
    rows: list[list[object]] = [
        [one.what, one.reason, "left out" if one.excused else tag("b", "could not run")] for one in left
    ]
    return table("Not run", ["what", "why", ""], rows)


@as_html.register
def _(report: VerifyReport) -> Html:
    good = bool(report.ok and report.checks)
    said = verdict(good, _verdict(report), _verdict(report))
    return many(
        line(tag("b", report.model_name), "  ", said),
        line(soft(_about(report))),
        _checks(report) if report.checks else table("Checks", [], [["No check was run."]]),
        _layers(report.layers),
        _not_run(report.not_run),
    )
