"""Which linear feeds what of an attention: the role comes from the dataflow, not from names."""

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


def role(trace: Trace, linears: list[fx.Node]) -> tuple[str, list[fx.Node]]:
    """(`qkv`, `kv` or `columns`, the linears in the order query, key, value where that is known)."""
    for operands in attention_operands(trace):
        feeds = [
            [linear for linear in linears if linear in sources(operand, linears)] for operand in operands
        ]
        if all(len(found) == 1 for found in feeds):
            ordered = [found[0] for found in feeds]
            if len(set(ordered)) == 3 == len(linears):
                return "qkv", ordered
        if not feeds[0] and [len(found) for found in feeds[1:]] == [1, 1] and len(linears) == 2:
            return "kv", [feeds[1][0], feeds[2][0]]
    return "columns", linears


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
