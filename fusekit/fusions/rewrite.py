"""A group of nodes replaced by one call: what a user's own fusion asks for, proven as ours are."""

import ast
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx

from fusekit.errors import FusekitError
from fusekit.forward import Edit, Span
from fusekit.forward.reads import global_names
from fusekit.forward.span import lines_of
from fusekit.fusions.match import Match, Refused
from fusekit.fusions.prover import movable
from fusekit.fusions.reading import RANDOM
from fusekit.fusions.view import ForwardView, line_of
from fusekit.tracing.schema import node_effect, operator_name

CONSTANTS = (int, float, bool, str, type(None))


@dataclass(frozen=True)
class Attribute:
    """What lies on the module, a submodule, a parameter or a setting, as the text behind `self`."""

    text: str


def rewrite(
    view: ForwardView,
    fusion: str,
    nodes: Sequence[fx.Node],
    function: Callable[..., Any],
    arguments: Sequence[Any],
) -> Match:
    """`function(*arguments)` in the place of `nodes`, the last of which gives the result.

    Raises `Refused` where the forward may tell the difference, whatever `function` computes.
    """
    order = {node: index for index, node in enumerate(view.trace.graph.nodes)}
    nodes = sorted(set(nodes), key=lambda node: order[node])
    for node in nodes:
        _is_pure(view, node)
    for node in nodes[:-1]:
        _is_used_only_by(node, set(nodes))
    proof = movable(view, nodes, frozenset())
    whole = view.expression(nodes[-1])
    assert whole is not None  # movable asked for it
    for part in proof.in_arms:
        why = f"{view.text(part)} stands in an arm of an if that lies between the parts"
        raise Refused("different-branches", why, part.lineno)
    inner = {expression for node in nodes[:-1] if (expression := view.expression(node)) is not None}
    removed = _removed(view, inner, whole)
    for statement in removed:
        _is_not_read_elsewhere(view, statement, whole, [whole, *removed])
    texts = [_text(view, nodes, argument, removed) for argument in arguments]
    called = getattr(function, "__name__", fusion)
    name = view.new_name(called if called.isidentifier() else fusion)  # a lambda has no name
    edits = [Edit(Span.of(whole), f"{name}({', '.join(texts)})")]
    edits += [_removal(view, statement) for statement in removed]
    calls = tuple(dict.fromkeys(str(node.target) for node in nodes if node.op == "call_module"))
    return Match(
        fusion,
        calls,
        tuple(sorted(edits)),
        whole.lineno,
        called=proof.called - frozenset(calls),
        functions=((name, function),),
        replaced=frozenset(calls),
    )


# -- what may be replaced ------------------------------------------------------------------------


def _is_pure(view: ForwardView, node: fx.Node) -> None:
    """A node that writes or draws at random, now or in the other mode, cannot be taken out of the forward."""
    line = line_of(node)
    effect = node_effect(node)
    if node.op not in ("call_module", "call_function", "call_method"):
        raise Refused("not-this-function", f"{node.name} is no call: there is nothing to replace", line)
    if node.meta.get("written") or (effect is not None and effect.writes):
        raise Refused("input-written", f"{node.name} writes in place: it cannot be replaced", line)
    if operator_name(node) in RANDOM:
        raise Refused("not-this-function", f"{node.name} draws random numbers: it cannot be replaced", line)
    if node.op == "call_module":
        for child in view.module.get_submodule(str(node.target)).modules():
            if "training" in global_names(type(child).forward.__code__):
                why = f"{node.target} does something else in training (a {type(child).__name__})"
                raise Refused("not-this-function", f"{why}: it cannot be replaced", line)


def _is_used_only_by(node: fx.Node, nodes: set[fx.Node]) -> None:
    for user in node.users:
        if user not in nodes:
            raise Refused(
                "module-escapes",
                f"{node.name} is also used by {user.name}, which is not replaced",
                line_of(user) or line_of(node),
            )


def _removed(view: ForwardView, inner: set[ast.expr], whole: ast.expr) -> list[ast.Assign]:
    """The statements `name = <inner>` that hold what is replaced and is not written inside of `whole`."""
    end = view.place(whole)
    assert end is not None  # movable found it
    found: dict[ast.Assign, None] = {}
    for expression in sorted(inner, key=lambda node: (node.lineno, node.col_offset)):
        if any(node is expression for node in ast.walk(whole)):
            continue
        place = view.place(expression)
        assert place is not None
        statement = place[0][place[1]]
        names = isinstance(statement, ast.Assign) and len(statement.targets) == 1
        if (
            not names
            or not isinstance(statement, ast.Assign)
            or not isinstance(statement.targets[0], ast.Name)
            or statement.value not in inner
        ):
            raise Refused(
                "module-escapes",
                f"{view.text(expression)} is neither part of {view.text(whole)} nor the value of a name of "
                "its own",
                expression.lineno,
            )
        if place[0] is not end[0]:
            why = f"{view.text(expression)} and {view.text(whole)} stand in different branches"
            raise Refused("different-branches", why, expression.lineno)
        found[statement] = None
    return list(found)


def _is_not_read_elsewhere(
    view: ForwardView, statement: ast.Assign, whole: ast.expr, replaced: list[ast.AST]
) -> None:
    """Refuse where the name that a removed statement stores may be read outside of what is replaced."""
    target = statement.targets[0]
    assert isinstance(target, ast.Name)
    block, last = view.place(whole)  # type: ignore[misc]
    gone = {node for tree in replaced for node in ast.walk(tree)}
    rest = block[last]
    stored_again = isinstance(rest, ast.Assign) and any(
        isinstance(node, ast.Name) and node.id == target.id for node in rest.targets
    )
    around = [
        type(node)
        for node in ast.walk(view.source.tree)
        if isinstance(node, (ast.For, ast.While, ast.Try)) and any(inner is rest for inner in ast.walk(node))
    ]
    shared = not view.is_own_local(target.id)
    between = Span.of(statement), Span.of(rest)
    for node in ast.walk(view.source.tree):
        if not isinstance(node, ast.Name) or node.id != target.id or node in gone:
            continue
        if isinstance(node.ctx, ast.Store) and node not in view.added_to and not shared:
            continue
        span = Span.of(node)
        before, after = span < between[0], span.line > between[1].end_line
        unread = (stored_again and (before or after)) or (before and not around)
        if shared or ast.Try in around or not unread:
            why = f"{target.id}, which {view.text(statement)} stores, is also read in line {node.lineno}"
            raise Refused("module-escapes", why, node.lineno)


def _removal(view: ForwardView, statement: ast.stmt) -> Edit:
    """The statement taken out, with its line where it has one to itself."""
    span = Span.of(statement)
    lines = lines_of(view.source.file_text)
    _, _, begins = view.statement_start(statement)
    behind = lines[span.end_line - 1].encode()[span.end_column :].decode().strip()
    if begins and (not behind or behind.startswith("#")):
        return Edit(Span(span.line, 0, span.end_line + 1, 0), "")
    return Edit(span, "pass")


# -- what it is replaced by ----------------------------------------------------------------------


def _text(view: ForwardView, nodes: Sequence[fx.Node], argument: Any, removed: list[ast.Assign]) -> str:
    """An argument of the call as it is written in the forward."""
    if isinstance(argument, Attribute):
        return f"{view.source.self_name}{argument.text}"
    if isinstance(argument, CONSTANTS):
        return repr(argument)
    if not isinstance(argument, fx.Node):
        raise FusekitError(
            f"{argument!r} cannot be an argument of a rewrite: pass a node of the graph, "
            "forward.attribute(path), or a number, string or None"
        )
    if argument in nodes:
        raise FusekitError(f"{argument.name} is replaced by the rewrite: it cannot be an argument of it too")
    for node in nodes:
        if argument in node.all_input_nodes:
            operand = _operand(view, node, argument)
            if operand is not None:
                _holds_until(view, operand, nodes, removed)
                return view.text(operand)
    raise Refused(
        "module-escapes", f"{argument.name} stands as no operand of what is replaced", line_of(nodes[-1])
    )


def _operand(view: ForwardView, node: fx.Node, wanted: fx.Node) -> ast.expr | None:
    """The expression that gives `node` its input `wanted`."""
    expression = view.expression(node)
    given: list[tuple[Any, ast.expr]] = []
    if isinstance(expression, ast.BinOp):
        given = list(zip(node.args, (expression.left, expression.right), strict=False))
    elif isinstance(expression, ast.UnaryOp):
        given = list(zip(node.args, (expression.operand,), strict=False))
    elif isinstance(expression, ast.Call) and not any(isinstance(a, ast.Starred) for a in expression.args):
        positional = list(expression.args)
        if node.op == "call_method" and isinstance(expression.func, ast.Attribute):
            positional.insert(0, expression.func.value)
        given = list(zip(node.args, positional, strict=False))
        given += [(node.kwargs.get(k.arg), k.value) for k in expression.keywords if k.arg]
    return next((operand for value, operand in given if value is wanted), None)


def _holds_until(
    view: ForwardView, operand: ast.expr, nodes: Sequence[fx.Node], removed: list[ast.Assign]
) -> None:
    """Refuse where `operand` would give another value in the place of the last of `nodes`."""
    made = {view.expression(node) for node in nodes}
    if any(node in made for node in ast.walk(operand)):
        why = f"{view.text(operand)} holds a part of what is replaced"
        raise Refused("module-escapes", why, operand.lineno)
    names = {node.id for node in ast.walk(operand) if isinstance(node, ast.Name)}
    place, end = view.place(operand), view.place(view.expression(nodes[-1]))  # type: ignore[arg-type]
    assert place is not None and end is not None
    for statement in end[0][place[1] : end[1]]:
        for stored in ast.walk(statement) if statement not in removed else ():
            if isinstance(stored, ast.Name) and stored.id in names and not isinstance(stored.ctx, ast.Load):
                why = f"{stored.id} is stored again between the parts: {view.text(statement)}"
                raise Refused("input-rebound", why, stored.lineno)
