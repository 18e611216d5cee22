"""q(x), k(x), v(x) -> q, k, v = merged(x): sibling linears of one input multiply once.

`qkv`, `kv` and `columns` are roles of this one merge.
"""

import ast
from collections.abc import Iterator

import torch.nn as nn
from torch import fx

from fusekit.forward import Edit, Span
from fusekit.forward.reads import attribute_chain
from fusekit.fusions.match import Match, Objection, Refused
from fusekit.fusions.prover import Proof, movable
from fusekit.fusions.roles import attention_operands, role, sources
from fusekit.fusions.view import ForwardView


def find_merges(view: ForwardView, taken: set[str]) -> Iterator[Match | Objection]:
    """A match or an objection for each group of linears that read one value.

    Linears whose path is in `taken` belong to another fusion's match or refusal, unless that set them
    free (`view.freed`).
    """
    seen: set[frozenset[ast.Call]] = set()
    for group in sibling_groups(view):
        nodes = [node for node in group if node.target not in taken or node.target in view.freed]
        if len(nodes) > 1:
            yield from _merged(view, nodes, seen)
    yield from _apart(view)


def _merged(
    view: ForwardView, nodes: list[fx.Node], seen: set[frozenset[ast.Call]]
) -> Iterator[Match | Objection]:
    """The merge of `nodes`; else the objection, and the merges of those that read it by one name."""
    fusion, ordered = role(view.trace, nodes)
    try:
        calls = frozenset(merged_calls(view, ordered))
        if calls in seen:  # the same calls again, in another round of a loop
            return
        seen.add(calls)
        match = merge_match(view, fusion, ordered)
        if len({node.args for node in nodes}) > 1:
            raise Refused("input-written", "the input is written between the parts", _line(nodes[-1]))
        yield match
    except Refused as refused:
        yield refused.objection(fusion, tuple(str(node.target) for node in ordered))
        for some in _by_name(view, nodes):
            if _several(some) and len(some) < len(nodes):
                yield from _merged(view, some, seen)


def _by_name(view: ForwardView, nodes: list[fx.Node]) -> list[list[fx.Node]]:
    """`nodes` apart by the text of what they are called with: cross attention gives q another name."""
    found: dict[str, list[fx.Node]] = {}
    for node in nodes:
        call = view.call_of(node)
        if call is not None and len(call.args) == 1:
            found.setdefault(ast.unparse(call.args[0]), []).append(node)
    return list(found.values())


def _apart(view: ForwardView) -> Iterator[Objection]:
    """An objection for each attention whose query, key and value come from linears of different values."""
    calls = linear_calls(view)
    for operands in attention_operands(view.trace):
        feeds = [sources(operand, calls) for operand in operands]
        if all(len(found) == 1 for found in feeds) and len(set.union(*feeds)) == 3:
            query, key, value = (found.pop() for found in feeds)
            for other in (key, value):
                if other.args != query.args and not _one_tensor(query, other):
                    why = f"{query.target} and {other.target} read different values"
                    parts = (str(query.target), str(key.target), str(value.target))
                    yield Objection("qkv", "different-inputs", why, _line(other), parts)
                    break


def _one_tensor(left: fx.Node, right: fx.Node) -> bool:
    first, second = left.args[0], right.args[0]
    assert isinstance(first, fx.Node) and isinstance(second, fx.Node)
    return first.meta.get("val") is second.meta.get("val")


def linear_calls(view: ForwardView) -> list[fx.Node]:
    """The calls of linear-like submodules with one value."""
    return [
        node
        for node in view.trace.graph.nodes
        if node.op == "call_module"
        and len(node.args) == 1
        and not node.kwargs
        and isinstance(node.args[0], fx.Node)
        and is_linear_like(view.submodule(str(node.target)))
    ]


def sibling_groups(view: ForwardView) -> list[list[fx.Node]]:
    """The calls of linear-like submodules, grouped by the one value that they read.

    A tensor that is written in between holds another value then. Calls that read one tensor, and no
    value together, stand in a group too: the prover names the write.
    """
    values: dict[fx.Node, list[fx.Node]] = {}
    tensors: dict[int, list[fx.Node]] = {}
    for node in linear_calls(view):
        source = node.args[0]
        assert isinstance(source, fx.Node)
        values.setdefault(source, []).append(node)
        tensors.setdefault(id(source.meta.get("val")), []).append(node)
    groups = [group for group in values.values() if _several(group)]
    found = {node for group in groups for node in group}
    return groups + [group for group in tensors.values() if _several(group) and not found & set(group)]


def _several(group: list[fx.Node]) -> bool:
    return len({node.target for node in group}) > 1


def is_linear_like(module: nn.Module | None) -> bool:
    """A linear, or what stands in the place of one: a subclass, a wrapper with a weight of two dimensions."""
    if isinstance(module, nn.Linear):
        return True
    if module is None or type(module).__module__.startswith("torch.nn.modules."):
        return False
    return hasattr(module, "base_layer") or (
        hasattr(module, "in_features") and hasattr(module, "out_features")
    )


def merge_match(view: ForwardView, fusion: str, nodes: list[fx.Node]) -> Match:
    """The merge of `nodes` (one input, in the order of their rows), or `Refused`."""
    calls = merged_calls(view, nodes)
    argument = calls[0].args[0]
    proof = movable(view, nodes, frozenset({ast.unparse(argument)}))
    storage, insertion, names = merged_line(view, fusion, nodes, argument, proof)
    edits = [insertion]
    edits += [Edit(Span.of(call), name) for call, name in zip(calls, names, strict=True)]
    return Match(
        fusion,
        tuple(str(node.target) for node in nodes),
        tuple(sorted(edits)),
        min(call.lineno for call in calls),
        storage=storage,
        order=order_of(view, nodes),
        norms=proof.norms,
        activations=proof.activations,
        linears=proof.linears,
    )


def order_of(view: ForwardView, nodes: list[fx.Node]) -> tuple[str, ...]:
    """The paths of `nodes` as the forward calls them, one after another."""
    return tuple(str(node.target) for node in view.trace.graph.nodes if node in nodes)


def merged_calls(view: ForwardView, nodes: list[fx.Node]) -> list[ast.Call]:
    """The calls `self.part(x)` of `nodes`, all with one plain name as argument, or `Refused`."""
    calls: list[ast.Call] = []
    paths = [str(node.target) for node in nodes]
    for node in nodes:
        if paths.count(str(node.target)) > 1:
            raise Refused(
                "called-twice", f"{node.target} is called more than once with this input", _line(node)
            )
        call = view.call_of(node)
        if call is None:
            raise Refused("module-escapes", _how(view, node), _line(node))
        if len(call.args) != 1 or call.keywords or not isinstance(call.args[0], ast.Name):
            raise Refused(
                "different-inputs",
                f"{view.text(call)} does not read a plain name: give its input a name first",
                call.lineno,
            )
        calls.append(call)
    names = [ast.unparse(call.args[0]) for call in calls]
    for call, name in zip(calls, names, strict=True):
        if name != names[0]:
            raise Refused(
                "different-inputs",
                f"{paths[0]} reads {names[0]}, {view.text(call.func)} reads {name}: one value here, but "
                "under two names",
                call.lineno,
            )
    return calls


def _how(view: ForwardView, node: fx.Node) -> str:
    """In a sentence, how a part is called that is not called plainly."""
    plainly = "not by a plain self.name(x) of the forward itself"
    expression = view.expression_at(node)
    if expression is None:
        return f"{node.target} is called out of sight, {plainly}"
    text = " ".join(view.text(expression).split())
    text = text if len(text) <= 60 else f"{text[:57]}..."
    if node.meta.get("direct"):
        return f"{node.target} is called as {text}, {plainly}"
    if isinstance(expression, ast.Call) and attribute_chain(expression.func, view.source.self_name):
        text += ", a method of the module, which is not followed yet"
        return f"{node.target} is called inside of {text}"
    return f"{node.target} is called inside of {text}, {plainly}"


def merged_line(
    view: ForwardView, fusion: str, nodes: list[fx.Node], argument: ast.expr, proof: Proof
) -> tuple[str, Edit, list[str]]:
    """(name of the storage, the inserted line, the local names of the parts' outputs)."""
    span, before, begins_line = view.statement_start(proof.statement)
    follows = not begins_line and _follows_header(view, proof.statement)
    if not begins_line and not follows:
        raise Refused(
            "different-branches",
            f"no line can be put before {view.text(proof.statement)}: it shares its line with another "
            "statement",
            proof.statement.lineno,
        )
    paths = [str(node.target).replace(".", "_") for node in nodes]
    names = [view.new_name(path) for path in paths]
    by_role = [f"merged_{fusion}"] if fusion in ("qkv", "kv", "glu") else []
    storage = view.new_storage(*by_role, f"merged_{'_'.join(paths)}")
    call = f"{', '.join(names)} = {view.source.self_name}.{storage}({ast.unparse(argument)})"
    return storage, Edit(span, f"{call}; " if follows else f"{call}\n{before}"), names


def _follows_header(view: ForwardView, statement: ast.stmt) -> bool:
    """Whether a simple statement stands on the line of another one, where `a; b` may go before it."""
    simple = (ast.Return, ast.Expr, ast.Assign, ast.AnnAssign)
    before = view.statement_start(statement)[1].rstrip()
    return isinstance(statement, simple) and before.endswith((":", ";"))


def _line(node: fx.Node) -> int | None:
    span = node.meta.get("span")
    return span.line if span else None
