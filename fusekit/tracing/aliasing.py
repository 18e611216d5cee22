"""What may share storage in a forward, and what is written: two witnesses side by side.

The analysis of the text says what *may* alias and be written, on every way through the forward; the run
on meta tensors, where views share storage and version counters count, says what *did* on that path.
"""

import ast
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
import torch.nn as nn
from torch import fx

from fusekit.errors import FusekitError
from fusekit.forward import ForwardSource, Span, text_at
from fusekit.forward.effects import Effects, Region, Value
from fusekit.forward.reads import SEES_NAMES, global_names
from fusekit.shown import Shown
from fusekit.tracing.effects import UNEVALUATED, effects_of_trace
from fusekit.tracing.recorder import tensors_in
from fusekit.tracing.result import Assumption, Stopped, Trace
from fusekit.tracing.trace import run_trace

if TYPE_CHECKING:
    import pandas

    from fusekit.forward.effects import Effect

SEEN_ONLY = "seen on meta, and no rule says so"
UNSEEN = "the run saw no tensor there"
SEEN_GIVEN = "what was there before the forward shared storage in this run"


@dataclass(frozen=True)
class Evidence:
    """One step that joins names into a set.

    `kind` is `view` (a rule says so), `may be a view` (a composite operator, or code that is not known, may
    return what it was given), `same object`, `item` (of a container) or `seen only`. `rule` says it in
    words. `observed`: did the run on meta share storage here; where it is None, `not_run` says why.
    """

    line: int
    text: str
    kind: str
    observed: bool | None
    rule: str = ""
    not_run: str = ""


@dataclass(frozen=True)
class AliasSet:
    """Names of the forward that may share storage at some point of it, on some way through it."""

    names: tuple[str, ...]
    evidence: tuple[Evidence, ...]


@dataclass(frozen=True)
class Write:
    """An expression that writes into a tensor, and the names that may see it.

    `surely`: an operator writes; else code that is not known may. `elsewhere` says what else it may write
    that no name holds. `observed`: did the run on meta write here; where it is None, `not_run` says why.
    """

    line: int
    text: str
    names: tuple[str, ...]
    observed: bool | None
    rule: str = ""
    surely: bool = True
    elsewhere: tuple[str, ...] = ()
    not_run: str = ""


@dataclass(frozen=True, repr=False, eq=False)
class AliasReport(Shown):
    """Alias sets and writes of one forward, with the evidence.

    They hold for every way through the forward: also for arms that the run did not take, and for what
    stands behind the place where it stopped. `failed` says why the text could not be followed: then the
    sets and writes are those that are known, there may be others. `notes` are what no set can say.
    """

    name: str
    source: ForwardSource | None
    sets: tuple[AliasSet, ...]
    writes: tuple[Write, ...]
    stopped: Stopped | None
    assumptions: tuple[Assumption, ...]
    notes: tuple[str, ...] = ()
    failed: str | None = None

    def to_frame(self) -> "pandas.DataFrame":
        """One row a step or write: kind, names, line, text, evidence, rule, may, observed.

        `may` is `surely` for a write of an operator, else `may`; `observed` is True, False or None (not
        run: the rule of the row says why).
        """
        import pandas as pd

        rows: list[tuple[Any, ...]] = []
        for one in self.sets:
            names = ", ".join(one.names)
            for s in one.evidence or (Evidence(0, "", "", None),):
                rule = f"{s.rule} (not run: {s.not_run})" if s.not_run else s.rule
                rows.append(("alias set", names, s.line, s.text, s.kind, rule, "may", s.observed))
        for w in self.writes:
            rule = f"{w.rule} (not run: {w.not_run})" if w.not_run else w.rule
            evidence, may = ("writes", "surely") if w.surely else ("may write", "may")
            rows.append(("write", ", ".join(w.names), w.line, w.text, evidence, rule, may, w.observed))
        columns = ["kind", "names", "line", "text", "evidence", "rule", "may", "observed"]
        return pd.DataFrame(rows, columns=columns)


def aliasing(module: nn.Module, *args: Any, **kwargs: Any) -> AliasReport:
    """Which names of `module`'s forward may share storage, and what it writes.

    Inputs are as in `trace`. What may be comes from the text of the forward, of what it calls, and from the
    schemas of PyTorch's operators, for every way through it; what was observed comes from running the
    forward on meta tensors, along one. A static "no" that the run contradicts is never reported: what was
    observed counts too. Raises `FusekitError` when `module` is no module.
    """
    if not isinstance(module, nn.Module):
        raise FusekitError(f"aliasing() takes a module, not {type(module).__name__}")
    return alias_report(run_trace(module, args, kwargs), module)


def alias_report(trace: Trace, module: nn.Module) -> AliasReport:
    """The report of a trace of `module`."""
    run = _Run(trace)
    failed: str | None = "its source cannot be read"
    text = None
    if trace.source is not None:
        effects = effects_of_trace(trace, module, trace.source)
        failed = effects.failed
        text = _Text(trace.source, effects, run) if failed is None else None
        called = SEES_NAMES.intersection(global_names(trace.source.chain[-1].__code__))
        if called and failed is None:
            failed = f"it uses {min(called)}(), which may do anything with its names"
    sets = text.sets() if text else []
    writes = text.writes() if text else []
    sets += run.other_sets(sets)
    writes = run.with_seen(writes)
    covered = {name for one in sets for name in one.names}
    sets += [AliasSet((name,), ()) for name in run.names() if name not in covered]
    sets = [one for one in sets if not any(set(one.names) < set(other.names) for other in sets)]
    sets.sort(key=lambda one: (len(one.names) == 1, one.names))
    writes.sort(key=lambda one: (not one.surely, one.line))
    return AliasReport(
        trace.name,
        trace.source,
        tuple(sets),
        tuple(writes),
        trace.stopped,
        trace.assumptions,
        tuple(text.notes()) if text else (),
        failed,
    )


class _Run:
    """What the run on meta has seen."""

    def __init__(self, trace: Trace):
        self.trace = trace
        self.nodes: dict[str, fx.Node] = {node.name: node for node in trace.graph.nodes}
        self.at: dict[Span, list[fx.Node]] = {}
        for node in trace.graph.nodes:
            if node.op not in UNEVALUATED and node.meta.get("span") is not None:
                self.at.setdefault(node.meta["span"], []).append(node)
        self.held: dict[int, dict[str, None]] = {}  # a storage and the names that held a tensor in it
        for binding in trace.bindings:
            for storage in self.storages(self.nodes[binding.node]):
                self.held.setdefault(storage, {})[binding.name] = None

    def storages(self, node: fx.Node) -> set[int]:
        return {tensor.untyped_storage()._cdata for tensor in tensors_in(node.meta.get("val"))}

    def names(self) -> list[str]:
        return list(dict.fromkeys(binding.name for binding in self.trace.bindings))

    def shares(self, node: fx.Node) -> bool:
        """Whether what a node made lies in the storage of something that it got."""
        maker = node
        if getattr(node.target, "__name__", "") == "getitem" and isinstance(node.args[0], fx.Node):
            if not isinstance(node.args[0].meta.get("val"), torch.Tensor):
                maker = node.args[0]  # an item of several results
        given = [source for source in maker.all_input_nodes if source is not node]
        return any(self.storages(node) & self.storages(source) for source in given)

    def is_same(self, node: fx.Node) -> bool:
        made = node.meta.get("val")
        return isinstance(made, torch.Tensor) and any(
            made is source.meta.get("val") for source in node.all_input_nodes
        )

    def bound_together(self, name: str, line: int, names: Iterable[str]) -> bool | None:
        """Whether a name, as stored at a line, was in one storage with another of `names`."""
        others = set(names) - {name}
        found = [b for b in self.trace.bindings if b.name == name and b.line == line]
        if not found:
            return None
        return any(
            others & self.held[storage].keys()
            for binding in found
            for storage in self.storages(self.nodes[binding.node])
        )

    def writers(self, span: Span) -> tuple[list[fx.Node], list[fx.Node]]:
        """(nodes that were made at a place, those of them that wrote)."""
        nodes = self.at.get(span) or [
            node for at, made in self.at.items() for node in made if _inside(at, span)
        ]
        return nodes, [node for node in nodes if node.meta.get("written")]

    def seen_by(self, node: fx.Node) -> tuple[str, ...]:
        """The names that held what a node wrote."""
        written = [self.nodes[name] for name in node.meta.get("written", ())]
        if node.target is setattr:  # `x.data = y`: what is stored is not written, and shares from now on
            names = {one.name for one in written}
            return tuple(sorted({bind.name for bind in self.trace.bindings if bind.node in names}))
        storages = {storage for one in written for storage in self.storages(one)}
        return tuple(sorted({name for storage in storages for name in self.held.get(storage, ())}))

    def other_sets(self, sets: list[AliasSet]) -> list[AliasSet]:
        """Names that were seen to share storage, and stand in none of `sets` together."""
        found = []
        for names in self.held.values():
            if len(names) > 1 and not any(names.keys() <= set(one.names) for one in sets):
                step = Evidence(0, "", "seen only", True, self._only_seen(names))
                found.append(AliasSet(tuple(sorted(names)), (step,)))
        return found

    def with_seen(self, writes: list[Write]) -> list[Write]:
        """`writes`, and those that were seen and of which they do not have all names that saw them."""
        found = list(writes)
        for node in self.nodes.values():
            names = self.seen_by(node)
            line, text = self.place(node)
            known = [one for one in found if one.line == line]
            if not names or any(set(names) <= set(one.names) for one in known):
                continue
            rule = self._only_seen(names)
            same = next((one for one in known if one.text == text), None)
            if same is None:
                found.append(Write(line, text, names, True, rule))
            else:
                names = tuple(sorted({*same.names, *names}))
                found[found.index(same)] = replace(same, names=names, rule=f"{same.rule}; {rule}")
        return found

    def _only_seen(self, names: Iterable[str]) -> str:
        given = {b.name for b in self.trace.bindings if self.nodes[b.node].op in ("placeholder", "get_attr")}
        return SEEN_GIVEN if len(given & set(names)) > 1 else SEEN_ONLY

    def place(self, node: fx.Node) -> tuple[int, str]:
        span: Span | None = node.meta.get("span")
        if span is None:
            return 0, node.name
        if self.trace.source is None:
            return span.line, node.name
        return span.line, _one_line(self.trace.source, span)


class _Text:
    """What the text says, step by step."""

    def __init__(self, source: ForwardSource, effects: Effects, run: _Run):
        self.source, self.effects, self.run = source, effects, run
        self.stores = [*effects.given, *effects.stored]
        self.regions: dict[Region, dict[str, None]] = {}
        values = [(one.name, one.value) for one in self.stores]
        for node, value in effects.values.items():
            if isinstance(node, ast.Name):
                values.append((node.id, value))  # what it holds when it is read: perhaps more by then
        stored = {one.name for one in self.stores}
        for name, value in values:
            if name in stored and name != source.self_name:
                for region in value.regions:
                    self.regions.setdefault(region, {})[name] = None
        self.tests = dict(_tests(source.tree))
        self.parents = {child: node for node in ast.walk(source.tree) for child in ast.iter_child_nodes(node)}

    def holders(self, regions: Iterable[Region]) -> list[str]:
        """The names that may lie in one of `regions`."""
        wanted = set(regions)
        found: dict[str, None] = {}
        for region, names in self.regions.items():
            if region in wanted or any(_may_be_outside(region, other) for other in wanted):
                found.update(names)
        return sorted(found)

    # -- alias sets -----------------------------------------------------------------------------

    def sets(self) -> list[AliasSet]:
        by_names: dict[tuple[str, ...], list[Region]] = {}
        for region in self.regions:
            by_names.setdefault(tuple(self.holders([region])), []).append(region)
        largest = [names for names in by_names if not any(set(names) < set(other) for other in by_names)]
        return [AliasSet(names, self.evidence(by_names[names], names)) for names in largest]

    def evidence(self, regions: list[Region], names: tuple[str, ...]) -> tuple[Evidence, ...]:
        """How what lies in `regions` came to be held by `names`."""
        if len(names) == 1:
            return ()
        found: dict[ast.AST, Evidence] = {}
        for one in self.effects.stored:
            value = _value_expression(one.node)
            if one.name not in names or value is None:
                continue
            for region in regions:
                if not _holds(one.value, region):
                    continue
                steps = list(self.steps(value, region))
                if not steps and not _made_at(region, value):
                    steps = [(value, *self.passed_on(one.node, value))]
                for node, kind, rule in steps:
                    if node not in found:
                        found[node] = self.step(node, kind, rule, one.name, one.node, names)
        return tuple(sorted(found.values(), key=lambda step: step.line))

    def steps(self, value: ast.AST, region: Region) -> Iterator[tuple[ast.AST, str, str]]:
        """The expressions in `value` that hand on what lies in `region`: (it, kind, rule)."""
        for node in ast.walk(value):
            held = self.effects.values.get(node)
            if held is None or not _holds(held, region) or _made_at(region, node):
                continue
            rule = self.effects.views.get(node)
            if rule is not None:
                yield node, "may be a view" if " may return " in rule else "view", rule
            elif isinstance(node, ast.Call):
                yield node, "may be a view", "what it calls may return what it was given, or what it reaches"
            elif isinstance(node, ast.Subscript):
                yield node, "item", "an item of a container is what was put into it"

    def passed_on(self, statement: ast.AST, value: ast.AST) -> tuple[str, str]:
        if isinstance(statement, ast.AugAssign):
            return "same object", "an operator in place leaves its name what it held"
        if isinstance(value, ast.Name):
            return "same object", "one more name for it"
        if isinstance(value, (ast.List, ast.Tuple, ast.Dict, ast.Set)):
            return "item", "a container holds what is put into it"
        if isinstance(value, ast.Attribute):
            return "item", "an attribute is what was stored in it"
        return "same object", "it may be the value of a part of it"

    def step(
        self, node: ast.AST, kind: str, rule: str, name: str, statement: ast.AST, names: tuple[str, ...]
    ) -> Evidence:
        span = Span.of(node)  # type: ignore[arg-type]
        made = self.run.at.get(span, [])
        skipped = self.skipped(node)
        observed = None
        if made:
            observed = any(map(self.run.shares, made))
            if any(map(self.run.is_same, made)):
                kind = "same object"
        elif not skipped:
            observed = self.run.bound_together(name, getattr(statement, "lineno", 0), names)
        why = skipped or UNSEEN if observed is None else ""
        return Evidence(span.line, _one_line(self.source, span), kind, observed, rule, why)

    # -- writes ---------------------------------------------------------------------------------

    def writes(self) -> list[Write]:
        found = []
        for node, effects in self.effects.found.items():
            sure = [effect for effect in effects if effect.kind == "write"]
            unsure = [effect for effect in effects if effect.kind == "may write"]
            for surely, some in ((True, sure), (False, unsure)):
                one = self.write_of(node, some, surely)
                if one is not None:
                    found.append(one)
        return found

    def write_of(self, node: ast.AST, effects: list["Effect"], surely: bool) -> Write | None:
        regions = {region for effect in effects for region in effect.regions}
        names = self.holders(regions)
        elsewhere = sorted(
            {region.label for region in regions if region.kind != "new" and not self.regions.get(region)}
        )
        if not names and not elsewhere:
            return None  # what nobody else sees
        span = Span.of(node)  # type: ignore[arg-type]
        nodes, wrote = self.run.writers(span)
        observed = bool(wrote) if nodes else None
        said = ast.unparse(node)
        said = said if len(said) <= 60 else f"{said[:57]}..."
        rule = effects[0].why.removeprefix(f"{said} ")
        return Write(
            span.line,
            _one_line(self.source, span),
            tuple(names),
            observed,
            rule,
            surely,
            tuple(elsewhere),
            self.skipped(node) or UNSEEN if observed is None else "",
        )

    # -- what is said around them ---------------------------------------------------------------

    def skipped(self, node: ast.AST) -> str:
        """Why the run on meta did not come to a place, "" where nothing says that it did not."""
        at: ast.AST | None = node
        while at is not None:
            for test, needed in self.tests.get(at, ()):
                went = self.run.trace.branches.get(Span.of(test), needed)
                if went is not needed:
                    text = _one_line(self.source, Span.of(test))
                    return f"`{text}` was {'true' if went else 'false'}"
            at = self.parents.get(at)
        stopped = self.run.trace.stopped
        if stopped is not None and getattr(node, "lineno", 0) > stopped.line:
            return f"the trace stopped before it, at line {stopped.line}"
        return ""

    def notes(self) -> list[str]:
        names = {
            name: region.kind
            for region, held in self.regions.items()
            if region.kind in ("given", "own")
            for name in held
            if any(one.name == name for one in self.effects.given)
        }
        if len(names) < 2:
            return []
        return [
            "A caller may pass one tensor for several inputs, or one that lies on the module: what is "
            "written into one of them is then seen by the others."
        ]


def _tests(tree: ast.AST) -> Iterator[tuple[ast.AST, list[tuple[ast.expr, bool]]]]:
    """Each node that runs only where tests say so, with those tests and what they then gave."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.If, ast.While, ast.IfExp)):
            for arm, truth in ((node.body, True), (node.orelse, False)):
                for child in arm if isinstance(arm, list) else [arm]:
                    yield child, [(node.test, truth)]
        elif isinstance(node, ast.BoolOp):
            goes_on = isinstance(node.op, ast.And)
            for index, child in enumerate(node.values):
                yield child, [(test, goes_on) for test in node.values[:index]]


def _value_expression(statement: ast.AST) -> ast.AST | None:
    """What a statement stores comes from here."""
    if isinstance(statement, ast.AugAssign):
        return statement
    if isinstance(statement, (ast.Assign, ast.AnnAssign, ast.NamedExpr)):
        return statement.value
    if isinstance(statement, (ast.For, ast.AsyncFor)):
        return statement.iter
    return None


def _holds(value: Value, region: Region) -> bool:
    return region in value.regions


def _made_at(region: Region, node: ast.AST) -> bool:
    return region.kind == "new" and isinstance(region.key, tuple) and id(node) in region.key


def _may_be_outside(one: Region, other: Region) -> bool:
    """Whether one is what lies outside, where the other may lie: all that was not made in the forward."""
    return "new" not in (one.kind, other.kind) and "outside" in (one.kind, other.kind)


def _inside(one: Span, other: Span) -> bool:
    start, end = (one.line, one.column), (one.end_line, one.end_column)
    return (other.line, other.column) <= start and end <= (other.end_line, other.end_column)


def _one_line(source: ForwardSource, span: Span) -> str:
    return " ".join(text_at(source.file_text, span).split())
