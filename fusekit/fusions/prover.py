"""The one prover: may these evaluations happen together, before the first of them?

Its rule is narrow and never wrong. From the start of the first statement to the last wanted
evaluation, nothing may happen on any way but the wanted evaluations and what a `Reading` passes. None
of that runs foreign code, writes a tensor, draws a random number or changes the grad mode, so an
evaluation that moves across it sees the same input and gives the same value.

An `if` between them is read in both arms, also in the one that the trace did not take: what decides it
may change later.
"""

import ast
from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import fx

from fusekit.forward import Span
from fusekit.forward.reads import attribute_chain
from fusekit.forward.rewriting import blocks_of
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
    in_arms: frozenset[ast.expr] = frozenset()  # those that happen only where a setting says so


def movable(view: ForwardView, nodes: Sequence[fx.Node], inputs: frozenset[str], arms: bool = False) -> Proof:
    """Prove that the evaluations of `nodes` may all happen right before the first one's statement.

    `inputs` are the names that the text put there will read. With `arms`, some of the evaluations may
    stand in arms of an `if` that a setting of the module decides, and be made for nothing where it says
    otherwise; at least one must happen on every way. Raises `Refused` with the reason and the line that
    decides.
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
    statements = _region(view, list(wanted), arms)
    reading = Reading(view, frozenset(wanted), inputs)
    reading.suppose(statements)
    walk = _Walk(view, reading, frozenset(inputs | {view.source.self_name}), set(wanted))
    if not walk.block(statements, ()):
        raise Refused(
            "different-branches", "the parts are not evaluated in one run of statements", statements[0].lineno
        )
    if not walk.sure:
        raise _in_different("different-branches", "branches", view, list(wanted))
    reading.settle()
    _nothing_unseen(view, nodes, reading)
    return Proof(
        statements[0],
        frozenset(reading.norms),
        frozenset(reading.activations),
        frozenset(reading.linears),
        frozenset(walk.in_arms),
    )


@dataclass
class _Walk:
    """The statements of a region in the order of their evaluation, until nothing is left to find."""

    view: ForwardView
    reading: Reading
    inputs: frozenset[str]
    left: set[ast.expr]
    sure: bool = False  # one of the wanted was evaluated, whichever way was taken
    in_arms: set[ast.expr] = field(default_factory=set)

    def block(self, statements: Block, tests: tuple[ast.expr, ...]) -> bool:
        """Whether everything wanted was found; `tests` are those of the arms that this stands in."""
        for statement in statements:
            if isinstance(statement, ast.If):
                if self._branches(statement, tests):
                    return True
                continue
            if tests and isinstance(statement, ast.Return) and not self.left <= set(ast.walk(statement)):
                raise Refused(
                    "different-branches",
                    f"{self.view.text(statement)} may end the forward between the parts",
                    statement.lineno,
                )
            self.reading.statement(statement)
            if not any(node in self.left for node in ast.walk(statement)):
                _check_rebinding(self.view, statement, self.inputs)
            if self._expressions(statement, tests):
                return True
            self.reading.stored(statement)
            _check_rebinding(self.view, statement, self.inputs)
        return False

    def _branches(self, statement: ast.If, tests: tuple[ast.expr, ...]) -> bool:
        if self._expressions(statement.test, tests):
            return True
        if not _is_setting(statement.test, self.view.source.self_name):
            inside = (node for inner in blocks_of(statement) for one in inner for node in ast.walk(one))
            for expression in (node for node in inside if node in self.left):
                text = " ".join(self.view.text(statement.test).split())
                raise Refused(
                    "different-branches",
                    f"{self.view.text(expression)} is evaluated only where {text} says so, which each call "  # type: ignore[arg-type]
                    "decides anew",
                    expression.lineno,  # type: ignore[attr-defined]
                )
        self.reading.truth(statement.test)
        truth = self.view.trace.branches.get(Span.of(statement.test))
        was_seen = self.reading.is_seen
        for arm, way in ((statement.body, True), (statement.orelse, False)):
            if self.sure and self._only_raises(arm):
                continue  # nothing wanted happens after it
            self.reading.is_seen = was_seen and truth in (None, way)
            if self.block(arm, (*tests, statement.test)):
                return True
        self.reading.is_seen = was_seen
        return False

    def _only_raises(self, arm: Block) -> bool:
        if not arm or not isinstance(arm[-1], ast.Raise):
            return False
        return not any(node in self.left for statement in arm for node in ast.walk(statement))

    def _expressions(self, node: ast.AST, tests: tuple[ast.expr, ...]) -> bool:
        view = self.view
        for expression, conditional in evaluation(node):
            if expression not in self.reading.wanted:
                self.reading.expression(expression)
                continue
            if conditional:
                raise Refused(
                    "different-branches",
                    f"{view.text(expression)} is evaluated only sometimes",
                    expression.lineno,
                )
            if tests:
                self.in_arms.add(expression)
            else:
                self.sure = True
            self.left.discard(expression)
            if not self.left:
                return True
        return False


def _is_setting(test: ast.expr, own: str) -> bool:
    """Whether a test asks for attributes of the module alone, and not for its mode."""
    if isinstance(test, ast.BoolOp):
        return all(_is_setting(value, own) for value in test.values)
    if isinstance(test, ast.UnaryOp):
        return _is_setting(test.operand, own)
    if isinstance(test, ast.Compare):
        return all(_is_setting(value, own) for value in (test.left, *test.comparators))
    if isinstance(test, (ast.Tuple, ast.List)):
        return all(_is_setting(value, own) for value in test.elts)
    chain = attribute_chain(test, own)
    return isinstance(test, ast.Constant) or (bool(chain) and chain[-1] != "training")


def _same_context(nodes: Sequence[fx.Node]) -> None:
    for node in nodes[1:]:
        if node.meta["context"] != nodes[0].meta["context"]:
            raise Refused(
                "different-context",
                f"{nodes[0].target} and {node.target} run under different grad modes or autocast states",
                node.meta["span"].line,
            )


def _region(view: ForwardView, expressions: list[ast.expr], arms: bool) -> list[ast.stmt]:
    """The statements from the first of `expressions` to the last, of the innermost block around all."""
    chains = []
    for expression in expressions:
        chain = view.chain(expression)
        if not chain:
            raise Refused(
                "different-branches",
                f"{view.text(expression)} stands in a comprehension, lambda or nested function",
                expression.lineno,
            )
        chains.append(chain)
    depth = 0
    while all(depth < len(chain) and chain[depth][0] is chains[0][depth][0] for chain in chains):
        depth += 1
    block = chains[0][depth - 1][0]
    for chain in chains:
        for around, index in chain[depth - 1 : -1]:
            if isinstance(around[index], (ast.With, ast.AsyncWith)):
                raise _in_different("different-context", "with blocks", view, expressions)
            if not arms or not isinstance(around[index], ast.If):
                raise _in_different("different-branches", "branches", view, expressions)
    indices = [chain[depth - 1][1] for chain in chains]
    return block[min(indices) : max(indices) + 1]


def _in_different(reason: str, where: str, view: ForwardView, expressions: list[ast.expr]) -> Refused:
    first = view.place(expressions[0])
    others = [other for other in expressions if (place := view.place(other)) and place[0] is not first[0]]  # type: ignore[index]
    one, other = expressions[0], (others or expressions)[-1]
    return Refused(
        reason, f"{view.text(one)} and {view.text(other)} stand in different {where}", other.lineno
    )


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
