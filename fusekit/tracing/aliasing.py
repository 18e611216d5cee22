"""What may share storage in a forward, and what is written: two witnesses side by side.

The schemas of PyTorch say what *may* alias; the run on meta tensors, where views share storage
and version counters count, says what *did* on that path.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch.nn as nn
from torch import fx

from fusekit.errors import FusekitError
from fusekit.forward import ForwardSource, Span, text_at
from fusekit.shown import Shown
from fusekit.tracing.recorder import tensors_in
from fusekit.tracing.result import Assumption, Stopped, Trace
from fusekit.tracing.schema import node_effect
from fusekit.tracing.trace import run_trace

if TYPE_CHECKING:
    import pandas


@dataclass(frozen=True)
class Evidence:
    """One step that joins names into a set.

    `kind` is `view` (the schema says so), `may be a view` (a composite operator or a submodule
    may return what it was given) or `same object`. `observed`: did the run on meta share storage.
    """

    line: int
    text: str
    kind: str
    observed: bool | None


@dataclass(frozen=True)
class AliasSet:
    """Names of the forward that may share storage at some point of it."""

    names: tuple[str, ...]
    evidence: tuple[Evidence, ...]


@dataclass(frozen=True)
class Write:
    """A statement that writes into a tensor, and the names that may see it."""

    line: int
    text: str
    names: tuple[str, ...]
    observed: bool | None


@dataclass(frozen=True, repr=False, eq=False)
class AliasReport(Shown):
    """Alias sets and writes of one forward, with the evidence, along the path that the trace took."""

    name: str
    source: ForwardSource | None
    sets: tuple[AliasSet, ...]
    writes: tuple[Write, ...]
    stopped: Stopped | None
    assumptions: tuple[Assumption, ...]

    def to_frame(self) -> "pandas.DataFrame":
        """One row a set or write: kind, names, line, text, evidence, observed."""
        import pandas as pd

        rows: list[dict[str, Any]] = []
        for found in self.sets:
            names = ", ".join(found.names)
            for step in found.evidence:
                rows.append(
                    {
                        "kind": "alias set",
                        "names": names,
                        "line": step.line,
                        "text": step.text,
                        "evidence": step.kind,
                        "observed": step.observed,
                    }
                )
            if not found.evidence:
                rows.append(
                    {
                        "kind": "alias set",
                        "names": names,
                        "line": 0,
                        "text": "",
                        "evidence": "",
                        "observed": None,
                    }
                )
        for write in self.writes:
            rows.append(
                {
                    "kind": "write",
                    "names": ", ".join(write.names),
                    "line": write.line,
                    "text": write.text,
                    "evidence": "writes",
                    "observed": write.observed,
                }
            )
        return pd.DataFrame(rows, columns=["kind", "names", "line", "text", "evidence", "observed"])


def aliasing(module: nn.Module, *args: Any, **kwargs: Any) -> AliasReport:
    """Which names of `module`'s forward may share storage, and what it writes.

    Inputs are as in `trace`. Static evidence comes from PyTorch's operator schemas
    (`alias_info`), observed evidence from running the forward on meta tensors; a static "no" that
    the run contradicts is never reported: what was observed counts too.
    """
    if not isinstance(module, nn.Module):
        raise FusekitError(f"aliasing() takes a module, not {type(module).__name__}")
    return alias_report(run_trace(module, args, kwargs))


def alias_report(trace: Trace) -> AliasReport:
    """The report of a trace."""
    groups = _Groups()
    nodes = {node.name: node for node in trace.graph.nodes}
    steps: list[tuple[fx.Node, fx.Node, str, bool | None]] = []
    for node in nodes.values():
        if node.op in ("placeholder", "get_attr", "output"):
            continue
        for source in node.all_input_nodes:
            shared = _share(node.meta.get("val"), source.meta.get("val"))
            kind = _kind(node, source, shared)
            if kind:
                groups.join(node.name, source.name)
                steps.append((node, source, kind, shared))
    held: dict[str, set[str]] = {}
    for binding in trace.bindings:
        held.setdefault(groups.find(binding.node), set()).add(binding.name)
    sets = []
    for root, names in held.items():
        evidence = [_evidence(trace, *step) for step in steps if groups.find(step[0].name) == root]
        sets.append(AliasSet(tuple(sorted(names)), tuple(dict.fromkeys(evidence))))
    writes = [
        Write(
            *_place(trace, node),
            tuple(sorted({n for w in written for n in held.get(groups.find(w), ())})),
            True,
        )
        for node in nodes.values()
        if (written := node.meta.get("written"))
    ]
    sets.sort(key=lambda found: (len(found.names) == 1, found.names))
    return AliasReport(trace.name, trace.source, tuple(sets), tuple(writes), trace.stopped, trace.assumptions)


class _Groups:
    """Disjoint sets of node names."""

    def __init__(self) -> None:
        self._parent: dict[str, str] = {}

    def find(self, name: str) -> str:
        while self._parent.get(name, name) != name:
            name = self._parent[name]
        return name

    def join(self, left: str, right: str) -> None:
        self._parent[self.find(left)] = self.find(right)


def _kind(node: fx.Node, source: fx.Node, shared: bool | None) -> str | None:
    """How `node` may share storage with its input, None when it cannot."""
    if node.meta.get("val") is source.meta.get("val") and node.meta.get("val") is not None:
        return "same object"
    if not _floats(node.meta.get("val")):
        return None
    effect = node_effect(node)
    if effect is None:  # a submodule or an opaque function
        if node.op == "call_function" and node.args and node.args[0] is source and _is_getitem(node):
            return "view"
        return None if node.meta.get("module_type") is nn.Linear else "may be a view"
    if effect.returns != "fresh":
        first = node.all_input_nodes[0]
        return effect.returns if source is first or effect.returns == "may be a view" else None
    return "view" if shared else None


def _is_getitem(node: fx.Node) -> bool:
    return getattr(node.target, "__name__", "") == "getitem"


def _floats(value: Any) -> bool:
    return bool(tensors_in(value)) or value is None


def _share(left: Any, right: Any) -> bool | None:
    """Whether two meta values were seen to share storage."""
    lefts, rights = tensors_in(left), tensors_in(right)
    if not lefts or not rights:
        return None
    storages = {tensor.untyped_storage()._cdata for tensor in rights}
    return any(tensor.untyped_storage()._cdata in storages for tensor in lefts)


def _evidence(trace: Trace, node: fx.Node, source: fx.Node, kind: str, shared: bool | None) -> Evidence:
    return Evidence(*_place(trace, node), kind, shared)


def _place(trace: Trace, node: fx.Node) -> tuple[int, str]:
    span: Span | None = node.meta.get("span")
    if span is None:
        return 0, node.name
    if trace.source is None:
        return span.line, node.name
    return span.line, " ".join(text_at(trace.source.file_text, span).split())
