"""What may share storage in a forward, and what is written: two witnesses side by side.

The schemas of PyTorch say what *may* alias; the run on meta tensors, where views share storage
and version counters count, says what *did* on that path.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
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
    steps, roots = _follow(trace)
    held: dict[str, set[str]] = {}  # root -> names that held a value of it
    bound: dict[str, set[str]] = {}  # root -> the nodes that they held
    for binding in trace.bindings:
        for root in roots.get(binding.node, ()):
            held.setdefault(root, set()).add(binding.name)
            bound.setdefault(root, set()).add(binding.node)
    sets: list[AliasSet] = []
    for root, names in sorted(held.items(), key=lambda item: -len(item[1])):
        if not any(names <= set(found.names) for found in sets):
            sets.append(AliasSet(tuple(sorted(names)), _evidence(trace, steps, roots, root, bound[root])))
    writes = []
    for node in trace.graph.nodes:
        if written := node.meta.get("written"):
            seen = {name for w in written for root in roots.get(w, ()) for name in held.get(root, ())}
            writes.append(Write(*_place(trace, node), tuple(sorted(seen)), True))
    sets.sort(key=lambda found: (len(found.names) == 1, found.names))
    return AliasReport(trace.name, trace.source, tuple(sets), tuple(writes), trace.stopped, trace.assumptions)


@dataclass(frozen=True)
class _Step:
    """`node` may share storage with its input `source`."""

    node: fx.Node
    source: fx.Node
    kind: str
    observed: bool | None


def _follow(trace: Trace) -> tuple[list[_Step], dict[str, frozenset[str]]]:
    """Every step that may share storage, and for each node the allocations that it may lie in.

    An allocation is named by the node that made it. Sharing is no chain through "may": what may
    be a view of q or of v makes no view of v out of q.
    """
    steps: list[_Step] = []
    roots: dict[str, frozenset[str]] = {}
    for node in trace.graph.nodes:
        found: set[str] = set()
        surely = False
        for source, kind in _sources(node):
            observed = _share(node.meta.get("val"), source.meta.get("val"))
            if kind == "fresh":
                if not observed:
                    continue
                kind = "view"  # the schema promised a fresh result, and it was not
            steps.append(_Step(node, source, kind, observed))
            found |= roots.get(source.name, frozenset())
            surely |= kind != "may be a view"
        roots[node.name] = frozenset(found if surely else found | {node.name})
    return steps, roots


def _sources(node: fx.Node) -> list[tuple[fx.Node, str]]:
    """(input, how the node may share storage with it) for the inputs of a node; `fresh` where it may not."""
    if node.op in ("placeholder", "get_attr", "output"):
        return []
    if _is_getitem(node) and isinstance(node.args[0], fx.Node) and not _is_tensor(node.args[0]):
        # An item of several results: it shares what the call that made them shares.
        maker = node.args[0]
        return [] if maker.op == "placeholder" else _sources(maker)
    inputs = node.all_input_nodes
    same = [source for source in inputs if _is_tensor(node) and node.meta["val"] is source.meta.get("val")]
    if same:
        return [(same[0], "same object")]
    effect = node_effect(node)
    if effect is None:  # a submodule or an opaque function
        kind = "fresh" if node.meta.get("module_type") is nn.Linear else "may be a view"
        return [(source, kind) for source in inputs]
    if effect.returns == "view":
        return [(inputs[0], "view"), *((source, "fresh") for source in inputs[1:])] if inputs else []
    return [(source, effect.returns) for source in inputs]


def _is_tensor(node: fx.Node) -> bool:
    return isinstance(node.meta.get("val"), torch.Tensor)


def _is_getitem(node: fx.Node) -> bool:
    return getattr(node.target, "__name__", "") == "getitem"


def _share(left: Any, right: Any) -> bool | None:
    """Whether two meta values were seen to share storage."""
    lefts, rights = tensors_in(left), tensors_in(right)
    if not lefts or not rights:
        return None
    storages = {tensor.untyped_storage()._cdata for tensor in rights}
    return any(tensor.untyped_storage()._cdata in storages for tensor in lefts)


def _evidence(
    trace: Trace, steps: list[_Step], roots: dict[str, frozenset[str]], root: str, bound: set[str]
) -> tuple[Evidence, ...]:
    """The steps by which the nodes in `bound` came to lie in the allocation `root`, in order."""
    reached, found = set(bound), []
    for step in reversed(steps):
        if step.node.name in reached and root in roots[step.source.name]:
            reached.add(step.source.name)
            found.append(Evidence(*_place(trace, step.node), step.kind, step.observed))
    return tuple(dict.fromkeys(reversed(found)))


def _place(trace: Trace, node: fx.Node) -> tuple[int, str]:
    span: Span | None = node.meta.get("span")
    if span is None:
        return 0, node.name
    if trace.source is None:
        return span.line, node.name
    return span.line, " ".join(text_at(trace.source.file_text, span).split())
