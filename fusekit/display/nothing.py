"""A plan that finds nothing: what stood in the way most often, or what was looked for in vain."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch.nn as nn

from fusekit.display.markup import Html, code, columns, count, line, many, soft, table
from fusekit.display.site import sentence
from fusekit.display.source import place
from fusekit.display.theme import notice
from fusekit.forward import original_class
from fusekit.fusions import REASONS

REASONS_SHOWN = 5
KINDS_SHOWN = 5
_LINEARS = "several nn.Linear that read one value"
SOUGHT = {
    "qkv": _LINEARS,
    "kv": _LINEARS,
    "mla": _LINEARS,
    "columns": _LINEARS,
    "glu": "act(gate(x)) * up(x), of two nn.Linear or of one that is cut in two",
    "rms_norm": "an RMSNorm written out in a forward",
    "gated_rms_norm": "an RMSNorm written out, with act(gate) before or behind it",
}


def _reasons(refusals: Sequence[Any]) -> list[tuple[str, int, Any]]:
    """(reason, how often, the first refusal with it), most often first."""
    first: dict[str, Any] = {}
    for refusal in refusals:
        first.setdefault(refusal.reason, refusal)
    number = Counter(refusal.reason for refusal in refusals)
    return [(reason, times, first[reason]) for reason, times in number.most_common()]


def _example(refusal: Any) -> str:
    at = place(refusal.path, refusal.line)
    name = refusal.name or "the model itself"
    return f"{name}: {refusal.fusion}: {sentence(refusal)}" + (f" ({at})" if at else "")


def _meaning(reason: str) -> str:
    return REASONS.get(reason, "")


def _sought(fusions: Sequence[str]) -> list[list[str]]:
    """[fusions, what they are found by], one row for those that are found alike."""
    found: dict[str, list[str]] = {}
    for fusion in fusions:
        found.setdefault(SOUGHT.get(fusion, "a fusion of your own"), []).append(fusion)
    return [[", ".join(names), what] for what, names in found.items()]


def _made_of(module: Any, fusions: Sequence[str]) -> str:
    """What the model is made of instead, in words: the classes of its innermost modules."""
    if not isinstance(module, nn.Module):
        return ""
    inner = [one for one in module.modules() if not any(True for _ in one.children())]
    kinds = Counter(original_class(one).__name__ for one in inner).most_common()
    said = ", ".join(f"{number} {kind}" for kind, number in kinds[:KINDS_SHOWN])
    if len(kinds) > KINDS_SHOWN:
        said += f" and {count(len(kinds) - KINDS_SHOWN, 'other class', 'other classes')}"
    merges = [fusion for fusion in fusions if "nn.Linear" in SOUGHT.get(fusion, "")]
    if merges and not any(isinstance(one, nn.Linear) for one in inner):
        said += "; it has no nn.Linear, and only those are merged"
    return f"it is made of {said}"


def _heads(name: str, refusals: Sequence[Any]) -> tuple[str, str]:
    if refusals:
        looks = "looks fusable and was refused" if len(refusals) == 1 else "look fusable and were refused"
        return f"nothing to fuse in {name}", f"{count(len(refusals), 'place')} {looks}, for"
    return f"nothing to fuse in {name}", "nothing looks like one of these, so nothing was refused either"


def nothing_text(name: str, refusals: Sequence[Any], fusions: Sequence[str], module: Any = None) -> list[str]:
    """Lines for a terminal; `module` is what was planned, where it is there."""
    head, why = _heads(name, refusals)
    lines = [f"  {head}: {why}"]
    if not refusals:
        made = _made_of(module, fusions)
        return [*lines, *columns(_sought(fusions), [40, 60], "    "), *([f"    {made}"] if made else [])]
    reasons = _reasons(refusals)
    for reason, times, first in reasons[:REASONS_SHOWN]:
        lines.append(f"    {times} × [{reason}] {_meaning(reason)}".rstrip())
        lines += columns([[f"such as {_example(first)}"]], [150], "        ")
    if len(reasons) > REASONS_SHOWN:
        lines.append(f"    ... and {count(len(reasons) - REASONS_SHOWN, 'reason')} more; .to_frame() has all")
    return lines


def nothing_html(name: str, refusals: Sequence[Any], fusions: Sequence[str], module: Any = None) -> Html:
    """The same as a notice and a table."""
    head, why = _heads(name, refusals)
    note = notice(f"{head[0].upper()}{head[1:]}: {why}{'.' if not refusals else ':'}")
    if not refusals:
        rows: list[list[object]] = [[names, what] for names, what in _sought(fusions)]
        made = _made_of(module, fusions)
        below = line(soft(f"{made[0].upper()}{made[1:]}.")) if made else Html("")
        return many(note, table("Looked for", ["fusion", "found by"], rows, whole=(0,)), below)
    reasons = _reasons(refusals)
    rows = [
        [code(reason, whole=True), str(times), _meaning(reason), _example(first)]
        for reason, times, first in reasons[:REASONS_SHOWN]
    ]
    if len(reasons) > REASONS_SHOWN:
        rows.append([soft(f"… and {count(len(reasons) - REASONS_SHOWN, 'reason')} more")])
    return many(note, table("Why not", ["reason", "places", "what it means", "such as"], rows, whole=(0, 1)))
