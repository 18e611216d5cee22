"""What evaluating an expression of a norm can touch: nothing, or the norm is refused.

A `Reading` passes only what runs no foreign code and writes nothing: names, metadata, plain attributes,
arithmetic on numbers and sizes, torch operators whose schema says so, submodules that write nothing,
and small functions that view and count. Each way of an `if` is read by itself, with the trace that
went it.
"""

import ast
import inspect
import types
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn as nn
from torch import fx

from fusekit.forward import METADATA_ATTRS, Span, original_class
from fusekit.forward.effects.known import looks_up_by_code
from fusekit.forward.names import METADATA_CALLS
from fusekit.forward.reads import DYNAMIC, MISSING, SEES_NAMES, attribute_chain, module_attribute
from fusekit.fusions.helpers import SCALARS, Kind, method_of, result_of
from fusekit.fusions.match import Refused
from fusekit.fusions.view import ForwardView
from fusekit.tracing.schema import node_effect, operator_name

TENSORS = (torch.Tensor, nn.Parameter)
SEQUENCES = (torch.Size, tuple, list)
RANDOM = frozenset(
    {"dropout", "bernoulli", "multinomial", "rand_like", "randn_like", "randint_like", "alpha_dropout"}
)


@dataclass
class Reading:
    """Statements and expressions that were proven to write nothing and to run no foreign code."""

    view: ForwardView
    passed: set[ast.AST] = field(default_factory=set)

    def __post_init__(self) -> None:
        seen = sorted(SEES_NAMES & self.view.names)
        if seen:
            raise Refused(
                "module-escapes",
                f"the forward uses {seen[0]}(), and would see the names that a rewrite adds",
                self.view.source.tree.lineno,
            )

    def statement(self, statement: ast.stmt) -> None:
        """Raise unless `statement` stores plain names, or nothing, and unpacks only plain sequences."""
        targets: list[ast.expr] = []
        ok = isinstance(statement, (ast.Return, ast.Expr, ast.Pass))
        if isinstance(statement, ast.Assign):
            targets = statement.targets
        elif isinstance(statement, ast.AnnAssign):
            targets = [statement.target]
        if targets:
            ok = all(_stores_names(target) for target in targets)
        if not ok:
            what = type(statement).__name__.lower()
            if isinstance(statement, ast.AugAssign):
                what = f"{ast.unparse(statement)}, which may write in place"
            elif targets:
                what = f"{ast.unparse(statement)}, which stores into an object"
            raise Refused("input-may-be-written", f"between the parts stands {what}", statement.lineno)
        unpacks = any(not isinstance(target, ast.Name) for target in targets)
        if unpacks and not self._unpacks_plainly(statement.value):  # type: ignore[attr-defined]
            raise Refused(
                "input-may-be-written",
                f"{self.view.text(statement)} unpacks what may run code",
                statement.lineno,
            )

    def expression(self, expression: ast.expr) -> None:
        """Raise unless evaluating `expression` (its operands aside) can touch nothing."""
        self.passed.add(expression)
        nodes = self.view.nodes_at.get(expression, [])
        if isinstance(expression, ast.Call):
            return self._call(expression, nodes)
        if nodes:
            return self._operator(expression, nodes)
        if isinstance(expression, ast.Attribute):
            return self._attribute(expression)
        if isinstance(expression, (ast.Name, ast.Constant, ast.Tuple, ast.List, ast.Slice, ast.keyword)):
            return
        elif isinstance(expression, ast.Starred):
            if isinstance(expression.ctx, ast.Store) or self._unpacks_plainly(expression.value):
                return
        elif isinstance(expression, ast.BoolOp):
            if all(self._is_plain_test(value) for value in expression.values[:-1]):
                return
        elif isinstance(expression, ast.IfExp):
            if self._is_plain_test(expression.test):
                return
        elif self._on_numbers(expression):
            return
        raise Refused(
            "input-may-be-written",
            f"{self.view.text(expression)} runs between the parts, and is not known to write nothing",
            expression.lineno,
        )

    def _call(self, call: ast.Call, nodes: list[fx.Node]) -> None:
        if nodes and all(node.op == "call_module" and node.meta.get("direct") for node in nodes):
            for node in nodes:
                path = str(node.target)
                if node.meta.get("written"):
                    raise Refused("input-written", f"{path} writes its input between the parts", call.lineno)
            return
        if self._helper(call) is not None:
            return
        if nodes:
            return self._operator(call, nodes)
        if isinstance(call.func, ast.Attribute) and call.func.attr in METADATA_CALLS:
            if self._is_tensor(call.func.value):
                return
        raise Refused(
            "input-may-be-written",
            f"{self.view.text(call.func)}() is called between the parts, and is not known to leave their "
            "input alone",
            call.lineno,
        )

    def _helper(self, call: ast.Call) -> Kind:
        """What a call of a small function or method gives that can do nothing but view and count, or None."""
        view = self.view
        chain = attribute_chain(call.func, view.source.self_name)
        function: Any = None
        if len(chain) == 1 and reads_plainly(view.module, chain):
            function = method_of(view.module, chain[0])
        elif isinstance(call.func, ast.Name) and not view.stores(call.func.id):
            function = view.source.function.__globals__.get(call.func.id)  # type: ignore[attr-defined]
        if not isinstance(function, types.FunctionType):
            return None
        return result_of(function, call, bool(chain), self._kind, self._kind_of_attribute)

    def _kind(self, expression: ast.expr) -> Kind:
        if self._is_tensor(expression):
            return "tensor"
        if isinstance(expression, (ast.Tuple, ast.List)):
            return "plain" if all(self._kind(item) == "plain" for item in expression.elts) else None
        if isinstance(expression, ast.Name):
            return "plain" if self._is_size(expression.id) else None
        return "plain" if self._is_scalar(expression) else None

    def _kind_of_attribute(self, chain: tuple[str, ...]) -> Kind:
        if not reads_plainly(self.view.module, chain):
            return None
        value = _value_at(self.view.module, chain)
        return "plain" if isinstance(value, SCALARS) else "tensor" if type(value) in TENSORS else None

    def _is_size(self, name: str) -> bool:
        """Whether a name only ever holds sizes of a tensor, or a tuple of them and numbers."""
        values, unpacked = self.view.assigned(name), self.view.unpacked(name)
        if unpacked:
            return len(unpacked) == len(self.view.stores(name)) and all(
                isinstance(value, (ast.Attribute, ast.Call, ast.Subscript))
                and self._unpacks_plainly(value)
                and not any(self.view.nodes_at.get(part) for part in ast.walk(value))  # type: ignore[call-overload]
                for value in unpacked
            )
        return bool(values) and all(self._is_scalar(value) for value in values)

    def _operator(self, expression: ast.expr, nodes: list[fx.Node]) -> None:
        text = self.view.text(expression)
        for node in nodes:
            effect = node_effect(node)
            if effect is None and _is_getitem(node):
                continue
            if effect is None or not node.meta.get("direct"):
                raise Refused(
                    "input-may-be-written",
                    f"{text} runs between the parts, and is not known to leave their input alone",
                    expression.lineno,
                )
            if effect.writes:
                raise Refused("input-written", f"{text} writes in place between the parts", expression.lineno)
            if operator_name(node) in RANDOM:
                raise Refused(
                    "input-may-be-written",
                    f"{text} draws random numbers between the parts",
                    expression.lineno,
                )

    def _attribute(self, expression: ast.Attribute) -> None:
        view = self.view
        if expression in view.called:
            # The call is checked itself. What is called must be found plainly: a submodule, or the
            # method of a tensor.
            chain = attribute_chain(expression, view.source.self_name)
            if not chain or reads_plainly(view.module, chain):
                return
            if reads_plainly(view.module, chain[:-1]) and self._is_tensor(expression.value):
                return
        elif self._is_plain_read(expression):
            return
        raise Refused(
            "input-may-be-written",
            f"reading {view.text(expression)} between the parts may run code",
            expression.lineno,
        )

    # -- what is known of a value ---------------------------------------------------------------

    def _is_plain_read(self, expression: ast.Attribute) -> bool:
        """Metadata of a tensor, a plain attribute of the module, or one of an imported module."""
        if expression.attr in METADATA_ATTRS and self._is_tensor(expression.value):
            return True
        chain = attribute_chain(expression, self.view.source.self_name)
        if chain:
            return reads_plainly(self.view.module, chain)
        base = expression.value
        if isinstance(base, ast.Name) and not self.view.stores(base.id):
            names = self.view.source.function.__globals__  # type: ignore[attr-defined]
            found = names.get(base.id)
            return isinstance(found, types.ModuleType) and expression.attr in vars(found)
        return False

    def _is_tensor(self, expression: ast.expr) -> bool:
        """Whether a value is a tensor: made by an operator, or held by a name that only ever held some."""
        nodes = self.view.nodes_at.get(expression)
        if nodes:
            return any(isinstance(node.meta.get("val"), torch.Tensor) for node in nodes)
        if isinstance(expression, ast.Call):
            return self._helper(expression) == "tensor"
        if isinstance(expression, ast.Name):
            lines = {binding.line for binding in self.view.trace.bindings if binding.name == expression.id}
            stored = self.view.stores(expression.id)
            return bool(stored) and all(line is not None and line in lines for line in stored)
        chain = attribute_chain(expression, self.view.source.self_name)
        if chain and reads_plainly(self.view.module, chain):
            return isinstance(_value_at(self.view.module, chain), torch.Tensor)
        return False

    def _is_scalar(self, expression: ast.expr) -> bool:
        """Whether a value is a number, a string, None or the like, in the text or on the module."""
        if isinstance(expression, ast.UnaryOp):
            return self._is_scalar(expression.operand)
        chain = attribute_chain(expression, self.view.source.self_name)
        if chain and reads_plainly(self.view.module, chain):
            return isinstance(_value_at(self.view.module, chain), SCALARS)
        return isinstance(expression, ast.Constant) or (
            isinstance(expression, ast.Attribute)
            and expression.attr in ("dtype", "device", "ndim")
            and self._is_tensor(expression.value)
        )

    def _unpacks_plainly(self, expression: ast.expr | None, depth: int = 0) -> bool:
        """Whether iterating over a value runs no code: sizes, displays, results of operators."""
        if expression is None or depth > 4:
            return False
        if isinstance(expression, (ast.Tuple, ast.List)):
            return True
        if self.view.nodes_at.get(expression):
            return True  # an operator's, which is checked itself
        if isinstance(expression, ast.Attribute):
            return expression.attr == "shape" and self._is_tensor(expression.value)
        if isinstance(expression, ast.Call):
            function = expression.func
            return (
                isinstance(function, ast.Attribute)
                and function.attr == "size"
                and self._is_tensor(function.value)
            )
        if isinstance(expression, ast.Subscript):
            return self._unpacks_plainly(expression.value, depth + 1)
        if isinstance(expression, ast.Name):
            values = self.view.assigned(expression.id)
            return bool(values) and all(self._unpacks_plainly(value, depth + 1) for value in values)
        return False

    def _is_plain_test(self, test: ast.expr, depth: int = 0) -> bool:
        """Whether asking for a value's truth runs no code. Of a tensor it would have stopped the trace."""
        if isinstance(test, ast.Constant):
            return True
        if isinstance(test, ast.Compare):
            return depth == 0 or self._on_numbers(test)  # one that stands here is checked itself
        if isinstance(test, ast.UnaryOp):
            return isinstance(test.op, ast.Not)
        if isinstance(test, ast.BoolOp):
            return all(self._is_plain_test(value, depth) for value in test.values)
        if isinstance(test, ast.Name):
            values = self.view.assigned(test.id) if depth < 4 else []
            return bool(values) and all(self._is_plain_test(value, depth + 1) for value in values)
        chain = attribute_chain(test, self.view.source.self_name)
        if chain and reads_plainly(self.view.module, chain):
            return isinstance(_value_at(self.view.module, chain), SCALARS)
        return False

    def _on_numbers(self, expression: ast.expr) -> bool:
        """Whether the trace saw this operator applied to numbers, sizes and tuples only."""
        operands: list[ast.expr]
        kinds: tuple[type, ...] = SCALARS
        if isinstance(expression, ast.BinOp):
            operands = [expression.left, expression.right]
            kinds = (*SCALARS, *SEQUENCES)
        elif isinstance(expression, ast.UnaryOp):
            operands = [expression.operand]
        elif isinstance(expression, ast.Compare):
            if all(isinstance(op, (ast.Is, ast.IsNot)) for op in expression.ops):
                return True
            operands = [expression.left, *expression.comparators]
        elif isinstance(expression, ast.Subscript):
            operands = [expression.value]
            kinds = SEQUENCES
            if not all(_is_number(part) for part in _bounds(expression.slice)):
                return False
        else:
            return False
        for operand in operands:
            seen = self.view.trace.operands.get(Span.of(operand))
            if not seen and kinds is SCALARS and self._is_scalar(operand):
                continue
            if not seen or not seen <= set(kinds):
                return False
        return True


ACTIVATION_HOMES = frozenset({"torch.nn.modules.activation", "transformers.activations"})


def may_be_activation(module: nn.Module | None) -> bool:
    """Whether a submodule is of a class of activations.

    It says nothing of hooks and settings, so that all instances that are alike share one analysis:
    which one it is, the plan asks of each.
    """
    return type(module) is nn.Identity or type(module).__module__ in ACTIVATION_HOMES


def reads_plainly(module: nn.Module, chain: Iterable[str]) -> bool:
    """Whether reading `self.<chain>` finds every attribute without running code of a class."""
    value: Any = module
    for name in chain:
        if isinstance(value, nn.Module):
            cls = original_class(value)
            lookup = inspect.getattr_static(cls, "__getattr__")
            if lookup is not nn.Module.__getattr__ or _computes(cls, name):
                return False
            value = module_attribute(value, name)
            if value is MISSING or value is DYNAMIC:
                return False
        elif type(value) in TENSORS:
            if name not in METADATA_ATTRS:
                return False
            value = getattr(value, name)
        else:
            if hasattr(type(value), "__getattr__") or _computes(type(value), name):
                return False
            state = getattr(value, "__dict__", {})
            if name not in state:
                return False
            value = state[name]
    return True


def _computes(cls: type, name: str) -> bool:
    """Whether instances of `cls` find `name` by running code: a property, or a lookup of its own."""
    if looks_up_by_code(cls):
        return True
    found = inspect.getattr_static(cls, name, MISSING)
    plain = (types.FunctionType, staticmethod, classmethod)
    return found is not MISSING and hasattr(type(found), "__get__") and not isinstance(found, plain)


def _value_at(module: nn.Module, chain: Iterable[str]) -> Any:
    """The value of a chain that `reads_plainly`."""
    value: Any = module
    for name in chain:
        value = module_attribute(value, name) if isinstance(value, nn.Module) else getattr(value, name)
    return value


def _stores_names(target: ast.expr) -> bool:
    if isinstance(target, (ast.Tuple, ast.List)):
        return all(_stores_names(item) for item in target.elts)
    if isinstance(target, ast.Starred):
        return _stores_names(target.value)
    return isinstance(target, ast.Name)


def _bounds(index: ast.expr) -> list[ast.expr]:
    if isinstance(index, ast.Slice):
        return [bound for bound in (index.lower, index.upper, index.step) if bound is not None]
    return [index]


def _is_number(expression: ast.expr) -> bool:
    if isinstance(expression, ast.UnaryOp):
        expression = expression.operand
    return isinstance(expression, ast.Constant)


def _is_getitem(node: fx.Node) -> bool:
    return node.op == "call_function" and getattr(node.target, "__name__", "") == "getitem"
