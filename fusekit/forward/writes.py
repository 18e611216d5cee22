"""What a region of a forward writes, by names, flags and underscores."""

import ast
import functools
import inspect
import types
from collections.abc import Collection, Iterable

import torch.nn.functional as F

from fusekit.forward.names import (
    CHANGES,
    DTYPE_CASTS,
    INPLACE_DUNDERS,
    MAYBE_MODULES,
    MODULE_NAMES,
    VIEWS,
    arg_names,
    call_name,
    has_underscore,
    rebound_names,
)
from fusekit.forward.sharing import aliasing_reads


def inplace_target(node: ast.AST) -> str | None:
    """The base name that `node` writes through: `x` of `x[i] = ...`, `x.attr = ...`, `x += ...`, `x.mul_()`.

    The receiver of a method may be a chain of calls: `x.view(-1).mul_(2)` writes `x`. None for what
    writes nothing, or nothing that has a name. Dunder methods count if they are those of a store.
    Teaching-only: the library asks the operator's schema.

    >>> inplace_target(ast.parse("x.view(-1)[0].mul_(2)", mode="eval").body)
    'x'
    >>> inplace_target(ast.parse("x.a[0] = y").body[0].targets[0])
    'x'
    """
    written = _written_object(node)
    while isinstance(written, (ast.Attribute, ast.Subscript, ast.Call)):
        if isinstance(written, ast.Call):
            if not isinstance(written.func, ast.Attribute):
                return None
            written = written.func
        written = written.value
    return written.id if isinstance(written, ast.Name) else None


def _written_object(node: ast.AST) -> ast.expr | None:
    """What `node` itself writes into: the object of a store, the target of `+=`, a method's receiver."""
    if isinstance(node, ast.AugAssign):
        return node.target
    if isinstance(node, (ast.Attribute, ast.Subscript)):
        return None if isinstance(node.ctx, ast.Load) else node.value
    if not isinstance(node, ast.Call):
        return None
    name = call_name(node)
    if isinstance(node.func, ast.Name) and name in ("setattr", "delattr") and node.args:
        return node.args[0]
    if isinstance(node.func, ast.Attribute) and _pure_root(node.func) not in MODULE_NAMES:
        if has_underscore(name) or name in INPLACE_DUNDERS | CHANGES:
            return node.func.value
    return None


def mutated_names(statements: Iterable[ast.AST]) -> set[str]:
    """The names that the statements write through: every `inplace_target` in them.

    Where a method writes what a call returned, whatever that call may have returned a view of
    counts too: `torch.flatten(x).mul_(2)` writes `x`.
    Teaching-only: the library asks the operator's schema.

    >>> region = ast.parse("x[0], y.h = a, b\\nz += 1\\nw.view(-1).mul_(c)\\ntorch.flatten(v).zero_()")
    >>> sorted(mutated_names(region.body))
    ['v', 'w', 'x', 'y', 'z']
    """
    found: set[str] = set()
    for statement in statements:
        for node in ast.walk(statement):
            written = _written_object(node)
            if written is not None:
                base = inplace_target(node)
                found |= {base} - MODULE_NAMES if base is not None else set()
                if not _is_view(written):
                    found |= aliasing_reads(written)
            if isinstance(node, ast.Call) and call_name(node) in INPLACE_DUNDERS:
                if not _is_method(node.func, None):
                    found |= arg_names(node)  # operator.__iadd__(x, y)
    return found


def _is_view(expr: ast.AST) -> bool:
    """Whether an expression is a name, or attributes, items and views of one."""
    while isinstance(expr, (ast.Attribute, ast.Subscript, ast.Call)):
        if isinstance(expr, ast.Call):
            if not isinstance(expr.func, ast.Attribute) or expr.func.attr not in VIEWS | DTYPE_CASTS:
                return False
            expr = expr.func
        expr = expr.value
    return isinstance(expr, ast.Name) and expr.id not in MODULE_NAMES


def writes_through_args(call: ast.Call, variables: Collection[str] | None = None) -> bool:
    """Whether a call writes into an argument, as far as its name and flags say.

    It does with `out=`, with `inplace=` anything but a literal False (by position too, where
    `torch.nn.functional` takes it so), and where a free function has the in-place underscore:
    `torch.relu_(x)`. Dunder names do not count, nor do methods, which write their receiver
    (`inplace_target`). What tells a function from a method is the name before the dot: `variables`
    are the names of objects; without them, `torch`, `F`, `init` and the like and capitalised names are
    taken for modules. Methods of `self` itself may do anything and count as functions.
    Teaching-only: the library asks the operator's schema.

    >>> call = lambda text: ast.parse(text, mode="eval").body
    >>> [writes_through_args(call(t)) for t in ("torch.add(x, 1, out=y)", "F.relu_(x)", "x.mul_(y)")]
    [True, True, False]
    """
    for keyword in call.keywords:
        if keyword.arg == "out" or (keyword.arg == "inplace" and not _is_literal_false(keyword.value)):
            return True
        if keyword.arg is None and isinstance(keyword.value, ast.Dict):
            for key, value in zip(keyword.value.keys, keyword.value.values, strict=True):
                name = key.value if isinstance(key, ast.Constant) else None
                if name == "out" or (name == "inplace" and not _is_literal_false(value)):
                    return True
    name = call_name(call)
    place = _place_of_inplace(name)
    if place is not None and not _is_method(call.func, variables):
        flag = call.args[place : place + 1]
        if any(isinstance(argument, ast.Starred) for argument in call.args[: place + 1]):
            return True
        if flag and not _is_literal_false(flag[0]):
            return True
    return has_underscore(name) and not _is_method(call.func, variables)


def _is_literal_false(value: ast.expr) -> bool:
    return isinstance(value, ast.Constant) and value.value is False


@functools.cache
def _place_of_inplace(name: str | None) -> int | None:
    """At which position a function of `torch.nn.functional` takes `inplace`, None where it does not."""
    function = getattr(F, name, None) if name else None
    if not isinstance(function, types.FunctionType):
        return None
    parameters = list(inspect.signature(function).parameters)
    return parameters.index("inplace") if "inplace" in parameters else None


def _is_method(function: ast.expr, variables: Collection[str] | None) -> bool:
    """Whether what is called is a method of some object, and not a function of a module."""
    if not isinstance(function, ast.Attribute):
        return False
    if isinstance(function.value, ast.Name) and function.value.id == "self":
        return False
    root = _pure_root(function)
    if root is None or root == "self":
        return True
    if variables is not None:
        return root in variables
    return root not in MODULE_NAMES | MAYBE_MODULES and not root[:1].isupper()


def _pure_root(expr: ast.AST) -> str | None:
    """The root name of a chain of attributes alone."""
    while isinstance(expr, ast.Attribute):
        expr = expr.value
    return expr.id if isinstance(expr, ast.Name) else None


def written_names(statements: Iterable[ast.AST], variables: Collection[str] | None = None) -> set[str]:
    """All of: names rebound, names written through, names passed to a call that writes its arguments.

    `variables` are as in `writes_through_args`. Names that only share storage with these are what
    `aliasing_names` adds.
    Teaching-only: the prover lets nothing pass that is not known to write nothing.

    >>> region = ast.parse("a = b\\nc[0] = d\\ntorch.add(e, 1, out=f)\\ng.add_(h)")
    >>> sorted(written_names(region.body))
    ['a', 'c', 'e', 'f', 'g']
    """
    statements = list(statements)
    found = rebound_names(statements) | mutated_names(statements)
    for statement in statements:
        for node in ast.walk(statement):
            if isinstance(node, ast.Call) and writes_through_args(node, variables):
                found |= arg_names(node)
                if isinstance(node.func, ast.Attribute):  # `self.f_(x)`: the object may be written too
                    found |= aliasing_reads(node.func.value) - MODULE_NAMES
    return found
