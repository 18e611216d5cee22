"""Which linear feeds what of an attention: the role comes from the dataflow, not from names."""

import torch.nn as nn
from torch import fx

from fusekit.tracing import Trace, is_leaf_call

ATTENTION_OPERATORS = frozenset({"scaled_dot_product_attention"})


def attention_operands(trace: Trace) -> list[tuple[fx.Node, fx.Node, fx.Node]]:
    """(query, key, value) of every attention in a trace."""
    found = []
    for node in trace.graph.nodes:
        leaf = is_leaf_call(node) and node.target.attention
        if leaf or getattr(node.target, "__name__", "") in ATTENTION_OPERATORS:
            operands = [argument for argument in node.args if isinstance(argument, fx.Node)][:3]
            if len(operands) == 3:
                found.append((operands[0], operands[1], operands[2]))
    return found


RANKS = ("columns", "kv", "mla", "qkv")  # the more telling role last


def role(trace: Trace, linears: list[fx.Node]) -> tuple[str, list[fx.Node]]:
    """(the role of these linears in an attention, they in the order of their rows).

    `qkv` are query, key and value; `kv` key and value alone; `mla` the down-projections of latent
    attention, that of the query and the one that key and value come from through another linear. Those
    come first, in this order; others of the same input (a gate, say) follow. Any else are `columns`.
    """
    for operands in attention_operands(trace):
        feeds = [
            [linear for linear in linears if linear in sources(operand, linears)] for operand in operands
        ]
        if [len(found) for found in feeds[1:]] != [1, 1] or len(feeds[0]) > 1:
            continue
        key, value = feeds[1][0], feeds[2][0]
        first = [*feeds[0], key, value]
        found = None
        if len(set(first)) == len(first):
            found = "qkv" if feeds[0] else "kv"
        elif key is value and feeds[0] and feeds[0][0] is not key and _is_latent(trace, operands[2], key):
            first, found = [feeds[0][0], key], "mla"
        if found:
            return found, [*first, *(linear for linear in linears if linear not in first)]
    return "columns", linears


def _is_latent(trace: Trace, operand: fx.Node, down: fx.Node) -> bool:
    """Whether the value that `down` gives reaches an operand through another linear only."""
    linears = [
        node
        for node in trace.graph.nodes
        if node.op == "call_module" and issubclass(node.meta.get("module_type", object), nn.Linear)
    ]
    return down not in sources(operand, linears)


def sources(node: fx.Node, stop: list[fx.Node]) -> set[fx.Node]:
    """The nodes of `stop` whose value reaches `node` without passing another of them."""
    found: set[fx.Node] = set()
    seen: set[fx.Node] = set()
    todo = [node]
    while todo:
        current = todo.pop()
        if current in seen:
            continue
        seen.add(current)
        if current in stop:
            found.add(current)
        else:
            todo.extend(current.all_input_nodes)
    return found
