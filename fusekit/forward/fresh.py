"""What an instance tells of its forward without a run: branches, submodules, and what is allocated."""

import ast
from dataclasses import dataclass
from typing import Any

import torch.nn as nn
from torch.nn.modules import module as torch_module

from fusekit.forward.names import DTYPE_CASTS, METADATA_ATTRS, METADATA_CALLS, VIEW_ATTRS, VIEWS
from fusekit.forward.reads import DYNAMIC, MISSING, SIMPLE, attribute_chain, resolve


def returns_fresh(expr: ast.AST, module: nn.Module) -> bool:
    """Whether evaluating `expr` in a forward of `module` allocates what it returns.

    So do a literal; a plain linear of the module, and views and casts of its result; metadata; a
    missing or None submodule, whose call cannot run; a conditional when the branch taken is (both,
    where the instance's attributes, as they are now, do not decide); a sequence when every part is; any
    other submodule when its arguments are, which also holds for one that works in place. A
    submodule with a forward hook may return anything. The module is `self`.
    Teaching-only: the library asks the operator's schema.

    >>> class Gate(nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.q, self.act, self.norm = nn.Linear(4, 4), nn.ReLU(inplace=True), None
    >>> fresh = lambda text: returns_fresh(ast.parse(text, mode="eval").body, Gate())
    >>> fresh("self.act(self.q(x)).view(-1)"), fresh("self.norm(x)"), fresh("self.act(x)")
    (True, True, False)
    """
    return Instance(module).returns_fresh(expr)


@dataclass(frozen=True)
class Instance:
    """What can be told of `self` in a forward without running it."""

    module: nn.Module
    own: str = "self"
    stored: frozenset[str] = frozenset()  # attributes that the forward itself stores, on any object
    settled: bool = True  # False where attributes of `self` are stored under names not seen
    handed_on: bool = False  # whether other code gets `self`, and may store attributes

    def value(self, expr: ast.AST) -> Any:
        """The value of an attribute chain on `self`, DYNAMIC where that is not known."""
        chain = attribute_chain(expr, self.own)
        if not chain or not self.settled or self.stored.intersection(chain):
            return DYNAMIC
        found = resolve(self.module, chain)
        # Other code that gets `self` may fill in or change anything but a submodule that is there.
        return DYNAMIC if self.handed_on and not isinstance(found, nn.Module) else found

    def is_plain(self, expr: ast.AST) -> bool:
        """Whether an attribute chain on `self` holds a number, a name, a size and the like, no tensor."""
        chain = attribute_chain(expr, self.own)
        if not chain or not self.settled or self.stored.intersection(chain):
            return False
        found = resolve(self.module, chain)
        return isinstance(found, SIMPLE) and not (found is None and self.handed_on)

    def truth(self, test: ast.AST) -> bool | None:
        """Whether a test holds, None where the attributes of the instance do not decide it."""
        if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
            inner = self.truth(test.operand)
            return None if inner is None else not inner
        if isinstance(test, ast.BoolOp):
            decisive = isinstance(test.op, ast.Or)
            truths = [self.truth(value) for value in test.values]
            for truth in truths:
                if truth is decisive:
                    return decisive
                if truth is None:
                    return decisive if decisive in truths else None
            return not decisive
        if isinstance(test, ast.Compare) and len(test.ops) == 1:
            return self._comparison(test.left, test.ops[0], test.comparators[0])
        value = self._known(test)
        if type(value) in PLAIN:
            return bool(value)
        if isinstance(value, nn.Module) and not hasattr(type(value), "__len__"):
            return None if hasattr(type(value), "__bool__") else True
        return None

    def _known(self, expr: ast.AST) -> Any:
        return expr.value if isinstance(expr, ast.Constant) else self.value(expr)

    def _comparison(self, left: ast.expr, op: ast.cmpop, right: ast.expr) -> bool | None:
        one, two = self._known(left), self._known(right)
        if any(value is MISSING or value is DYNAMIC for value in (one, two)):
            return None
        if isinstance(op, (ast.Is, ast.IsNot)):
            if one is not None and two is not None:
                return None
            return (one is two) == isinstance(op, ast.Is)
        if type(one) not in PLAIN or type(two) not in PLAIN:
            return None
        if isinstance(op, (ast.Eq, ast.NotEq)):
            return (one == two) == isinstance(op, ast.Eq)
        if isinstance(op, ORDER) and all(type(value) in (int, float) for value in (one, two)):
            if isinstance(op, ast.Lt):
                return one < two
            if isinstance(op, ast.LtE):
                return one <= two
            return one > two if isinstance(op, ast.Gt) else one >= two
        return None

    def is_metadata(self, function: ast.Attribute) -> bool:
        """Whether a method that is called is one of a tensor's metadata, and none of `self`."""
        receiver = function.value
        is_own = isinstance(receiver, ast.Name) and receiver.id == self.own
        return function.attr in METADATA_CALLS - self.stored and not is_own

    def branches(self, expr: ast.IfExp) -> list[ast.expr]:
        """The branches of a conditional that may be taken."""
        truth = self.truth(expr.test)
        if truth is None:
            return [expr.body, expr.orelse]
        return [expr.body if truth else expr.orelse]

    def operands(self, expr: ast.BoolOp) -> list[ast.expr]:
        """The operands of `and` and `or` that may be the value."""
        found = []
        for value in expr.values[:-1]:
            truth = self.truth(value)
            if truth is None or truth == isinstance(expr.op, ast.Or):
                found.append(value)
            if truth == isinstance(expr.op, ast.Or):
                return found
        return [*found, expr.values[-1]]

    def cannot_run(self, call: ast.Call) -> bool:
        """Whether the call is one of a missing or None submodule."""
        value = self.value(call.func)
        return value is None or value is MISSING

    def returns_fresh(self, expr: ast.AST) -> bool:
        """`returns_fresh` of the forward that is known."""
        fresh = self.returns_fresh
        if isinstance(expr, (ast.Constant, ast.JoinedStr)):
            return True
        if isinstance(expr, (ast.Tuple, ast.List, ast.Set)):
            return all(fresh(item) for item in expr.elts)
        if isinstance(expr, ast.Dict):
            return all(fresh(item) for item in (*expr.keys, *expr.values) if item is not None)
        if isinstance(expr, (ast.Starred, ast.NamedExpr, ast.Subscript)):
            return fresh(expr.value)
        if isinstance(expr, (ast.ListComp, ast.SetComp)):
            return fresh(expr.elt)
        if isinstance(expr, ast.DictComp):
            return fresh(expr.key) and fresh(expr.value)
        if isinstance(expr, ast.IfExp):
            return all(fresh(branch) for branch in self.branches(expr))
        if isinstance(expr, ast.BoolOp):
            return all(fresh(operand) for operand in self.operands(expr))
        if isinstance(expr, ast.Attribute):
            if expr.attr in METADATA_ATTRS - self.stored:
                return True
            return expr.attr in VIEW_ATTRS - self.stored and fresh(expr.value)
        return isinstance(expr, ast.Call) and self._call_is_fresh(expr)

    def _call_is_fresh(self, call: ast.Call) -> bool:
        value = self.value(call.func)
        if self.cannot_run(call) or is_plain_linear(value):
            return True
        if isinstance(value, nn.Module):
            arguments = [*call.args, *(keyword.value for keyword in call.keywords)]
            # Without arguments it can only return what it holds.
            return bool(arguments) and not is_hooked(value) and all(map(self.returns_fresh, arguments))
        if isinstance(call.func, ast.Attribute):
            if self.is_metadata(call.func):
                return True
            return call.func.attr in VIEWS | DTYPE_CASTS and self.returns_fresh(call.func.value)
        return False


PLAIN = (int, float, bool, str, type(None))
ORDER = (ast.Lt, ast.LtE, ast.Gt, ast.GtE)


def is_plain_linear(value: Any) -> bool:
    """A linear whose call is that of `nn.Linear`: it returns what it allocates."""
    return (
        isinstance(value, nn.Linear)
        and type(value).forward is nn.Linear.forward
        and type(value).__call__ is nn.Module.__call__
        and "forward" not in value.__dict__
        and not is_hooked(value)
    )


def is_hooked(module: nn.Module) -> bool:
    """Whether a hook may put something else in the place of the result."""
    return bool(module._forward_hooks or torch_module._global_forward_hooks)
