"""`plan(model)`: every site and refusal of a model, with nothing changed."""

import functools
import inspect
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn as nn

from fusekit.errors import FusekitError
from fusekit.forward import SourceDiff, edited_text, original_class
from fusekit.forward.once import nothing_changes
from fusekit.fusions import FUSIONS, Analysis, Match, Objection, Refusal, analyse, own_fusions
from fusekit.model.binding import applied_matches
from fusekit.model.checks import Uses, refusal_from, refusal_of
from fusekit.model.selection import Selection, did_you_mean
from fusekit.shown import Shown
from fusekit.tracing import AliasReport, Assumption, Trace, aliasing
from fusekit.tracing.inputs import Inputs, inputs_of_modules

if TYPE_CHECKING:
    import pandas

    from fusekit.model.apply import Fused
    from fusekit.model.parallel import Role
    from fusekit.model.verify import VerifyReport


@dataclass(frozen=True, repr=False, eq=False)
class Site(Shown):
    """One place in a model where one fusion applies.

    `name` is the path of its module ("" for the model itself); `parts` are the merged linears,
    relative to it, in the order of their rows (qkv: query, key, value; kv: key, value; mla: that of the
    query, that of key and value; each then others of the same input; glu: gate, up; none for a norm).
    `applied` says whether it was applied when the plan was made.
    """

    name: str
    fusion: str
    parts: tuple[str, ...]
    module: nn.Module
    match: Match
    analysis: Analysis
    applied: bool = False

    @property
    def type_name(self) -> str:
        """The name of its module's class."""
        return original_class(self.module).__name__

    @property
    def title(self) -> str:
        return f"{self.name or self.type_name}: {self.fusion}"

    @functools.cached_property
    def diff(self) -> SourceDiff:
        """The forward before and after this one site; `str()` of it is a unified diff."""
        source = self.analysis.source
        assert source is not None
        after = edited_text(source, self.match.edits)
        return SourceDiff(source.text, after, source.path, source.line, self.title)

    @property
    def trace(self) -> Trace:
        """The trace of the module's original forward that the site was found in."""
        assert self.analysis.trace is not None
        return self.analysis.trace

    @functools.cached_property
    def aliasing(self) -> AliasReport:
        """What may share storage in that forward."""
        return aliasing(self.module)

    @functools.cached_property
    def roles(self) -> "dict[str, Role]":
        """The role under tensor parallelism of its linears and of those that take their result.

        By path relative to the module: "column", "row" or "replicated", as `fusekit.model.parallel`
        finds them in the dataflow; empty for a norm.
        """
        from fusekit.model.parallel import roles_around

        return roles_around(self.trace, self.module, self.parts)


@dataclass(frozen=True, repr=False, eq=False)
class Plan(Shown):
    """All sites and refusals of a model; nothing is changed until `apply()`.

    `sites` can be applied, `refusals` say what almost could and why not, `applied` are the sites
    that already were when the plan was made. `plan["layers.0"]` is the part of it under a path.
    `fusions` are those that were looked for.
    """

    model: nn.Module
    sites: tuple[Site, ...]
    refusals: tuple[Refusal, ...]
    applied: tuple[Site, ...]
    scope: str = ""
    fusions: tuple[str, ...] = FUSIONS

    @property
    def model_name(self) -> str:
        return original_class(self.model).__name__

    @property
    def assumptions(self) -> tuple[Assumption, ...]:
        """What the traces behind the sites took for granted, each with the class it is about.

        A site holds for every value of what is assumed, or it is a refusal.
        """
        found = {
            Assumption(item.kind, f"{site.type_name}: {item.text}", item.line)
            for site in (*self.sites, *self.applied)
            if site.analysis.trace is not None
            for item in site.analysis.trace.assumptions
        }
        return tuple(sorted(found, key=lambda item: (item.text, item.line or 0)))

    def __getitem__(self, path: str) -> "Plan":
        """The plan of what lies under `path`; raises `FusekitError` for a path that does not exist."""
        if not isinstance(path, str):
            raise FusekitError(
                f"plan[{path!r}]: a plan is asked by the path of a module; use plan.sites[{path!r}]"
            )
        _module_at(self.model, path)

        def under(name: str) -> bool:
            return not path or name == path or name.startswith(path + ".")

        return replace(
            self,
            sites=tuple(site for site in self.sites if under(site.name)),
            refusals=tuple(refusal for refusal in self.refusals if under(refusal.name)),
            applied=tuple(site for site in self.applied if under(site.name)),
            scope=path,
        )

    def apply(self, model: nn.Module | None = None) -> "Fused":
        """Apply every site in place; the result reverts, and is a context manager that does.

        Nothing is changed if anything stands against it. Raises `FusekitError` when `model` is
        given and is not the model of the plan, when a module changed since the plan was made, or
        when a site is applied already.
        """
        from fusekit.model.apply import apply

        return apply(self, model)

    def verify(self, inputs: Any = None, **options: Any) -> "VerifyReport":
        """Check the fused model against float64; see `fusekit.model.verify.verify`."""
        from fusekit.model.verify import verify

        return verify(self, inputs, **options)

    def to_frame(self) -> "pandas.DataFrame":
        """One row a site or refusal: name, type, fusion, parts, roles, state, reason, message, path, line.

        `roles` are those of `Site.roles`, say "gate_proj: column, up_proj: column, down_proj: row".
        """
        import pandas as pd

        rows: list[dict[str, Any]] = []
        for site in (*self.sites, *self.applied):
            source = site.analysis.source
            rows.append(
                {
                    "name": site.name,
                    "type": site.type_name,
                    "fusion": site.fusion,
                    "parts": ", ".join(site.parts),
                    "roles": ", ".join(f"{path}: {role}" for path, role in site.roles.items()),
                    "state": "applied" if site.applied else "site",
                    "reason": "",
                    "message": "",
                    "path": source.path if source else "",
                    "line": site.match.line,
                }
            )
        for refusal in self.refusals:
            rows.append(
                {
                    "name": refusal.name,
                    "type": original_class(_module_at(self.model, refusal.name)).__name__,
                    "fusion": refusal.fusion,
                    "parts": ", ".join(refusal.parts),
                    "roles": "",
                    "state": "refused",
                    "reason": refusal.reason,
                    "message": refusal.message,
                    "path": refusal.path or "",
                    "line": refusal.line or 0,
                }
            )
        columns = ["name", "type", "fusion", "parts", "roles", "state", "reason", "message", "path", "line"]
        return pd.DataFrame(rows, columns=columns)

    def to_html(self, path: str | Path) -> Path:
        """Write the plan as one html file that needs nothing else; returns its path."""
        from fusekit import display

        path = Path(path)
        path.write_text(display.page(self), encoding="utf-8")
        return path

    def save(self, path: str | Path) -> Path:
        """Write the plan as JSON that `fk.load_plan` reads and `fk.compare` compares; returns its path.

        The file is sorted, the same for equal plans on any machine, and holds no weights and no source.
        """
        from fusekit.model.saved import save

        return save(self, path)


def plan(
    model: nn.Module,
    inputs: Any = None,
    *,
    only: Iterable[str] | str | None = None,
    exclude: Iterable[str] | str = (),
    layers: Iterable[str] | str | None = None,
) -> Plan:
    """What can be fused in `model`, what almost can, and why not. Changes nothing.

    Needs neither weights nor example inputs, and works on the meta device. `inputs`, where given, are
    the keyword arguments that the model is called with (a dict), a tuple of positional ones, or a
    tensor; only shapes and dtypes count. Each module is then looked at with what it would be called
    with.

    `only` and `exclude` name fusions: `qkv`, `kv`, `mla`, `columns`, `glu`, `rms_norm`,
    `gated_rms_norm` and those registered with `@fusekit.fusion`. `layers` are patterns of module
    paths as in `fnmatch`; a pattern takes everything under what it matches. A module that is used in
    several places is named by the first, as `named_modules()` does.

    Raises `FusekitError` for a fusion that does not exist or a pattern that matches no module.
    """
    if not isinstance(model, nn.Module):
        raise FusekitError(f"plan() takes a module, not {type(model).__name__}: pass the model itself")
    chosen = Selection.of(model, only, exclude, layers)
    uses = Uses.of(model)
    sites: list[Site] = []
    refusals: list[Refusal] = []
    applied: list[Site] = []
    with nothing_changes():
        given = _inputs_by_module(model, inputs)
        analyses = {name: analyse(module, given.get(name)) for name, module in chosen.modules.items()}
    for name, analysis in analyses.items():
        module = chosen.modules[name]
        done = applied_matches(module)
        applied += [
            Site(name, match.fusion, match.parts, module, match, analysis, True)
            for match in done
            if chosen.takes(match.fusion)
        ]
        kept = list(done)
        for match in analysis.matches:
            if not chosen.takes(match.fusion) or match in done:
                continue
            refusal = refusal_of(name, module, analysis, match, uses)
            taken = next((other for other in kept if other.overlaps(match)), None)
            if taken and not refusal:
                refusal = refusal_from(name, module, analysis, _overlapping(match, taken))
            if refusal:
                refusals.append(refusal)
            else:
                kept.append(match)
                sites.append(Site(name, match.fusion, match.parts, module, match, analysis))
        for objection in analysis.objections:
            if chosen.takes(objection.fusion):
                refusals.append(refusal_from(name, module, analysis, objection))
    looked_for = tuple(fusion for fusion in (*FUSIONS, *own_fusions) if chosen.takes(fusion))
    return Plan(model, tuple(sites), tuple(_said_once(refusals)), tuple(applied), fusions=looked_for)


def _overlapping(match: Match, taken: Match) -> Objection:
    why = f"{taken.fusion} takes a part of it, or its place in the forward; exclude {taken.fusion} to have it"
    return Objection(match.fusion, "overlapping", why, match.line, match.parts)


def _said_once(refusals: list[Refusal]) -> list[Refusal]:
    """Without the merges of a gated product's linears that are refused for its activation, as that is."""
    products = {(r.name, r.line, frozenset(r.parts)) for r in refusals if r.fusion == "glu"}
    return [
        refusal
        for refusal in refusals
        if refusal.fusion != "columns"
        or refusal.reason != "input-may-be-written"
        or (refusal.name, refusal.line, frozenset(refusal.parts)) not in products
    ]


def _inputs_by_module(model: nn.Module, inputs: Any) -> dict[str, Inputs]:
    if inputs is None:
        return {}
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = {}
    if isinstance(inputs, Mapping):
        kwargs = dict(inputs)
    elif isinstance(inputs, (tuple, list)):
        args = tuple(inputs)
    elif isinstance(inputs, torch.Tensor):
        args = (inputs,)
    else:
        raise FusekitError(
            "plan(inputs=...) takes a dict of keyword arguments, a tuple or a tensor, not "
            f"{type(inputs).__name__}"
        )
    try:
        inspect.signature(model.forward).bind(*args, **kwargs)
    except TypeError as error:
        raise FusekitError(f"{type(model).__name__} cannot be called with these inputs: {error}") from None
    return inputs_of_modules(model, args, kwargs)


def _module_at(model: nn.Module, path: str) -> nn.Module:
    try:
        return model.get_submodule(path)
    except AttributeError:
        names = [name for name, _ in model.named_modules()]
        raise FusekitError(
            f"there is no module {path!r} in {type(model).__name__}{did_you_mean(path, names)}"
        ) from None
