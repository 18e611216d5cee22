"""The role of each linear under tensor parallelism, found in the dataflow of a forward.

Under tensor parallelism every rank holds a share of a linear's weight. A **column**-parallel linear
holds some of its output features, reads the whole input, and gives a share of the output; a
**row**-parallel one holds some of its input features, reads a share of the input, and what the ranks
give is summed; a **replicated** one gives its whole output on every rank.

The rule. A linear that reads a whole value is column-parallel when every way that its result goes
keeps the shares apart, up to an attention (as query, key or value, shares being of heads) or to
another linear, which then is row-parallel. Elementwise operators keep shares apart, also with a
whole value, of which each rank takes its share; so do reshapes that cut features into heads, what is done
for each head alone (rotary embeddings, a norm over a head's width), and cutting one packed result into
query, key and value or gate and up, each of which is then shared out by itself. A linear is
replicated when its result is needed in its whole width first: a norm or softmax over all features, a
sum of them, a result that leaves the forward, or any operator that is not known here to keep shares
apart. (Its weight may still be shared out where the output is gathered from all ranks: what
Transformers calls `colwise_gather_output` is replicated here.) What needs the whole result of an attention
gathers it there, which changes nothing for query, key and value.
"""

from collections.abc import Iterable
from typing import Literal

import torch.nn as nn
from torch import fx

from fusekit.model.shares import follow, is_parallel
from fusekit.tracing import Trace
from fusekit.tracing.schema import node_effect

Role = Literal["column", "row", "replicated"]


def parallel_roles(trace: Trace, module: nn.Module) -> dict[str, Role]:
    """The role of every linear that `module`'s forward calls, by its path relative to `module`.

    `trace` is the trace of `module`. Linears inside of submodules are not among them, but for those
    that the shares of another linear enter. A linear that nothing makes column or row is replicated;
    so is one that is called in two ways. Empty for a trace that stopped, since what follows is unknown.
    """
    if not trace.complete:
        return {}
    facts, whole = follow(module, trace.graph)
    roles: dict[str, Role] = {}
    for path in facts.linears:
        if path in facts.rows:
            roles[path] = "row"
        elif path in facts.columns & facts.arrived - whole:
            roles[path] = "column"
        else:
            roles[path] = "replicated"
    return roles


def roles_around(trace: Trace, module: nn.Module, parts: Iterable[str]) -> dict[str, Role]:
    """The roles of the linears `parts` and of those that take their result, with no other in between."""
    parts = list(parts)
    if not parts:
        return {}
    roles = parallel_roles(trace, module)
    near = _takers(trace.graph, module, parts)

    def is_near(path: str) -> bool:
        return any(path == name or path.startswith(f"{name}.") for name in near)

    own = {part: roles[part] for part in parts if part in roles}
    return own | {path: role for path, role in roles.items() if path not in own and is_near(path)}


def _takers(graph: fx.Graph, module: nn.Module, parts: list[str]) -> set[str]:
    """The submodules that a value made from a part's result enters, up to the next linear."""
    carries: set[fx.Node] = set()
    found: set[str] = set()
    named = {node.name: node for node in graph.nodes}
    for node in graph.nodes:
        is_part = node.op == "call_module" and str(node.target) in parts
        takes = not carries.isdisjoint(node.all_input_nodes)
        if takes and node.op == "call_module" and not is_part:
            found.add(str(node.target))
        if is_part or (takes and not is_parallel(node, module)):
            carries.add(node)
            for name in node.meta.get("written", ()):
                carries |= _shared_with(named[name])
    return found


def _shared_with(node: fx.Node) -> set[fx.Node]:
    """`node` and the values that it may be a view of."""
    found = {node}
    effect = node_effect(node)
    if effect is not None and effect.returns != "fresh":
        for source in node.all_input_nodes[:1]:
            found |= _shared_with(source)
    return found
