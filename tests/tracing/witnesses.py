"""Where the two witnesses of `aliasing` contradict each other: the run saw what the text does not allow."""

import itertools

from fusekit.tracing import aliasing, trace
from fusekit.tracing.aliasing import SEEN_GIVEN, SEEN_ONLY
from fusekit.tracing.recorder import tensors_in


def contradictions(module, *inputs):
    """Sentences, none where all that a run on meta saw is among what the static answer allows.

    Of names that held what was there before the forward nothing is asked: a caller may pass one tensor for
    two inputs, and the report says so in a note.
    """
    report = aliasing(module, *inputs)
    if report.failed:
        return []
    run = trace(module, *inputs)
    nodes = {node.name: node for node in run.graph.nodes}
    held = {}
    for binding in run.bindings:
        for storage in storages(nodes[binding.node]):
            held.setdefault(storage, set()).add(binding.name)
    before = {b.name for b in run.bindings if nodes[b.node].op in ("placeholder", "get_attr")}
    sets = [set(one.names) for one in report.sets if not _is_seen_only(one)]
    found = []
    for names in held.values():
        for one, other in itertools.combinations(sorted(names), 2):
            if not any({one, other} <= names for names in sets) and not {one, other} <= before:
                found.append(f"{one} and {other} share storage")
    for node in run.graph.nodes:
        written = [nodes[name] for name in node.meta.get("written", ())]
        line = node.meta["span"].line if node.meta["span"] else 0
        allowed = {
            name
            for w in report.writes
            if w.line == line and not w.rule.endswith((SEEN_ONLY, SEEN_GIVEN))
            for name in w.names
        }
        seen = {b.name for b in run.bindings if nodes[b.node] in written}
        if node.target is not setattr:  # after `x.data = y` they share, but y was not written
            seen |= {name for one in written for storage in storages(one) for name in held.get(storage, ())}
        if seen - allowed:
            found.append(f"line {line} writes {', '.join(sorted(seen - allowed))}")
    return found


def storages(node):
    return {tensor.untyped_storage()._cdata for tensor in tensors_in(node.meta["val"])}


def _is_seen_only(one):
    return any(step.kind == "seen only" for step in one.evidence)
