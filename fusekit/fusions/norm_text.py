"""Questions about the text of a norm: what its branches ask, how its parameters are declared."""

import ast
import types
from typing import Any

import torch

from fusekit.forward.reads import MISSING, attribute_chain, resolve
from fusekit.fusions.norm_graph import Norm
from fusekit.fusions.reading import SCALARS, reads_plainly
from fusekit.fusions.view import ForwardView

OPPOSITE = {ast.Is: "is not", ast.IsNot: "is", ast.In: "not in", ast.NotIn: "in"}


def asks_weight_dtype(view: ForwardView, norm: Norm, test: ast.expr) -> bool:
    """Whether a test compares the dtype of the weight with constant dtypes, and asks nothing else."""
    if isinstance(test, ast.BoolOp):
        return all(asks_weight_dtype(view, norm, value) for value in test.values)
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        return asks_weight_dtype(view, norm, test.operand)
    if not isinstance(test, ast.Compare) or norm.weight is None:
        return False
    weight = (*str(norm.weight.target).split("."), "dtype")
    operands = [test.left, *test.comparators]
    asked = [side for side in operands if attribute_chain(side, view.source.self_name) == weight]
    return bool(asked) and all(side in asked or _is_dtypes(view, side) for side in operands)


def asks_state(view: ForwardView, gate: str | None, test: ast.expr) -> bool:
    """Whether a test reads the module's own plain state alone, so that it can be asked at the top.

    `gate` is the name of an input that may be asked whether it is None.
    """
    if isinstance(test, ast.BoolOp):
        return all(asks_state(view, gate, value) for value in test.values)
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        return asks_state(view, gate, test.operand)
    if not isinstance(test, ast.Compare):
        return _is_state(view, test, SCALARS)
    operands = [test.left, *test.comparators]
    if all(isinstance(op, (ast.Is, ast.IsNot)) for op in test.ops):
        return any(map(is_none, operands)) and all(
            _is_state(view, side, (object,)) or _is_input(view, side, gate) for side in operands
        )
    return all(_is_state(view, side, SCALARS) or _is_dtypes(view, side) for side in operands)


def _is_state(view: ForwardView, expression: ast.expr, kinds: tuple[type, ...]) -> bool:
    if isinstance(expression, ast.Constant):
        return True
    chain = attribute_chain(expression, view.source.self_name)
    plain = bool(chain) and reads_plainly(view.module, chain)
    return plain and isinstance(resolve(view.module, chain), kinds)


def _is_input(view: ForwardView, expression: ast.expr, name: str | None) -> bool:
    """Whether an expression is an input under whose name nothing else is ever stored."""
    return isinstance(expression, ast.Name) and expression.id == name and len(view.stores(name)) == 1


def _is_dtypes(view: ForwardView, expression: ast.expr) -> bool:
    if isinstance(expression, (ast.Tuple, ast.List, ast.Set)):
        return all(_is_dtypes(view, item) for item in expression.elts)
    return isinstance(global_value(view, expression), torch.dtype)


def global_value(view: ForwardView, expression: ast.expr) -> Any:
    """The value of `name` or `module.name` where `name` is a global of the forward, else MISSING."""
    base, names = expression, []
    while isinstance(base, ast.Attribute):
        names.append(base.attr)
        base = base.value
    if not isinstance(base, ast.Name) or view.stores(base.id):
        return MISSING
    value: Any = view.source.chain[-1].__globals__.get(base.id, MISSING)
    while names and isinstance(value, types.ModuleType):
        value = vars(value).get(names.pop(), MISSING)
    return value if not names else MISSING


def is_docstring(statement: ast.stmt) -> bool:
    """Whether a statement is a text alone."""
    return (
        isinstance(statement, ast.Expr)
        and isinstance(statement.value, ast.Constant)
        and isinstance(statement.value.value, str)
    )


def parameters(tree: ast.FunctionDef) -> list[ast.arg]:
    """Every parameter of a function but its first."""
    arguments = tree.args
    found = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs][1:]
    return found + [argument for argument in (arguments.vararg, arguments.kwarg) if argument is not None]


def is_parameter(tree: ast.FunctionDef, name: str) -> bool:
    """Whether a function has a parameter of this name."""
    return any(argument.arg == name for argument in parameters(tree))


def default_of(tree: ast.FunctionDef, name: str) -> ast.expr | None:
    """The default of a parameter, as it is written."""
    positional = [*tree.args.posonlyargs, *tree.args.args]
    pairs = list(zip(reversed(positional), reversed(tree.args.defaults), strict=False))
    pairs += list(zip(tree.args.kwonlyargs, tree.args.kw_defaults, strict=True))  # type: ignore[arg-type]
    return next((default for argument, default in pairs if argument.arg == name), None)


def is_literal(expression: ast.expr | None) -> bool:
    """Whether an expression is a constant, or one with a sign."""
    inner = expression.operand if isinstance(expression, ast.UnaryOp) else expression
    return isinstance(inner, ast.Constant)


def constant(expression: ast.expr) -> str | None:
    """A constant as Python writes it, None for what is none."""
    return repr(expression.value) if isinstance(expression, ast.Constant) else None


def sides(expression: ast.expr | None, is_call: bool) -> list[ast.expr]:
    """The expressions that could be eps where it is added, or where torch's own rms_norm takes it."""
    if isinstance(expression, ast.BinOp):
        return [expression.left, expression.right]
    if isinstance(expression, ast.Call):
        named = [keyword.value for keyword in expression.keywords if keyword.arg in ("eps", "other")]
        return [*named, *(expression.args[3:4] if is_call else expression.args)]
    return []


def is_none(expression: ast.expr) -> bool:
    """Whether an expression is None."""
    return isinstance(expression, ast.Constant) and expression.value is None


def negated(test: ast.expr) -> str:
    """The text of a test that is true where this one is not."""
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        return ast.unparse(test.operand)
    if isinstance(test, ast.Compare) and len(test.ops) == 1 and type(test.ops[0]) in OPPOSITE:
        left, right = ast.unparse(test.left), ast.unparse(test.comparators[0])
        return f"{left} {OPPOSITE[type(test.ops[0])]} {right}"
    text = ast.unparse(test)
    return f"not {text}" if isinstance(test, (ast.Name, ast.Attribute)) else f"not ({text})"


def joined(guards: list[str]) -> str:
    """One test out of several."""
    if len(guards) == 1:
        return guards[0]
    parsed = [ast.parse(guard, mode="eval").body for guard in guards]
    return " and ".join(
        f"({guard})" if isinstance(test, ast.BoolOp) and isinstance(test.op, ast.Or) else guard
        for guard, test in zip(guards, parsed, strict=True)
    )
