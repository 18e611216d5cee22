"""The one prover: may these evaluations happen together, before the first of them?

Its rule is narrow and never wrong. From the start of the first statement to the last wanted
evaluation, nothing may happen but the wanted evaluations and what a `Reading` passes. None of that
runs foreign code, writes a tensor, draws a random number or changes the grad mode, so an
evaluation that moves across it sees the same input and gives the same value.
"""

import ast
from collections.abc import Sequence
from dataclasses import dataclass

from torch import fx

from fusekit.fusions.match import Refused
from fusekit.fusions.reading import Reading
from fusekit.fusions.view import UNEVALUATED, Block, ForwardView, evaluation
from fusekit.tracing.instrument import names_in


@dataclass(frozen=True)
class Proof:
    """Where the wanted evaluations may happen together, and what the proof leans on."""

    statement: ast.stmt  # before it
    norms: frozenset[str]
    activations: frozenset[str]
    linears: frozenset[str]


def movable(view: ForwardView, nodes: Sequence[fx.Node], inputs: frozenset[str]) -> Proof:
    """Prove that the evaluations of `nodes` may all happen right before the first one's statement.

    `inputs` are the names that the text put there will read. Raises `Refused` with the reason and the
    line that decides.
    """
    wanted: dict[ast.expr, fx.Node] = {}
    for node in nodes:
        expression = view.expression(node)
        if expression is None or expression in wanted:
            span = node.meta.get("span")
            raise Refused(
                "module-escapes",
                f"{node.target} is not called by an expression of its own in the forward",
                span.line if span else view.source.line,
            )
        wanted[expression] = node
    _same_context(nodes)
    statements = _region(view, list(wanted))
    reading = Reading(view, frozenset(wanted))
    inputs |= {view.source.self_name}
    left = set(wanted)
    for statement in statements:
        reading.statement(statement)
        for expression, conditional in evaluation(statement):
            if expression not in wanted:
                reading.expression(expression)
                continue
            if conditional:
                raise Refused(
                    "different-branches",
                    f"{view.text(expression)} is evaluated only sometimes",
                    expression.lineno,
                )
            left.discard(expression)
            if not left:
                _nothing_unseen(view, nodes, reading)
                found = (reading.norms, reading.activations, reading.linears)
                return Proof(statements[0], *map(frozenset, found))
        _check_rebinding(view, statement, inputs)
    raise Refused(
        "different-branches", "the parts are not evaluated in one run of statements", statements[0].lineno
    )


def _same_context(nodes: Sequence[fx.Node]) -> None:
    for node in nodes[1:]:
        if node.meta["context"] != nodes[0].meta["context"]:
            raise Refused(
                "different-context",
                f"{nodes[0].target} and {node.target} run under different grad modes or autocast states",
                node.meta["span"].line,
            )


def _region(view: ForwardView, expressions: list[ast.expr]) -> list[ast.stmt]:
    """The statements of one block from the first of `expressions` to the last."""
    places = [(expression, view.place(expression)) for expression in expressions]
    block, first, last = None, 0, 0
    for expression, place in places:
        if place is None:
            raise Refused(
                "different-branches",
                f"{view.text(expression)} stands in a comprehension, lambda or nested function",
                expression.lineno,
            )
        if block is None:
            block, first, last = place[0], place[1], place[1]
        elif place[0] is not block:
            if _is_with_body(view, block) or _is_with_body(view, place[0]):
                raise Refused(
                    "different-context",
                    f"{view.text(expressions[0])} and {view.text(expression)} stand in different with blocks",
                    expression.lineno,
                )
            raise Refused(
                "different-branches",
                f"{view.text(expressions[0])} and {view.text(expression)} stand in different branches",
                expression.lineno,
            )
        first, last = min(first, place[1]), max(last, place[1])
    assert block is not None
    return block[first : last + 1]


def _is_with_body(view: ForwardView, block: Block) -> bool:
    return any(isinstance(node, ast.With) and node.body is block for node in ast.walk(view.source.tree))


def _check_rebinding(view: ForwardView, statement: ast.stmt, inputs: frozenset[str]) -> None:
    targets: list[ast.expr] = []
    if isinstance(statement, ast.Assign):
        targets = statement.targets
    elif isinstance(statement, ast.AnnAssign):
        targets = [statement.target]
    for name in sorted({name for target in targets for name in names_in(target)} & inputs):
        raise Refused(
            "input-rebound",
            f"{name} is stored again between the parts: {view.text(statement)}",
            statement.lineno,
        )


def _nothing_unseen(view: ForwardView, nodes: Sequence[fx.Node], reading: Reading) -> None:
    """The second witness: what the trace saw between the parts came from expressions that were checked."""
    order = {node: index for index, node in enumerate(view.trace.graph.nodes)}
    places = sorted(order[node] for node in nodes)
    for node, index in order.items():
        if places[0] < index < places[-1] and node.op not in UNEVALUATED:
            made_by = view.expression_at(node)
            if made_by not in reading.passed and made_by not in reading.wanted:
                span = node.meta.get("span")
                raise Refused(
                    "input-may-be-written",
                    f"{node.name} runs between the parts, out of no expression there",
                    span.line if span else view.source.line,
                )
