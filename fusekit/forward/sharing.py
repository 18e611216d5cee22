"""Which names an expression may share storage with."""

import ast
import inspect
import types
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch.nn as nn

from fusekit.forward.fresh import Instance, is_hooked, is_plain_linear
from fusekit.forward.names import COMPREHENSIONS, METADATA_ATTRS, METADATA_CALLS, MODULE_NAMES, captures
from fusekit.forward.reads import DYNAMIC, MISSING, SIMPLE


def aliasing_reads(expr: ast.AST) -> set[str]:
    """The names that `expr` reads in a way that could yield a view of what they hold.

    Reads of metadata (`.shape`, `.size()`, `.dtype`, ...) are none, though the arguments of such a call
    are. None are tests that only choose (`a if test else b`), `is`, `in` and `not`, the name of a
    function that is called, and modules by custom (`torch`, `F`, ...).
    Teaching-only: the library asks the operator's schema and the run.

    >>> reads = lambda text: sorted(aliasing_reads(ast.parse(text, mode="eval").body))
    >>> reads("torch.cat([x, f(y)]).view(z.shape)"), reads("x.size(n)"), reads("x if y else z")
    (['x', 'y'], ['n'], ['x', 'z'])
    """
    return {source.id for source in sources(expr, How()) if isinstance(source, ast.Name)}


@dataclass(frozen=True)
class How:
    """How names are read: what is known of the instance, and of names that are no variables."""

    instance: Instance | None = None
    bound: frozenset[str] = frozenset()  # names that the forward stores itself
    around: Mapping[str, Any] = field(default_factory=dict)  # its globals and closure

    def holds_nothing(self, expr: ast.AST) -> bool:
        """Whether a chain `name.a.b` leads to a module, function, class or plain value outside."""
        root, names = expr, []
        while isinstance(root, ast.Attribute):
            names.append(root.attr)
            root = root.value
        if not isinstance(root, ast.Name) or root.id in self.bound:
            return False
        if root.id not in self.around:
            return root.id in MODULE_NAMES
        value = self.around[root.id]
        for name in reversed(names):
            if not isinstance(value, (types.ModuleType, type)):
                return False
            value = inspect.getattr_static(value, name, MISSING)
        return value is MISSING or isinstance(value, (*NO_STORAGE, *SIMPLE))


NO_STORAGE = (types.ModuleType, types.FunctionType, types.BuiltinFunctionType, type)


def sources(expr: ast.AST | None, how: How) -> Iterator[ast.expr]:
    """Where the storage of a value may come from: names that are read, and expressions that allocate it."""
    if expr is None or isinstance(expr, (ast.Constant, ast.JoinedStr)) or how.holds_nothing(expr):
        return
    instance = how.instance
    children: Iterable[ast.AST | None] = ast.iter_child_nodes(expr)
    if isinstance(expr, ast.Name):
        yield expr
        return
    if isinstance(expr, ast.Call):
        yield expr
        children = _read_by_call(expr, how)
    elif isinstance(expr, ast.Attribute):
        if expr.attr in METADATA_ATTRS - (instance.stored if instance else frozenset()):
            return
        if instance and instance.is_plain(expr):
            return
    elif isinstance(expr, ast.IfExp):
        children = instance.branches(expr) if instance else [expr.body, expr.orelse]
    elif isinstance(expr, ast.BoolOp):
        children = instance.operands(expr) if instance else expr.values
    elif isinstance(expr, (ast.UnaryOp, ast.Compare)) and _is_truth(expr):
        return
    elif isinstance(expr, ast.NamedExpr):
        children = [expr.value]
    elif isinstance(expr, ast.Lambda):
        yield expr
        children = [*captures(expr), *expr.args.defaults, *expr.args.kw_defaults]
    elif isinstance(expr, COMPREHENSIONS):
        yield expr
        yield from _of_comprehension(expr, how)
        return
    elif isinstance(expr, ALLOCATING):
        yield expr
    for child in children:
        yield from sources(child, how)


ALLOCATING = (ast.Tuple, ast.List, ast.Set, ast.Dict, ast.BinOp, ast.UnaryOp, ast.Compare)
TESTS = (ast.Is, ast.IsNot, ast.In, ast.NotIn)


def _is_truth(expr: ast.UnaryOp | ast.Compare) -> bool:
    """Whether an operator always gives True or False."""
    if isinstance(expr, ast.UnaryOp):
        return isinstance(expr.op, ast.Not)
    return all(isinstance(op, TESTS) for op in expr.ops)


def _read_by_call(call: ast.Call, how: How) -> Iterator[ast.expr]:
    """What the result of a call may be a view of: its arguments, and the object or function called."""
    instance, function = how.instance, call.func
    value = instance.value(function) if instance else DYNAMIC
    arguments = [*call.args, *(keyword.value for keyword in call.keywords)]
    if instance and (instance.cannot_run(call) or is_plain_linear(value)):
        return
    yield from arguments
    if isinstance(value, nn.Module) and arguments and not is_hooked(value):
        return
    if isinstance(function, ast.Name):
        known = function.id in how.around and not isinstance(how.around[function.id], NO_STORAGE)
        if known or function.id in how.bound:
            yield function
    elif not isinstance(function, ast.Attribute):
        yield function
    elif not (instance.is_metadata(function) if instance else function.attr in METADATA_CALLS):
        if not how.holds_nothing(function.value) and not (instance and how.holds_nothing(function)):
            yield function.value


def _of_comprehension(expr: ast.AST, how: How) -> Iterator[ast.expr]:
    assert isinstance(expr, COMPREHENSIONS)
    generators = expr.generators
    targets = {
        node.id
        for generator in generators
        for node in ast.walk(generator.target)
        if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load)
    }
    parts = [expr.key, expr.value] if isinstance(expr, ast.DictComp) else [expr.elt]
    found = [source for part in parts for source in sources(part, how)]

    def is_target(source: ast.expr) -> bool:
        return isinstance(source, ast.Name) and source.id in targets

    if isinstance(expr, ast.GeneratorExp) or any(map(is_target, found)):
        yield from sources(generators[0].iter, how)  # evaluated outside, where targets are other names
        found += [source for generator in generators[1:] for source in sources(generator.iter, how)]
    yield from (source for source in found if not is_target(source))
