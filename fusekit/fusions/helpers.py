"""Small functions that the forward of a norm calls: a cast or a count of features, say, written once.

Such a function is read as text, with what is known of its arguments, and passes only when it can do
nothing but view tensors and count: no branch, no loop, no call but of a few methods of tensors.
"""

import ast
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn as nn

from fusekit.forward import NoSource, source_of
from fusekit.forward.names import METADATA_ATTRS, METADATA_CALLS
from fusekit.forward.reads import attribute_chain, module_attribute

# A tensor, a number or a tuple of numbers and the like, or anything else (None).
Kind = Literal["tensor", "plain", None]

# Methods that give one tensor, write nothing and call nothing, whatever plain arguments they have.
ONE_TENSOR = frozenset(
    {
        "contiguous",
        "expand",
        "flatten",
        "movedim",
        "narrow",
        "permute",
        "repeat",
        "reshape",
        "select",
        "squeeze",
    }
    | {"swapaxes", "transpose", "unflatten", "unsqueeze", "view", "float", "half", "bfloat16", "double", "to"}
)
SCALARS = (int, float, bool, str, type(None), torch.dtype, torch.device)


def method_of(module: nn.Module, name: str) -> types.FunctionType | None:
    """The function of the class of `module` that `self.name(...)` calls, None if it calls something else."""
    found = module_attribute(module, name)
    if name in module.__dict__ or not isinstance(found, types.MethodType) or found.__self__ is not module:
        return None
    return found.__func__ if isinstance(found.__func__, types.FunctionType) else None


def result_of(
    function: types.FunctionType,
    call: ast.Call,
    is_method: bool,
    kind_of: Callable[[ast.expr], Kind],
    kind_of_attribute: Callable[[tuple[str, ...]], Kind],
) -> Kind:
    """What a call of `function` gives; None if it may do more than view tensors and count.

    `kind_of` says what an argument is, `kind_of_attribute` what a chain of attributes of the module.
    """
    try:
        tree = source_of((function,)).tree
    except NoSource:
        return None
    own, *wanted = [*([] if is_method else [""]), *(parameter.arg for parameter in tree.args.args)] or [""]
    signature = tree.args
    if signature.vararg or signature.kwarg or signature.kwonlyargs or signature.posonlyargs:
        return None
    if signature.defaults or tree.decorator_list or len(call.args) + len(call.keywords) != len(wanted):
        return None
    if any(isinstance(argument, ast.Starred) for argument in call.args):
        return None
    given = dict(zip(wanted, call.args, strict=False))
    given |= {keyword.arg: keyword.value for keyword in call.keywords if keyword.arg}
    names = {name: kind_of(argument) for name, argument in given.items()}
    if set(names) != set(wanted) or None in names.values():
        return None
    return _Body(own, kind_of_attribute, names).result(tree.body)


@dataclass
class _Body:
    """The statements of such a function, in order, and what its names hold."""

    own: str
    kind_of_attribute: Callable[[tuple[str, ...]], Kind]
    names: dict[str, Kind]

    def result(self, statements: Sequence[ast.stmt]) -> Kind:
        for statement in statements:
            if isinstance(statement, ast.Return):
                return self.kind(statement.value) if statement.value is not None else None
            if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
                continue
            if not isinstance(statement, ast.Assign) or len(statement.targets) != 1:
                return None
            kind, target = self.kind(statement.value), statement.targets[0]
            if kind is None or not self._store(target, kind):
                return None
        return None

    def _store(self, target: ast.expr, kind: Kind) -> bool:
        if isinstance(target, ast.Name) and target.id != self.own:
            self.names[target.id] = kind
            return True
        if isinstance(target, (ast.Tuple, ast.List)) and kind == "plain":
            return all(self._store(item, kind) for item in target.elts)
        return isinstance(target, ast.Starred) and self._store(target.value, kind)

    def kind(self, expression: ast.expr) -> Kind:
        """What an expression gives; None where evaluating it may do more than view and count."""
        if isinstance(expression, ast.Constant):
            return "plain"
        if isinstance(expression, ast.Name):
            return self.names.get(expression.id)
        if isinstance(expression, (ast.Tuple, ast.List)):
            return self._all_plain(expression.elts)
        if isinstance(expression, ast.Starred):
            return self._all_plain([expression.value])
        if isinstance(expression, ast.Slice):
            return self._all_plain([b for b in (expression.lower, expression.upper, expression.step) if b])
        if isinstance(expression, ast.UnaryOp):
            return self._all_plain([expression.operand])
        if isinstance(expression, ast.Subscript):
            return self.kind(expression.value) if self.kind(expression.slice) == "plain" else None
        if isinstance(expression, ast.BinOp):
            kinds = {self.kind(expression.left), self.kind(expression.right)}
            return None if None in kinds else "tensor" if "tensor" in kinds else "plain"
        if isinstance(expression, ast.Attribute):
            return self._attribute(expression)
        if isinstance(expression, ast.Call):
            return self._call(expression)
        return None

    def _all_plain(self, expressions: Sequence[ast.expr]) -> Kind:
        return "plain" if all(self.kind(one) == "plain" for one in expressions) else None

    def _attribute(self, expression: ast.Attribute) -> Kind:
        chain = attribute_chain(expression, self.own) if self.own else ()
        if chain:
            return self.kind_of_attribute(chain)
        is_metadata = expression.attr in METADATA_ATTRS and self.kind(expression.value) == "tensor"
        return "plain" if is_metadata else None

    def _call(self, call: ast.Call) -> Kind:
        function = call.func
        if not isinstance(function, ast.Attribute) or call.keywords or self.kind(function.value) != "tensor":
            return None
        if any(self.kind(argument) is None for argument in call.args):
            return None
        if function.attr in METADATA_CALLS:
            return "plain"
        return "tensor" if function.attr in ONE_TENSOR else None
