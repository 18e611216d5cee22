"""Which file draws which type: two single-dispatch functions, filled on demand.

A type's file is imported when the first object of that type is shown, so showing a trace imports
neither the planner nor what draws plans, and a room that fails to import spoils only its own
pictures. To draw a new type, register a function with `as_text` and one with `as_html`; when it is
a type of fusekit, in a file of this package that is named in `FILES`.
"""

import dataclasses
import importlib
from functools import singledispatch

from fusekit.display.markup import Html, clip, table
from fusekit.shown import Shown

FILES = {
    ("fusekit", "Trace"): "trace",
    ("fusekit", "ForwardSource"): "source",
    ("fusekit", "SourceDiff"): "diff",
    ("fusekit", "AliasReport"): "aliasing",
    ("fusekit", "Plan"): "plan",
    ("fusekit", "SavedPlan"): "saved",
    ("fusekit", "SavedSite"): "saved",
    ("fusekit", "SavedRefusal"): "saved",
    ("fusekit", "PlanChanges"): "changes",
    ("fusekit", "Change"): "changes",
    ("fusekit", "Site"): "site",
    ("fusekit", "Fused"): "plan",
    ("fusekit", "Refusal"): "site",
    ("fusekit", "VerifyReport"): "verify",
    ("torch", "Graph"): "foreign",
    ("torch", "GraphModule"): "foreign",
    ("torch", "ExportedProgram"): "foreign",
}


def load(kind: type) -> None:
    """Import the file that draws `kind`, if there is one."""
    for base in kind.__mro__:
        file = FILES.get((base.__module__.partition(".")[0], base.__name__))
        if file:
            importlib.import_module(f"fusekit.display.{file}")
            return


@singledispatch
def as_text(obj: object) -> str:
    """Plain text of `obj`. Register a function per type."""
    return "\n".join([_title(obj), *(f"  {name}: {value}" for name, value in _fields(obj))])


@singledispatch
def as_html(obj: object) -> Html:
    """Html of `obj`, without the surrounding style. Register a function per type."""
    return table(_title(obj), ["field", "value"], [[name, value] for name, value in _fields(obj)])


def _title(obj: object) -> str:
    """For a type nobody draws: its own repr where it has one that is not ours and holds no address."""
    kind = type(obj)
    if kind.__repr__ in (object.__repr__, Shown.__repr__):
        return kind.__name__
    return clip(repr(obj), 4000)


def _fields(obj: object) -> list[tuple[str, str]]:
    if not dataclasses.is_dataclass(obj) or isinstance(obj, type):
        return []
    return [(f.name, _brief(getattr(obj, f.name, None))) for f in dataclasses.fields(obj) if f.repr]


def _brief(value: object) -> str:
    if isinstance(value, str | int | float | bool | None):
        return clip(str(value), 200)
    if isinstance(value, tuple | list | set | dict):
        return f"{len(value)} in a {type(value).__name__}"
    return type(value).__name__
