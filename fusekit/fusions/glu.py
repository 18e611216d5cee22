"""act(gate(x)) * up(x) -> gate, up = merged(x); kernels.act_and_mul(gate, up, act).

Of one linear cut in two, no weight is merged: only the product is replaced.
"""

import ast
from collections.abc import Iterator

import torch.nn as nn
from torch import fx

from fusekit.forward import Edit, Span
from fusekit.forward.edits import text_at
from fusekit.fusions.activation_text import activation_text
from fusekit.fusions.factor import Factors, shape_of
from fusekit.fusions.gated import Gated, gated_product
from fusekit.fusions.match import Match, Objection, Refused
from fusekit.fusions.merge import first_of, linear_calls, merged_calls, merged_line, order_of
from fusekit.fusions.prover import Proof, movable
from fusekit.fusions.view import ForwardView, evaluation, line_of
from fusekit.tracing.schema import operator_name


class _NoGlu(Refused):
    """It is no gated product as it stands, but its linears may still be merged."""


def find_glus(view: ForwardView, kernels: str) -> Iterator[Match | Objection]:
    """A match or an objection for each product of an activated linear and another of one input.

    The two may be slices of one linear.
    """
    seen: set[Span] = set()
    fused: dict[str, int] = {}
    linears = linear_calls(view)
    factors = Factors(view, linears)
    for node in view.trace.graph.nodes if linears else ():
        span = node.meta.get("span")
        found = gated_product(factors, node)
        parts = found.parts if found else _own_operator(view, node, linears)
        if not parts or span in seen:  # the same product again, in another round of a loop
            continue
        if span:
            seen.add(span)
        try:
            if found is None:
                why = "torch.nn.functional.glu is one operator already, with a rounding of its own"
                raise _NoGlu("not-this-function", why, line_of(node))
            match = _match(view, kernels, found, fused)
            yield match
            if match.storage:
                fused.update(dict.fromkeys(parts, match.line))
            elif not _touches(view, match, found.gate.linear):
                view.freed.update(parts)
        except Refused as refused:
            yield refused.objection("glu", parts)
            view.freed.update(parts if isinstance(refused, _NoGlu) else ())
    view.freed -= set(fused)


def _touches(view: ForwardView, match: Match, linear: fx.Node) -> bool:
    """Whether the call of the linear stands in text that is replaced."""
    span = linear.meta["span"]
    return span is None or any(
        (edit.span.line, edit.span.column) <= (span.line, span.column)
        and (span.end_line, span.end_column) <= (edit.span.end_line, edit.span.end_column)
        for edit in match.edits
    )


def _own_operator(view: ForwardView, node: fx.Node, linears: list[fx.Node]) -> tuple[str, ...]:
    """The linear that PyTorch's own gated product, `F.glu` or `nn.GLU`, cuts in two."""
    is_module = node.op == "call_module" and type(view.submodule(str(node.target))) is nn.GLU
    if not is_module and operator_name(node) != "glu":
        return ()
    return tuple(str(inner.target) for inner in node.all_input_nodes if inner in linears)


def _match(view: ForwardView, kernels: str, found: Gated, fused: dict[str, int]) -> Match:
    """`fused` are the linears that other matches merge, and the lines of those."""
    if found.problem is not None:
        reason, sentence, where = found.problem
        raise _NoGlu(reason, sentence, line_of(where) or line_of(found.node))
    for part in () if found.packed else found.parts:
        if part in fused:
            why = f"{part} is taken by the gated product at line {fused[part]}"
            raise Refused("not-this-function", why, line_of(found.node))
    nodes = [] if found.packed else [found.gate.linear, found.up.linear]
    calls = merged_calls(view, nodes) if nodes else []
    try:
        act, own = activation_text(view, found.act.node, found.act.source)
        place = _Place.of(view, found)
    except Refused as refused:
        raise _NoGlu(refused.reason, refused.message, refused.line) from None
    proofs: list[Proof] = []
    if nodes:
        argument = first_of(calls).args[0]
        proofs.append(movable(view, nodes, frozenset({ast.unparse(argument)})))
    try:
        run = [*_run(view, found), found.act.node, found.node]
        proofs.append(movable(view, run, frozenset()))
        _check_order(view, run, place.whole)
    except Refused as refused:
        raise _NoGlu(refused.reason, refused.message, refused.line) from None
    storage, edits, names = None, [], {}
    if nodes:
        storage, insertion, given = merged_line(view, "glu", nodes, argument, proofs[0])
        edits.append(insertion)
        names = dict(zip(calls, given, strict=True))
    edits += place.edits(view, names, f"{kernels}.act_and_mul", act)
    return Match(
        "glu",
        found.parts,
        tuple(sorted(edits)),
        place.whole.lineno,
        storage=storage,
        order=order_of(view, nodes),
        called=frozenset().union(*(proof.called for proof in proofs)) - frozenset(found.parts),
        activations=own,
    )


def _run(view: ForwardView, found: Gated) -> list[fx.Node]:
    """What must stand in one run of statements with the product: the linears, or what cuts the one.

    Whatever a branch before did, the halves are then of one shape, and so are two linears' outputs.
    """
    linear = found.gate.linear
    if not found.packed:
        return [linear, found.up.linear]
    cuts = list(dict.fromkeys(factor.cuts[-1] for factor in (found.gate, found.up)))
    # Called in the statement that cuts, the linear stands before all that moves: it may be anything.
    beside = any(_statement(view, cut) is _statement(view, linear) for cut in cuts)
    return [linear, *cuts] if beside and view.expression(linear) is not None else cuts


def _check_order(view: ForwardView, nodes: list[fx.Node], whole: ast.expr) -> None:
    """The product comes last: it takes the values of this round of a loop, not of the one before.

    And whatever else it was given, in other rounds, was of one shape too.
    """
    places = [view.place(expression) for node in nodes if (expression := view.expression(node)) is not None]
    block, last = places[-1] or ([], 0)
    order = [e for statement in block[: last + 1] for e, _ in evaluation(statement)]
    before = order[: order.index(whole)] if whole in order else []
    for node in nodes[:-1]:
        if view.expression(node) not in before:
            why = f"the product takes {node.name} of an earlier round of the loop"
            raise Refused("not-this-function", why, whole.lineno)
    for node in view.nodes_at[whole]:
        shapes = [shape_of(inner) for inner in node.args if isinstance(inner, fx.Node)]
        if len(shapes) != 2 or shapes[0] != shapes[1]:
            raise Refused("layout", "the factors are not always of one shape", whole.lineno)


def _statement(view: ForwardView, node: fx.Node) -> ast.stmt | None:
    expression = view.expression(node)
    place = view.place(expression) if expression is not None else None
    return place[0][place[1]] if place else None


# -- the source -------------------------------------------------------------------------------


class _Place:
    """The product in the source: its two factors, and where the activation is called."""

    def __init__(self, whole: ast.expr, gate: ast.expr, up: ast.expr, call: ast.Call, value: ast.expr):
        self.whole, self.gate, self.up, self.call, self.value = whole, gate, up, call, value

    @classmethod
    def of(cls, view: ForwardView, found: Gated) -> "_Place":
        """Raises `Refused` where the text does not say what the graph does."""
        whole, call = view.expression(found.node), view.expression(found.act.node)
        line = line_of(found.node) or view.source.line
        if whole is None:
            raise Refused("module-escapes", "the product is no expression of the forward itself", line)
        operands = _operands(whole)
        if operands is None:
            why = f"the product is written as {view.text(whole)}"
            raise Refused("not-this-function", why, whole.lineno)
        first = found.node.args[0] is found.gate.node
        gate, up = operands if first else operands[::-1]
        assert isinstance(call, ast.Call)
        value = call.args[0] if call.args else call.func.value  # type: ignore[attr-defined]
        place = cls(whole, gate, up, call, value)
        if gate is not call:
            place._check_name(view)
        return place

    def _check_name(self, view: ForwardView) -> None:
        """The factor is a name that held the activated value, and nothing else reads that name."""
        whole, name = self.whole, self.gate
        if not isinstance(name, ast.Name):
            why = f"the product takes {view.text(self.gate)}, not {view.text(self.call)} or a name of it"
            raise Refused("module-escapes", why, whole.lineno)
        here, there = view.place(whole), view.place(self.call)
        if here is None or there is None or here[0] is not there[0]:
            why = f"{view.text(self.call)} and the product stand in different branches"
            raise Refused("different-branches", why, whole.lineno)
        block, first, last = here[0], there[1], here[1]
        if not _assigns(block[first], name.id, self.call):
            why = f"{name.id} is not simply {view.text(self.call)} at the product"
            raise Refused("module-escapes", why, whole.lineno)
        if not view.is_own_local(name.id):
            raise Refused("module-escapes", f"{name.id} is used by other code than the forward", name.lineno)
        for statement in block[first + 1 : last]:
            if name.id in _names(statement, (ast.Store, ast.Del)):
                why = f"{name.id} is stored again before the product"
                raise Refused("module-escapes", why, statement.lineno)
        read = self._read_elsewhere(view, name, block, first, last)
        if read is not None:
            why = f"{name.id}, the activated gate, is also read elsewhere"
            raise Refused("module-escapes", why, read.lineno)

    def _read_elsewhere(
        self, view: ForwardView, name: ast.Name, block: list[ast.stmt], first: int, last: int
    ) -> ast.Name | None:
        """A place that would see the gate without its activation in `name`."""
        allowed: set[ast.AST] = {name}
        if block is view.source.tree.body:  # runs once, from the top down
            for statement in block[: first + 1]:
                allowed.update(ast.walk(statement))
            if _assigns(block[last], name.id):
                for statement in block[last + 1 :]:
                    allowed.update(ast.walk(statement))
        for node in ast.walk(view.source.tree):
            if isinstance(node, ast.Name) and node.id == name.id and node not in allowed:
                if isinstance(node.ctx, ast.Load) or node in view.added_to:
                    return node
        return None

    def edits(self, view: ForwardView, names: dict[ast.Call, str], function: str, act: str) -> Iterator[Edit]:
        """The activation leaves its place for the product, and the linears' calls become `names`."""
        gate = _text(view, self.value, names) if self.gate is self.call else view.text(self.gate)
        fused = f"{function}({gate}, {_text(view, self.up, names)}, {act})"
        inside = set(ast.walk(self.whole))
        yield Edit(_with_parentheses(view, self.whole), fused)
        if self.gate is not self.call:
            bare = _text(view, self.value, names)
            yield Edit(Span.of(self.call), f"({bare})" if "\n" in bare else bare)
            inside |= set(ast.walk(self.call))
        for call, name in names.items():
            if call not in inside:
                yield Edit(Span.of(call), name)


def _operands(whole: ast.expr) -> tuple[ast.expr, ast.expr] | None:
    if isinstance(whole, ast.BinOp) and isinstance(whole.op, ast.Mult):
        return whole.left, whole.right
    if isinstance(whole, ast.Call) and not whole.keywords:
        if any(isinstance(argument, ast.Starred) for argument in whole.args):
            return None
        if len(whole.args) == 2:
            return whole.args[0], whole.args[1]
        if len(whole.args) == 1 and isinstance(whole.func, ast.Attribute):
            return whole.func.value, whole.args[0]
    return None


def _assigns(statement: ast.stmt, name: str, value: ast.expr | None = None) -> bool:
    """Whether a statement stores `value` (None: anything) in `name`, and what it likes in other names."""
    if not isinstance(statement, ast.Assign) or len(statement.targets) != 1:
        return False
    pairs = [(statement.targets[0], statement.value)]
    target, right = pairs[0]
    if isinstance(target, ast.Tuple) and isinstance(right, ast.Tuple) and len(target.elts) == len(right.elts):
        pairs = list(zip(target.elts, right.elts, strict=True))
    stored = [right for target, right in pairs if isinstance(target, ast.Name) and target.id == name]
    everywhere = [n for n in _names(statement, (ast.Store,)) if n == name]
    return len(stored) == len(everywhere) == 1 and (value is None or stored[0] is value)


def _names(statement: ast.stmt, contexts: tuple[type, ...]) -> list[str]:
    return [n.id for n in ast.walk(statement) if isinstance(n, ast.Name) and isinstance(n.ctx, contexts)]


def _text(view: ForwardView, expression: ast.expr, names: dict[ast.Call, str]) -> str:
    """The text of an expression with the calls in `names` replaced."""
    span = Span.of(expression)
    line, column, pieces = span.line, span.column, []
    inside = [node for node in ast.walk(expression) if node in names]
    for call in sorted(inside, key=lambda call: Span.of(call)):  # type: ignore[arg-type]
        here = Span.of(call)  # type: ignore[arg-type]
        pieces += [text_at(view.source.file_text, Span(line, column, here.line, here.column))]
        pieces += [names[call]]  # type: ignore[index]
        line, column = here.end_line, here.end_column
    return "".join(
        [*pieces, text_at(view.source.file_text, Span(line, column, span.end_line, span.end_column))]
    )


def _with_parentheses(view: ForwardView, whole: ast.expr) -> Span:
    """The span of a product, with the parentheses that `(a * b).to(dtype)` needs and a call does not."""
    span = Span.of(whole)
    is_value = any(
        isinstance(node, ast.Attribute) and node.value is whole for node in ast.walk(view.source.tree)
    )
    wider = Span(span.line, span.column - 1, span.end_line, span.end_column + 1)
    if is_value and isinstance(whole, ast.BinOp) and span.column:
        around = text_at(view.source.file_text, wider)
        if around[0] == "(" and around[-1] == ")":
            return wider
    return span
