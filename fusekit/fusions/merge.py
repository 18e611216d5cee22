"""q(x), k(x), v(x) -> q, k, v = merged(x): sibling linears of one input multiply once.

`qkv`, `kv`, `mla` and `columns` are roles of this one merge.
"""

import ast
from collections.abc import Iterator
from typing import Any

import torch.nn as nn
from torch import fx

from fusekit.forward import Edit, Span
from fusekit.forward.reads import attribute_chain
from fusekit.fusions.match import Match, Objection, Refused
from fusekit.fusions.prover import Proof, movable, movable_unseen
from fusekit.fusions.roles import RANKS, attention_operands, role, sources
from fusekit.fusions.view import ForwardView, line_of
from fusekit.tracing.schema import operator_name


def find_merges(view: ForwardView, taken: set[str]) -> Iterator[Match | Objection]:
    """A match or an objection for each group of linears that read one value.

    Where not all of a group can be merged the most that can are, and an objection says why the others
    are left out. Linears whose path is in `taken` belong to another fusion's match or refusal, unless
    that set them free (`view.freed`).
    """
    seen: set[frozenset[ast.expr | None]] = set()
    merged: set[Edit] = set()
    for group in sibling_groups(view):
        nodes = [node for node in group if node.target not in taken or node.target in view.freed]
        calls = frozenset(view.expression(node) for node in nodes)
        if len(nodes) < 2 or calls in seen:  # the same calls again, in another round of a loop
            continue
        seen.add(calls)
        for found in _merged(view, nodes):
            if isinstance(found, Match) and _is_plain(view, found.parts):
                if any(edit.span == other.span for edit in found.edits[1:] for other in merged):
                    continue  # some of them again, in another round
                merged.update(found.edits[1:])
            yield found
    yield from _apart(view)
    yield from _by_keyword(view)
    yield from _by_hand(view)


def _merged(view: ForwardView, nodes: list[fx.Node]) -> Iterator[Match | Objection]:
    """The merge of `nodes`; else that of the most of them that is safe, and what the others stop at."""
    fusion, ordered = role(view.trace, nodes)
    try:
        _prove(view, ordered)
        # Where not all are plain linears the plan refuses the whole and says why; the plain ones it takes.
        plain = [node for node in nodes if _is_plain(view, (str(node.target),))]
        if 1 < len(plain) < len(nodes):
            yield from _merged(view, plain)
        yield _match(view, nodes)
        return
    except Refused as refused:
        why = refused
    best = _largest(view, nodes)
    parts = tuple(dict.fromkeys(str(node.target) for node in ordered))
    if not best:
        yield why.objection(fusion, parts)
        return
    yield _match(view, best)
    names = {node.target for node in best}
    rest = [node for node in nodes if node.target not in names]
    label = fusion if role(view.trace, best)[0] != fusion else "columns"
    said: dict[tuple[str, str, int | None], list[str]] = {}
    for name in dict.fromkeys(str(node.target) for node in rest):
        one = why
        try:
            _prove(view, [node for node in nodes if node.target == name or node in best])
        except Refused as refused:
            one = refused
        said.setdefault((one.reason, str(one), one.line), []).append(name)
    for (reason, message, line), left in said.items():
        yield Objection(label, reason, f"{' and '.join(left)} left out: {message}", line, parts)
    if _several(view, rest):
        yield from _merged(view, rest)


def _is_plain(view: ForwardView, paths: tuple[str, ...]) -> bool:
    """Whether these are exactly linears, and of one dtype: what all instances that are alike share."""
    parts = [view.submodule(path) for path in paths]
    if not all(type(part) is nn.Linear for part in parts):
        return False
    return len({own.dtype for part in parts for own in part.parameters()}) == 1  # type: ignore[union-attr]


def _largest(view: ForwardView, nodes: list[fx.Node]) -> list[fx.Node]:
    """The most of `nodes` that may be merged, of several such the one with a role; [] where no two may.

    What is safe for some is so for fewer of them, so from each one it is enough to add others.
    """
    targets = [node.target for node in nodes]
    once = [node for node in nodes if targets.count(node.target) == 1]
    best: list[fx.Node] = []
    rank = (1, 0)
    for index, first in enumerate(once):
        chosen = [first]
        later = once[index + 1 :]
        for other in (*later, *once[:index], *later):
            if other not in chosen:
                some = [node for node in once if node in chosen or node is other]
                try:
                    _prove(view, some)
                except Refused:
                    continue
                chosen = some
        found = (len(chosen), RANKS.index(role(view.trace, chosen)[0]))
        if len(chosen) > 1 and found > rank:
            best, rank = chosen, found
    return best


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
                    yield Objection("qkv", "different-inputs", why, line_of(other), parts)
                    break


def _one_tensor(left: fx.Node, right: fx.Node) -> bool:
    first, second = left.args[0], right.args[0]
    assert isinstance(first, fx.Node) and isinstance(second, fx.Node)
    return first.meta.get("val") is second.meta.get("val")


def _by_keyword(view: ForwardView) -> Iterator[Objection]:
    """An objection for each group of siblings in which one is called as `self.q(input=x)`."""
    groups: dict[fx.Node, list[fx.Node]] = {}
    for node in view.trace.graph.nodes:
        inputs = [*node.args, *node.kwargs.values()]
        is_one = node.op == "call_module" and len(inputs) == 1 and isinstance(inputs[0], fx.Node)
        if is_one and is_linear_like(view.submodule(str(node.target))):
            groups.setdefault(inputs[0], []).append(node)
    for group in groups.values():
        named = [node for node in group if node.kwargs]
        if named and _several(view, group):
            fusion, ordered = role(view.trace, group)
            parts = tuple(dict.fromkeys(str(node.target) for node in ordered))
            yield Objection(fusion, "module-escapes", _how(view, named[0]), line_of(named[0]), parts)


def _by_hand(view: ForwardView) -> Iterator[Objection]:
    """An objection for each group of siblings of which one is written out: `F.linear(x, self.q.weight)`."""
    groups: dict[fx.Node, dict[str, fx.Node]] = {}
    written_out = set()
    calls = set(linear_calls(view))
    for node in view.trace.graph.nodes:
        inputs = node.all_input_nodes
        if node in calls:
            groups.setdefault(inputs[0], {})[str(node.target)] = node
        elif operator_name(node) == "linear" and len(inputs) > 1 and inputs[1].op == "get_attr":
            path, _, name = str(inputs[1].target).rpartition(".")
            if name == "weight" and is_linear_like(view.submodule(path)) and path:
                groups.setdefault(inputs[0], {})[path] = node
                written_out.add(node)
    for group in groups.values():
        by_hand = [node for node in group.values() if node in written_out]
        if by_hand and len(group) > 1:
            expression = view.expression_at(by_hand[0])
            text = view.short(expression) if expression is not None else by_hand[0].name
            path = next(path for path, node in group.items() if node is by_hand[0])
            why = f"{path} is computed with by {text}, not called by a plain self.{path}(x)"
            yield Objection("columns", "module-escapes", why, line_of(by_hand[0]), tuple(group))


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

    A tensor that is written in between holds another value then. Calls that read one tensor stand in a
    group too: the prover names the write.
    """
    values: dict[fx.Node, list[fx.Node]] = {}
    tensors: dict[int, list[fx.Node]] = {}
    for node in linear_calls(view):
        source = node.args[0]
        assert isinstance(source, fx.Node)
        values.setdefault(source, []).append(node)
        tensors.setdefault(id(source.meta.get("val")), []).append(node)
    groups: list[list[fx.Node]] = []
    for group in (*_by_token(view), *values.values(), *tensors.values()):
        if _several(view, group) and not any(set(group) <= set(known) for known in groups):
            groups = [known for known in groups if not set(known) <= set(group)] + [group]
    return groups


def _by_token(view: ForwardView) -> list[list[fx.Node]]:
    """The calls of linears by the one tensor that their arguments' names hold, written in between or not."""
    found: dict[Any, list[fx.Node]] = {}
    calls = linear_calls(view)
    for node in calls if len(calls) > 1 else ():
        expression = view.expression(node)
        argument = expression.args[0] if isinstance(expression, ast.Call) and expression.args else None
        value = view.effects.value(argument) if argument is not None else None
        # A call in a loop has more than one node, each with a value of its own.
        if value is not None and value.token is not None and len(view.nodes_at.get(expression, ())) == 1:  # type: ignore[arg-type]
            found.setdefault(value.token, []).append(node)
    return list(found.values())


def _several(view: ForwardView, group: list[fx.Node]) -> bool:
    return len({node.target for node in group}) > 1 or len(_called_as(view, group)) > 1


def _called_as(view: ForwardView, nodes: list[fx.Node]) -> list[str]:
    """The different texts `self.name` by which `nodes` are called."""
    found = [view.expression(node) for node in nodes]
    texts = [ast.unparse(call.func) for call in found if isinstance(call, ast.Call)]
    return [text for text in dict.fromkeys(texts) if text.startswith(f"{view.source.self_name}.")]


def is_linear_like(module: nn.Module | None) -> bool:
    """A linear, or what stands in the place of one: a subclass, a wrapper with a weight of two dimensions."""
    if isinstance(module, nn.Linear) or is_conv1d(module):
        return True
    if module is None or type(module).__module__.startswith("torch.nn.modules."):
        return False
    return hasattr(module, "base_layer") or (
        hasattr(module, "in_features") and hasattr(module, "out_features")
    )


def _prove(view: ForwardView, nodes: list[fx.Node]) -> tuple[list[ast.Call], str, Proof]:
    """(the calls of `nodes`, the name of what they read, the proof that they may be merged), or `Refused`."""
    calls = merged_calls(view, nodes)
    name = _argument(calls)
    names = frozenset(ast.unparse(call.args[0]) for call in calls)
    proof = movable(view, nodes, names, arms=True)
    _follows_on_its_line(view, proof.statement)
    return calls, name, proof


def _match(view: ForwardView, nodes: list[fx.Node]) -> Match:
    """The merge of `nodes` (one input), or `Refused`."""
    fusion, ordered = role(view.trace, nodes)
    calls, argument, proof = _prove(view, ordered)
    storage, insertion, names = merged_line(view, fusion, ordered, ast.Name(argument), proof)
    twins = list(_twins(view, ordered, calls))
    edits = [insertion]
    for other, at in twins:
        edits.append(_line_before(view, at.statement, storage, names, ast.Name(_argument(other))))
    groups = [calls, *(other for other, _ in twins)]
    proofs = [proof, *(at for _, at in twins)]
    settings = tuple(sorted({setting for one in proofs for setting in one.settings}))
    # Whenever the parts run apart, one that is called only on some way runs where it stands. So do all where
    # the proof leans on settings that may change, or where not every way calls them in one order.
    in_place = bool(settings) or len({_sequence(group) for group in groups}) > 1
    sometimes = {index for index, call in enumerate(calls) if in_place or call in proof.in_arms}
    for group in groups:
        for index, (call, name) in enumerate(zip(group, names, strict=True)):
            text = name
            if index in sometimes:
                text = f"{view.text(call)} if {name} is None else {name}"
                text = text if view.stands_alone(call) else f"({text})"
            edits.append(Edit(Span.of(call), text))
    left_out = {str(ordered[index].target) for index in sometimes}
    return Match(
        fusion,
        tuple(str(node.target) for node in ordered),
        tuple(sorted(edits)),
        min(call.lineno for call in calls),
        storage=storage,
        order=tuple(path for path in order_of(view, ordered) if path not in left_out),
        called=frozenset().union(*(one.called for one in proofs)),
        settings=settings,
    )


def _sequence(calls: list[ast.Call]) -> tuple[int, ...]:
    """The numbers of calls in the order in which they are evaluated."""
    return tuple(sorted(range(len(calls)), key=lambda index: (calls[index].lineno, calls[index].col_offset)))


def _twins(
    view: ForwardView, nodes: list[fx.Node], calls: list[ast.Call]
) -> Iterator[tuple[list[ast.Call], Proof]]:
    """The same parts called in other blocks that the trace did not come by, each once: (calls, proof)."""
    texts = [ast.unparse(call.func) for call in calls]
    blocks: dict[int, dict[str, list[ast.Call]]] = {}
    for call in ast.walk(view.source.tree):
        if isinstance(call, ast.Call) and call not in calls and ast.unparse(call.func) in texts:
            place = view.place(call)
            key = id(place[0]) if place else 0
            blocks.setdefault(key, {}).setdefault(ast.unparse(call.func), []).append(call)
    for key, found in blocks.items():
        if not key or set(found) != set(texts) or any(len(same) > 1 for same in found.values()):
            continue
        twins = [found[text][0] for text in texts]
        plain = all(len(c.args) == 1 and not c.keywords and isinstance(c.args[0], ast.Name) for c in twins)
        if not plain or any(view.nodes_at.get(call) for call in twins):
            continue
        names = frozenset(ast.unparse(call.args[0]) for call in twins)
        try:
            if all(_is_one_value(view, twins[0].args[0], call.args[0]) for call in twins):
                proof = movable_unseen(view, dict(zip(twins, nodes, strict=True)), names)
                _follows_on_its_line(view, proof.statement)
                yield twins, proof
        except Refused:
            continue  # there they run apart, as ever


def _argument(calls: list[ast.Call]) -> str:
    return ast.unparse(first_of(calls).args[0])


def is_conv1d(module: nn.Module | None) -> bool:
    """Whether this is exactly the linear that GPT-2 calls Conv1D, whose weight is [in, out]."""
    kind = type(module)
    return kind.__name__ == "Conv1D" and kind.__module__ == "transformers.pytorch_utils"


def order_of(view: ForwardView, nodes: list[fx.Node]) -> tuple[str, ...]:
    """The paths of `nodes` as the forward calls them, one after another."""
    return tuple(str(node.target) for node in view.trace.graph.nodes if node in nodes)


def merged_calls(view: ForwardView, nodes: list[fx.Node]) -> list[ast.Call]:
    """The calls `self.part(x)` of `nodes`, all of one value by its name, or `Refused`."""
    calls: list[ast.Call] = []
    paths = [str(node.target) for node in nodes]
    for node in nodes:
        if paths.count(str(node.target)) > 1:
            names = _called_as(view, [other for other in nodes if other.target == node.target])
            if len(names) > 1:
                why = f"{' and '.join(names)} are one module, and so read one weight"
                raise Refused("tied", why, line_of(nodes[-1]))
            raise Refused("called-twice", _twice(view, nodes, node), line_of(node))
        call = view.call_of(node)
        if call is None:
            raise Refused("module-escapes", _how(view, node), line_of(node))
        if len(call.args) != 1 or call.keywords or not isinstance(call.args[0], ast.Name):
            raise Refused(
                "different-inputs",
                f"{view.text(call)} does not read a plain name: give its input a name first",
                call.lineno,
            )
        calls.append(call)
    first = calls[0]
    for call in calls[1:]:
        if not _is_one_value(view, first.args[0], call.args[0]):
            raise Refused(
                "different-inputs",
                f"{paths[0]} reads {view.text(first.args[0])}, {view.text(call.func)} reads "
                f"{view.text(call.args[0])}: one value here, but not on every way",
                call.lineno,
            )
    return calls


def _is_one_value(view: ForwardView, one: ast.expr, other: ast.expr) -> bool:
    """Whether two names hold one and the same value where they are read, on every way."""
    if ast.unparse(one) == ast.unparse(other):
        return True  # what is stored in between, the prover looks for
    left, right = view.effects.value(one), view.effects.value(other)
    return left is not None and right is not None and left.token is not None and left.token == right.token


def first_of(calls: list[ast.Call]) -> ast.Call:
    """The call that is evaluated first: its argument's name is bound before it."""
    return min(calls, key=lambda call: (call.lineno, call.col_offset))


def _twice(view: ForwardView, nodes: list[fx.Node], node: fx.Node) -> str:
    """In a sentence, how a part comes to be called more than once with one value."""
    found = [view.expression_at(other) for other in nodes if other.target == node.target]
    calls = list(dict.fromkeys(call for call in found if call is not None))
    if len(calls) < 2:
        return f"{node.target} is called in every round of a loop with one and the same input"
    lines = list(dict.fromkeys(str(call.lineno) for call in calls))
    where = f"lines {' and '.join(lines)}" if len(lines) > 1 else f"line {lines[0]}"
    return f"{node.target} is called more than once with this input, at {where}"


def _how(view: ForwardView, node: fx.Node) -> str:
    """In a sentence, how a part is called that is not called plainly."""
    plainly = "not by a plain self.name(x) of the forward itself"
    expression = view.expression_at(node)
    if expression is None:
        return f"{node.target} is called out of sight, {plainly}"
    text = view.short(expression)
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
    paths = [str(node.target).replace(".", "_") for node in nodes]
    names = [view.new_name(path) for path in paths]
    by_role = [f"merged_{fusion}"] if fusion != "columns" else []
    storage = view.new_storage(*by_role, f"merged_{'_'.join(paths)}")
    return storage, _line_before(view, proof.statement, storage, names, argument), names


def _line_before(
    view: ForwardView, statement: ast.stmt, storage: str, names: list[str], argument: ast.expr
) -> Edit:
    """The line that calls a storage, put before a statement."""
    span, before, _ = view.statement_start(statement)
    call = f"{', '.join(names)} = {view.source.self_name}.{storage}({ast.unparse(argument)})"
    return Edit(span, f"{call}; " if _follows_on_its_line(view, statement) else f"{call}\n{before}")


def _follows_on_its_line(view: ForwardView, statement: ast.stmt) -> bool:
    """Whether what is put before a statement goes on its line, as `a; b`; `Refused` if it has no place."""
    _, before, begins_line = view.statement_start(statement)
    simple = (ast.Return, ast.Expr, ast.Assign, ast.AnnAssign)
    follows = isinstance(statement, simple) and before.rstrip().endswith((":", ";"))
    if not begins_line and not follows:
        raise Refused(
            "different-branches",
            f"no line can be put before {view.text(statement)}: it shares its line with another statement",
            statement.lineno,
        )
    return not begins_line
