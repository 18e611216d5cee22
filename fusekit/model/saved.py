"""A plan that outlives its process: a file to read, to keep under version control and to compare with."""

import itertools
import json
import os
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn as nn

from fusekit.errors import FusekitError
from fusekit.forward import original_class
from fusekit.model.plan import Plan
from fusekit.shown import Shown

if TYPE_CHECKING:
    import pandas

FORMAT = 1  # of the file; one that is written by a later format is not read
MOST_NAMES = 1_000_000  # that one entry of a file may stand for
COLUMNS = ("name", "type", "fusion", "parts", "state", "reason", "message", "path", "line")


@dataclass(frozen=True, repr=False)
class SavedSite(Shown):
    """A `Site` without its module: what a file keeps of it.

    `path` does not depend on the machine (`transformers/models/llama/modeling_llama.py`); it and
    `line` are None where there is no source.
    """

    name: str
    type_name: str
    fusion: str
    parts: tuple[str, ...]
    path: str | None
    line: int | None
    applied: bool = False


@dataclass(frozen=True, repr=False)
class SavedRefusal(Shown):
    """A `Refusal` with the name of its module's class; its reason may be one this version does not know."""

    name: str
    type_name: str
    fusion: str
    parts: tuple[str, ...]
    reason: str
    message: str
    path: str | None
    line: int | None


@dataclass(frozen=True, repr=False)
class SavedPlan(Shown):
    """A plan without its model. It cannot be applied: `fk.compare` tells how another plan differs.

    `fusions` are those that were looked for, `versions` pairs of package and version.
    """

    model_name: str
    sites: tuple[SavedSite, ...]
    refusals: tuple[SavedRefusal, ...]
    applied: tuple[SavedSite, ...]
    scope: str = ""
    fusions: tuple[str, ...] = ()
    versions: tuple[tuple[str, str], ...] = ()

    def to_frame(self) -> "pandas.DataFrame":
        """One row a site or refusal, with the columns of `Plan.to_frame` but `roles`."""
        import pandas as pd

        rows = []
        every: tuple[SavedSite | SavedRefusal, ...] = (*self.sites, *self.applied, *self.refusals)
        for one in every:
            row = {"name": one.name, "type": one.type_name, "fusion": one.fusion}
            row["parts"] = ", ".join(one.parts)
            if isinstance(one, SavedSite):
                rest: tuple[Any, ...] = ("applied" if one.applied else "site", "", "")
            else:
                rest = ("refused", one.reason, one.message)
            rows.append((*row.values(), *rest, one.path or "", one.line or 0))
        return pd.DataFrame(rows, columns=list(COLUMNS))


def saved(plan: Plan) -> SavedPlan:
    """What a file keeps of `plan`, sorted by name."""

    def site(one: Any) -> SavedSite:
        path = portable(one.analysis.source.path) if one.analysis.source else None
        line = one.match.line if path else None
        return SavedSite(one.name, one.type_name, one.fusion, tuple(one.parts), path, line, one.applied)

    def refusal(one: Any) -> SavedRefusal:
        path = portable(one.path) if one.path else None
        kind = _type_at(plan.model, one.name)
        said = one.message.replace(one.path, path) if path else one.message
        said = re.sub(r" at 0x[0-9a-fA-F]+", "", said)  # an address is another each time
        return SavedRefusal(one.name, kind, one.fusion, tuple(one.parts), one.reason, said, path, one.line)

    return SavedPlan(
        plan.model_name,
        tuple(sorted(map(site, plan.sites), key=_order)),
        tuple(sorted(map(refusal, plan.refusals), key=_order)),
        tuple(sorted(map(site, plan.applied), key=_order)),
        plan.scope,
        tuple(plan.fusions),
        _versions(),
    )


def _type_at(model: nn.Module, name: str) -> str:
    try:
        return original_class(model.get_submodule(name)).__name__
    except AttributeError:
        raise FusekitError(
            f"there is no module {name!r} any more in this {type(model).__name__}: plan again"
        ) from None


def _versions() -> tuple[tuple[str, str], ...]:
    from fusekit import __version__

    found = [("fusekit", __version__), ("torch", str(torch.__version__))]
    if "transformers" in sys.modules:
        found.append(("transformers", str(getattr(sys.modules["transformers"], "__version__", "unknown"))))
    return tuple(found)


def portable(path: str) -> str:
    """`path` without what differs from machine to machine: from its outermost package on."""
    parts = path.replace(os.sep, "/").split("/")
    for folder in ("site-packages", "dist-packages"):
        if folder in parts:
            return "/".join(parts[len(parts) - parts[::-1].index(folder) :])
    if "transformers_modules" in parts:  # where Transformers keeps a copy of a config's own code
        return "/".join(parts[parts.index("transformers_modules") :])
    first = len(parts) - 1
    while first > 1 and os.path.isfile("/".join([*parts[:first], "__init__.py"])):
        first -= 1
    return "/".join(parts[first:])


# -- writing ----------------------------------------------------------------------------------


def save(plan: Plan | SavedPlan, path: str | Path) -> Path:
    """Write `plan`; see `Plan.save`."""
    kept = plan if isinstance(plan, SavedPlan) else saved(plan)
    path = Path(path)
    try:
        path.write_text(as_json(kept), encoding="utf-8", newline="\n")
    except OSError as error:
        raise FusekitError(
            f"the plan cannot be written to {path} ({error.strerror or error}): name a file in a folder that "
            "is there and may be written to"
        ) from None
    return path


def as_json(plan: SavedPlan) -> str:
    """The file's text: the same for equal plans; modules that differ in nothing but a name share an entry."""
    data = {
        "fusekit_plan": FORMAT,
        **dict(plan.versions),
        "model": plan.model_name,
        "scope": plan.scope,
        "fusions": list(plan.fusions),
        "sites": _entries(plan.sites, _site_fields),
        "applied": _entries(plan.applied, _site_fields),
        "refusals": _entries(plan.refusals, _refusal_fields),
    }
    return json.dumps(data, indent=2) + "\n"


def _site_fields(site: Any) -> dict[str, Any]:
    return {
        "type": site.type_name,
        "fusion": site.fusion,
        "parts": list(site.parts),
        "path": site.path,
        "line": site.line,
    }


def _refusal_fields(refusal: Any) -> dict[str, Any]:
    said = refusal.message
    if refusal.name and said.startswith(f"{refusal.name}: "):
        said = "{module}" + said[len(refusal.name) :]
    fields = _site_fields(refusal)
    where = {"path": fields.pop("path"), "line": fields.pop("line")}
    return fields | {"reason": refusal.reason, "message": said} | where


def _entries(items: Sequence[Any], fields: Callable[[Any], dict[str, Any]]) -> list[dict[str, Any]]:
    """Entries in the order of their first module, each with every module that shares its fields."""
    found: dict[str, tuple[dict[str, Any], list[str]]] = {}
    for item in sorted(items, key=_order):
        entry = fields(item)
        found.setdefault(json.dumps(entry), (entry, []))[1].append(item.name)
    return [{"modules": folded(names), **entry} for entry, names in found.values()]


def _order(item: SavedSite | SavedRefusal) -> tuple[Any, ...]:
    """By path, numbers in it by their value."""
    words = tuple((0, int(w), w) if _is_number(w) else (1, 0, w) for w in item.name.split("."))
    last = (item.reason, item.message) if isinstance(item, SavedRefusal) else ()
    return (words, item.fusion, item.parts, item.line or 0, last)


def _is_number(word: str) -> bool:
    return word.isascii() and word.isdigit() and len(word) < 10


def folded(names: Iterable[str]) -> list[str]:
    """Paths in short: `layers.0.mlp` to `layers.3.mlp` are `layers.{0-3}.mlp`; `unfolded` gives them back.

    A brace in a name is doubled.
    """
    from fusekit.display.groups import group

    def word(part: str | tuple[int, ...]) -> str:
        if isinstance(part, str):
            return part.replace("{", "{{").replace("}", "}}")
        return str(part[0]) if len(part) == 1 else "{" + _runs(part) + "}"

    same = group(names, lambda name: name, lambda name: None)
    return [".".join(map(word, one.parts)) for one in same]


def _runs(numbers: Sequence[int]) -> str:
    """Sorted numbers as 0-3,7."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


_RANGES = re.compile(r"\{(\d{1,9}(?:-\d{1,9})?(?:,\d{1,9}(?:-\d{1,9})?)*)\}")


def unfolded(text: str) -> list[str]:
    """Every path that `text` stands for. Raises `ValueError` where that is more than `MOST_NAMES`."""
    choices: list[Sequence[str]] = []
    number = 1
    for word in text.split("."):
        ranges = _RANGES.fullmatch(word)
        if not ranges:
            choices.append([word.replace("{{", "{").replace("}}", "}")])
            continue
        runs = [run.partition("-") for run in ranges[1].split(",")]
        spans = [range(int(first), int(last or first) + 1) for first, _, last in runs]
        number *= sum(map(len, spans))
        if number > MOST_NAMES:
            raise ValueError(f"{text!r} stands for more than {MOST_NAMES} modules")
        choices.append([str(n) for span in spans for n in span])
    return [".".join(path) for path in itertools.product(*choices)]


# -- reading ----------------------------------------------------------------------------------


class _Broken(Exception):
    """What is wrong with an entry."""


def load_plan(path: str | Path) -> SavedPlan:
    """The plan that `plan.save(path)` wrote.

    Raises `FusekitError` for a file that is not there, is no plan, was written by a newer format,
    or was broken since.
    """
    if not isinstance(path, str | os.PathLike):
        raise FusekitError(f"load_plan() takes the path of a file, not {type(path).__name__}")
    path = Path(path)
    data = _read(path)
    if not isinstance(data, dict) or "fusekit_plan" not in data:
        raise FusekitError(
            f'{path} is JSON, but no plan of fusekit (it has no "fusekit_plan"): name a file that '
            "plan.save() wrote"
        )
    number = data["fusekit_plan"]
    if type(number) is not int or number < 1:
        raise FusekitError(f'{path}: "fusekit_plan" is {number!r}, not the number of a format; {_AGAIN}')
    if number > FORMAT:
        raise FusekitError(
            f"{path} was written by a newer fusekit ({_said(data.get('fusekit'))}, format {number}); this "
            f"one reads formats up to {FORMAT}: upgrade fusekit, or save the plan again with this one"
        )
    try:
        return SavedPlan(
            _text(data, "model"),
            tuple(_loaded(data, "sites", _site)),
            tuple(_loaded(data, "refusals", _refusal)),
            tuple(_loaded(data, "applied", _applied)),
            _text(data, "scope", ""),
            _texts(data, "fusions", []),
            tuple((name, _text(data, name)) for name in ("fusekit", "torch", "transformers") if name in data),
        )
    except _Broken as error:
        raise FusekitError(f"{path}: {error}; {_AGAIN}") from None


_AGAIN = "the file was changed by hand or cut short: save the plan again"


def _said(version: Any) -> str:
    return version if isinstance(version, str) else "of unknown version"


def _read(path: Path) -> Any:
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise FusekitError(
            f"there is no file {path}: plan.save({str(path)!r}) writes one, and --save on the command line"
        ) from None
    except OSError as error:
        raise FusekitError(
            f"{path} cannot be read ({error.strerror or error}): name a file that plan.save() wrote"
        ) from None
    except UnicodeDecodeError:
        raise FusekitError(f"{path} is not text: name a file that plan.save() wrote") from None
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        if re.search("^<{7} ", text, re.MULTILINE):
            raise FusekitError(
                f"{path} holds the marks of an unresolved merge: resolve it, or save the plan again"
            ) from None
        said = f"{error.msg}, line {error.lineno}" if isinstance(error, json.JSONDecodeError) else str(error)
        raise FusekitError(
            f"{path} is not JSON ({said}): name a file that plan.save() wrote, or save the plan again if "
            "this one was cut short"
        ) from None


def _loaded(data: dict[str, Any], key: str, read: Callable[[dict[str, Any], str], Any]) -> list[Any]:
    entries = data.get(key)
    if not isinstance(entries, list):
        raise _Broken(f'"{key}" is not a list' if key in data else f'it has no "{key}"')
    found: list[Any] = []
    for number, entry in enumerate(entries):
        try:
            if not isinstance(entry, dict):
                raise _Broken("is not an object")
            names = [name for text in _texts(entry, "modules") for name in unfolded(text)]
            if len(found) + len(names) > MOST_NAMES:
                raise _Broken(f"brings it to more than {MOST_NAMES} modules")
            found += [read(entry, name) for name in names]
        except (_Broken, ValueError) as error:
            raise _Broken(f"{key}[{number}] {error}") from None
    return sorted(found, key=_order)


def _site(entry: dict[str, Any], name: str, applied: bool = False) -> SavedSite:
    path, line = _where(entry)
    return SavedSite(
        name, _text(entry, "type"), _text(entry, "fusion"), _texts(entry, "parts"), path, line, applied
    )


def _applied(entry: dict[str, Any], name: str) -> SavedSite:
    return _site(entry, name, True)


def _refusal(entry: dict[str, Any], name: str) -> SavedRefusal:
    path, line = _where(entry)
    said = _text(entry, "message")
    if name and said.startswith("{module}: "):
        said = name + said.removeprefix("{module}")
    kind, fusion = _text(entry, "type"), _text(entry, "fusion")
    return SavedRefusal(name, kind, fusion, _texts(entry, "parts"), _text(entry, "reason"), said, path, line)


def _where(entry: dict[str, Any]) -> tuple[str | None, int | None]:
    path, line = entry.get("path"), entry.get("line")
    if path is not None and not isinstance(path, str):
        raise _Broken('has a "path" that is not a text')
    if line is not None and type(line) is not int:
        raise _Broken('has a "line" that is not a number')
    return path, line


def _text(entry: dict[str, Any], key: str, default: str | None = None) -> str:
    found = entry.get(key, default)
    if not isinstance(found, str):
        raise _Broken(f'has a "{key}" that is not a text' if key in entry else f'has no "{key}"')
    return found


def _texts(entry: dict[str, Any], key: str, default: list[str] | None = None) -> tuple[str, ...]:
    found = entry.get(key, default)
    if not isinstance(found, list) or not all(isinstance(one, str) for one in found):
        raise _Broken(f'has a "{key}" that is not a list of texts' if key in entry else f'has no "{key}"')
    return tuple(found)
