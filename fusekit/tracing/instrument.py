"""The forward's own code with probes in it: which way each test went, what each name held.

Probes are calls put around expressions and after statements of a copy of the AST. Every other
expression keeps its place in the file, so the positions of the code stay those of the source.
"""

import ast
import copy
from collections.abc import Callable
from types import FunctionType
from typing import Any

from fusekit.forward import ForwardSource, Span
from fusekit.forward.compile import compile_def
from fusekit.forward.names import captured_names

TEST, BIND, OPERAND = "__fusekit_test__", "__fusekit_bind__", "__fusekit_operand__"


def instrumented(
    source: ForwardSource,
    test: Callable[[Span, Any], Any],
    bind: Callable[[int, str, Any], Any],
    operand: Callable[[Span, Any], Any],
) -> FunctionType:
    """The forward of `source`, undecorated, reporting as it runs.

    `test(span, value)` is called with each value that decides a branch, `bind(line, name,
    value)` when a name was stored (and returns the value), `operand(span, value)` with the operands of
    Python's operators and subscripts; `test` and `operand` return the value.
    """
    tree = copy.deepcopy(source.tree)
    _Probes(source.self_name).function(tree)
    names = {TEST: _by_span(test), BIND: bind, OPERAND: _by_span(operand)}
    return compile_def(tree, source.path, source, names)


def _by_span(probe: Callable[[Span, Any], Any]) -> Callable[..., Any]:
    def call(value: Any, *place: int) -> Any:
        return probe(Span(*place), value)

    return call


class _Probes(ast.NodeTransformer):
    def __init__(self, self_name: str):
        self.self_name = self_name

    def function(self, tree: ast.FunctionDef) -> None:
        tree.body = self.block(tree.body)

    def block(self, statements: list[ast.stmt]) -> list[ast.stmt]:
        done: list[ast.stmt] = []
        for statement in statements:
            done.append(self.visit(statement))
            done += [_bind(statement, name) for name in stored_names(statement)]
        return done

    # Names stored by the header of a compound statement are reported at the top of its body.
    def visit_For(self, node: ast.For) -> ast.For:
        node.iter = self.visit(node.iter)
        first = [_bind(node, name) for name in sorted(names_in(node.target))]
        node.body = [*first, *self.block(node.body)]
        node.orelse = self.block(node.orelse)
        return node

    def visit_With(self, node: ast.With) -> ast.With:
        names: set[str] = set()
        for item in node.items:
            item.context_expr = self.visit(item.context_expr)
            names |= names_in(item.optional_vars) if item.optional_vars else set()
        node.body = [*(_bind(node, name) for name in sorted(names)), *self.block(node.body)]
        return node

    def visit_Try(self, node: ast.Try) -> ast.Try:
        node.body, node.orelse = self.block(node.body), self.block(node.orelse)
        node.finalbody = self.block(node.finalbody)
        for handler in node.handlers:
            handler.body = self.block(handler.body)
        return node

    def visit_Match(self, node: ast.Match) -> ast.Match:
        node.subject = self.visit(node.subject)
        for case in node.cases:
            # The case that was taken is the test that was true.
            taken = ast.Expr(_probe(TEST, case.pattern, ast.Constant(True)))
            binds = [_bind(node, name) for name in sorted(captured_names(case.pattern))]
            if case.guard is not None:
                case.guard = _probe(TEST, case.guard, self.visit(case.guard))
            case.body = [_located(taken, case.pattern), *binds, *self.block(case.body)]
        return node

    def visit_If(self, node: ast.If) -> ast.If:
        node.test = _probe(TEST, node.test, self.visit(node.test))
        node.body, node.orelse = self.block(node.body), self.block(node.orelse)
        return node

    def visit_While(self, node: ast.While) -> ast.While:
        return self.visit_If(node)  # type: ignore[arg-type, return-value]

    def visit_IfExp(self, node: ast.IfExp) -> ast.IfExp:
        node.test = _probe(TEST, node.test, self.visit(node.test))
        node.body, node.orelse = self.visit(node.body), self.visit(node.orelse)
        return node

    def visit_Assert(self, node: ast.Assert) -> ast.Assert:
        node.test = _probe(TEST, node.test, self.visit(node.test))
        return node

    def visit_BoolOp(self, node: ast.BoolOp) -> ast.BoolOp:
        # The last operand decides nothing here: it is the value.
        node.values = [_probe(TEST, value, self.visit(value)) for value in node.values[:-1]] + [
            self.visit(node.values[-1])
        ]
        return node

    def visit_NamedExpr(self, node: ast.NamedExpr) -> ast.NamedExpr:
        value = self.visit(node.value)
        arguments = [ast.Constant(node.lineno), ast.Constant(node.target.id), value]
        node.value = _located(ast.Call(ast.Name(BIND, ast.Load()), arguments, []), node.value)
        return node

    def visit_comprehension(self, node: ast.comprehension) -> ast.comprehension:
        node.iter = self.visit(node.iter)
        node.ifs = [_probe(TEST, test, self.visit(test)) for test in node.ifs]
        return node

    def visit_BinOp(self, node: ast.BinOp) -> ast.BinOp:
        node.left = _probe(OPERAND, node.left, self.visit(node.left))
        node.right = _probe(OPERAND, node.right, self.visit(node.right))
        return node

    def visit_UnaryOp(self, node: ast.UnaryOp) -> ast.UnaryOp:
        node.operand = _probe(OPERAND, node.operand, self.visit(node.operand))
        return node

    def visit_Compare(self, node: ast.Compare) -> ast.Compare:
        node.left = _probe(OPERAND, node.left, self.visit(node.left))
        node.comparators = [_probe(OPERAND, right, self.visit(right)) for right in node.comparators]
        return node

    def visit_Subscript(self, node: ast.Subscript) -> ast.Subscript:
        if isinstance(node.ctx, ast.Load):
            node.value = _probe(OPERAND, node.value, self.visit(node.value))
            node.slice = self.visit(node.slice)
        return node

    # Code that runs later, or by another's will, is left as it is.
    def visit_Lambda(self, node: ast.Lambda) -> ast.Lambda:
        return node

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.FunctionDef:
        return node

    visit_AsyncFunctionDef = visit_ClassDef = visit_FunctionDef  # type: ignore[assignment]


def stored_names(statement: ast.stmt) -> list[str]:
    """The names that a simple statement stores."""
    targets: list[ast.expr] = []
    if isinstance(statement, ast.Assign):
        targets = statement.targets
    elif isinstance(statement, (ast.AnnAssign, ast.AugAssign)) and statement.value is not None:
        targets = [statement.target]
    return sorted({name for target in targets for name in names_in(target)})


def names_in(target: ast.expr) -> set[str]:
    """The names stored by an assignment's target."""
    return {n.id for n in ast.walk(target) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}


def _probe(name: str, place: ast.expr | ast.pattern, value: ast.expr) -> ast.expr:
    numbers = [place.lineno, place.col_offset, place.end_lineno, place.end_col_offset]
    call = ast.Call(ast.Name(name, ast.Load()), [value, *(ast.Constant(n) for n in numbers)], [])
    return _located(call, place)


def _bind(statement: ast.stmt, name: str) -> ast.stmt:
    call = ast.Call(
        ast.Name(BIND, ast.Load()),
        [ast.Constant(statement.lineno), ast.Constant(name), ast.Name(name, ast.Load())],
        [],
    )
    return _located(ast.Expr(call), statement)


def _located(node: Any, place: ast.AST) -> Any:
    ast.copy_location(node, place)
    return ast.fix_missing_locations(node)
