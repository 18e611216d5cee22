"""The one prover: may these evaluations happen together, before the first of them?

Its rule is narrow and never wrong. From the start of the first statement to the last wanted
evaluation, nothing may happen but: the wanted evaluations, calls of plain linears and of
submodules that the plan proves to be RMSNorms, reads of names and metadata, Python arithmetic on
numbers and sizes, and torch operators whose schema says that they write nothing. None of these
writes a tensor, draws a random number or changes the grad mode, so an evaluation that moves
across them sees the same input and gives the same value.
"""

import ast
from collections.abc import Sequence
from dataclasses import dataclass

import torch.nn as nn
from torch import fx

from fusekit.forward import Span
from fusekit.forward.reads import DYNAMIC, MISSING, attribute_chain, resolve
from fusekit.fusions.match import Refused
from fusekit.fusions.view import ForwardView, evaluation
from fusekit.tracing.instrument import names_in
from fusekit.tracing.schema import node_effect, operator_name

METADATA_ATTRS = frozenset({"shape", "dtype", "device", "ndim", "layout", "requires_grad", "is_cuda"})
METADATA_CALLS = frozenset({"size", "dim", "numel", "is_floating_point", "get_device", "element_size"})
NUMBERS = frozenset({"int", "float", "bool", "str", "NoneType", "Size", "tuple", "list", "dtype", "device"})
RANDOM = frozenset(
    {"dropout", "bernoulli", "multinomial", "rand_like", "randn_like", "randint_like", "alpha_dropout"}
)
PURE_CALLS = frozenset({"len", "int", "float", "bool", "tuple", "max", "min"})


@dataclass(frozen=True)
class Proof:
    """Where the wanted evaluations may happen together, and what the proof leans on."""

    statement: ast.stmt  # before it
    norms: frozenset[str]
    linears: frozenset[str]


def movable(view: ForwardView, nodes: Sequence[fx.Node], inputs: frozenset[str]) -> Proof:
    """Prove that the evaluations of `nodes` may all happen right before the first one's statement.

    `inputs` are the names that the text put there will read. Raises `Refused` with the reason and the line that decides.
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
    left = set(wanted)
    norms: set[str] = set()
    linears: set[str] = set()
    for statement in statements:
        _check_statement(statement)
        for expression, conditional in evaluation(statement):
            if expression in wanted:
                if conditional:
                    raise Refused(
                        "different-branches",
                        f"{view.text(expression)} is evaluated only sometimes",
                        expression.lineno,
                    )
                left.discard(expression)
                if not left:
                    return Proof(statements[0], frozenset(norms), frozenset(linears))
            else:
                _check(view, expression, wanted, norms, linears)
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
            raise Refused(
                "different-branches",
                f"{view.text(expressions[0])} and {view.text(expression)} stand in different branches",
                expression.lineno,
            )
        first, last = min(first, place[1]), max(last, place[1])
    assert block is not None
    return block[first : last + 1]


def _check_statement(statement: ast.stmt) -> None:
    """Only statements that store plain names, or nothing."""
    ok = isinstance(statement, (ast.Return, ast.Expr, ast.Pass))
    if isinstance(statement, ast.Assign):
        ok = all(_stores_names(target) for target in statement.targets)
    elif isinstance(statement, ast.AnnAssign):
        ok = _stores_names(statement.target)
    if not ok:
        what = type(statement).__name__.lower()
        if isinstance(statement, ast.AugAssign):
            what = f"{ast.unparse(statement)}, which may write in place"
        elif isinstance(statement, (ast.Assign, ast.AnnAssign)):
            what = f"{ast.unparse(statement)}, which stores into an object"
        raise Refused("input-may-be-written", f"between the parts stands {what}", statement.lineno)


def _stores_names(target: ast.expr) -> bool:
    if isinstance(target, (ast.Tuple, ast.List)):
        return all(_stores_names(item) for item in target.elts)
    if isinstance(target, ast.Starred):
        return _stores_names(target.value)
    return isinstance(target, ast.Name)


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


def _check(
    view: ForwardView,
    expression: ast.expr,
    wanted: dict[ast.expr, fx.Node],
    norms: set[str],
    linears: set[str],
) -> None:
    """Raise unless evaluating `expression` (its operands aside) can touch nothing."""
    if isinstance(
        expression, (ast.Name, ast.Constant, ast.Tuple, ast.List, ast.Slice, ast.Starred, ast.keyword)
    ):
        return
    if isinstance(expression, (ast.BoolOp, ast.IfExp)):
        return  # the truth of a tensor would have stopped the trace
    nodes = view.nodes_at.get(expression, [])
    if isinstance(expression, ast.Attribute):
        return _check_attribute(view, expression, nodes)
    if isinstance(expression, ast.Call):
        return _check_call(view, expression, nodes, norms, linears)
    if isinstance(expression, (ast.BinOp, ast.UnaryOp, ast.Compare, ast.Subscript)):
        if nodes:
            return _check_operator(view, expression, nodes)
        if _on_numbers(view, expression):
            return
    raise Refused(
        "input-may-be-written",
        f"{view.text(expression)} runs between the parts, and is not known to write nothing",
        expression.lineno,
    )


def _check_attribute(view: ForwardView, expression: ast.Attribute, nodes: list[fx.Node]) -> None:
    if nodes:  # x.T and the like
        return _check_operator(view, expression, nodes)
    if expression.attr in METADATA_ATTRS:
        return
    chain = attribute_chain(expression, view.source.self_name)
    if chain and resolve(view.module, chain) not in (MISSING, DYNAMIC):
        return
    if isinstance(expression.ctx, ast.Load) and _is_method_name(view, expression):
        return
    raise Refused(
        "input-may-be-written",
        f"reading {view.text(expression)} between the parts may run code",
        expression.lineno,
    )


def _is_method_name(view: ForwardView, expression: ast.Attribute) -> bool:
    """Whether the attribute is the method of a call that is checked itself."""
    return any(isinstance(call, ast.Call) and call.func is expression for call in ast.walk(view.source.tree))


def _check_call(
    view: ForwardView, call: ast.Call, nodes: list[fx.Node], norms: set[str], linears: set[str]
) -> None:
    name = view.text(call.func)
    if len(nodes) == 1 and nodes[0].meta.get("direct"):
        node = nodes[0]
        if node.op == "call_module":
            path = str(node.target)
            module = view.submodule(path)
            if type(module) is nn.Linear:
                linears.add(path)
                return
            norms.add(path)  # the plan proves it, or refuses the site
            return
        return _check_operator(view, call, nodes)
    if not nodes:
        if isinstance(call.func, ast.Attribute) and call.func.attr in METADATA_CALLS:
            return
        if (
            isinstance(call.func, ast.Name)
            and call.func.id in PURE_CALLS
            and call.func.id not in view.names - {call.func.id}
        ):
            return
    raise Refused(
        "input-may-be-written",
        f"{name}() is called between the parts, and is not known to leave their input alone",
        call.lineno,
    )


def _check_operator(view: ForwardView, expression: ast.expr, nodes: list[fx.Node]) -> None:
    for node in nodes:
        effect = node_effect(node)
        text = view.text(expression)
        if effect is None or not node.meta.get("direct"):
            if (
                effect is None
                and node.op == "call_function"
                and node.target is not None
                and _is_getitem(node)
            ):
                continue
            raise Refused(
                "input-may-be-written",
                f"{text} runs between the parts, and is not known to leave their input alone",
                expression.lineno,
            )
        if effect.writes:
            raise Refused("input-written", f"{text} writes in place between the parts", expression.lineno)
        if operator_name(node) in RANDOM:
            raise Refused(
                "input-may-be-written", f"{text} draws random numbers between the parts", expression.lineno
            )


def _is_getitem(node: fx.Node) -> bool:
    return getattr(node.target, "__name__", "") == "getitem"


def _on_numbers(view: ForwardView, expression: ast.expr) -> bool:
    """Whether the trace saw this operator applied to numbers, sizes and tuples only."""
    operands: list[ast.expr]
    if isinstance(expression, ast.BinOp):
        operands = [expression.left, expression.right]
    elif isinstance(expression, ast.UnaryOp):
        operands = [expression.operand]
    elif isinstance(expression, ast.Compare):
        if all(isinstance(op, (ast.Is, ast.IsNot)) for op in expression.ops):
            return True
        operands = [expression.left, *expression.comparators]
    elif isinstance(expression, ast.Subscript):
        operands = [expression.value]
    else:
        return False
    for operand in operands:
        seen = view.trace.operands.get(Span.of(operand))
        if not seen or not {kind.__name__ for kind in seen} <= NUMBERS:
            return False
    return True
