"""What evaluating an expression can touch: nothing, or the proof ends.

A `Reading` follows statements and expressions in the order of their evaluation. It passes only
what runs no foreign code and writes nothing: names, metadata, plain attributes, arithmetic on
numbers and sizes, torch operators whose schema says so, plain linears, and the submodules that the
plan proves for each instance: RMSNorms and known activations, without hooks.

What the trace did not come by (an arm of an `if` not taken) has no nodes to ask. There only the text
counts: calls of such submodules, or of ones that the module lacks, with a tensor, a few methods of
tensors, and names that hold nothing else.
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
from fusekit.forward.names import METADATA_CALLS
from fusekit.forward.reads import DYNAMIC, MISSING, SEES_NAMES, attribute_chain, module_attribute
from fusekit.fusions.helpers import (
    ONE_TENSOR,
    SCALARS,
    Kind,
    method_of,
    result_of,
)
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
    """Statements and expressions that were proven to write nothing and to run no foreign code.

    `norms` are the submodules called that must be RMSNorms for that, `activations` those that must be
    known activations, `linears` the plain linears.
    """

    view: ForwardView
    wanted: frozenset[ast.expr] = frozenset()
    inputs: frozenset[str] = frozenset()  # what the wanted read on every way, and nothing may store again
    norms: set[str] = field(default_factory=set)
    activations: set[str] = field(default_factory=set)
    linears: set[str] = field(default_factory=set)
    passed: set[ast.AST] = field(default_factory=set)
    is_seen: bool = True  # whether the trace came by the statements that are read now
    _supposed: set[tuple[str, int]] = field(default_factory=set)  # stores (name, line) taken for tensors
    _held: set[tuple[str, int]] = field(default_factory=set)  # those found to be
    _relied: set[tuple[str, int]] = field(default_factory=set)  # those that something leans on
    _assumed: set[str] = field(default_factory=set)  # names taken for tensors while their stores are checked
    _refuted: set[tuple[str, int]] = field(default_factory=set)  # those found to be something else

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

    def suppose(self, statements: Iterable[ast.stmt]) -> None:
        """Take names stored in arms of an `if` for tensors, until the statements themselves are read."""
        for statement in statements:
            for node in ast.walk(statement) if isinstance(statement, ast.If) else ():
                if isinstance(node, ast.Assign):
                    names = [target.id for target in node.targets if isinstance(target, ast.Name)]
                    self._supposed.update((name, node.lineno) for name in names)

    def stored(self, statement: ast.stmt) -> None:
        """Take note of what a statement that was read stores, where no trace says what it is."""
        if self.is_seen or not isinstance(statement, (ast.Assign, ast.AnnAssign)) or statement.value is None:
            return
        targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
        for target in targets:
            if isinstance(target, ast.Name):
                found = self._held if self._is_tensor(statement.value) else self._refuted
                found.add((target.id, statement.lineno))

    def settle(self) -> None:
        """Raise unless every name that was taken for a tensor was found to hold one."""
        for name, line in sorted(self._relied):
            if (name, line) not in self._held - self._refuted:
                raise Refused("input-may-be-written", f"{name} may hold something else than a tensor", line)

    def truth(self, test: ast.expr) -> None:
        """Raise unless asking for the truth of `test`, which was read, runs no code."""
        if not self._is_plain_test(test):
            raise Refused(
                "input-may-be-written",
                f"if {self.view.text(test)} between the parts asks a value for its truth, which may run code",
                test.lineno,
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
        if isinstance(expression, ast.Name):
            if isinstance(expression.ctx, ast.Store) or self._is_same_kind(expression.id):
                return
            raise Refused(
                "input-may-be-written",
                f"{expression.id} may hold something else where an if goes another way, and is used between "
                "the parts",
                expression.lineno,
            )
        elif isinstance(expression, (ast.Constant, ast.Tuple, ast.List, ast.Slice, ast.keyword)):
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
        elif self._on_numbers(expression) or self._on_tensors(expression):
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
                self._submodule(path)
            return
        if self._helper(call) is not None:
            return
        if nodes:
            return self._operator(call, nodes)
        if isinstance(call.func, ast.Attribute) and call.func.attr in METADATA_CALLS:
            if self._is_tensor(call.func.value):
                return
        unseen = self._unseen_submodule(call)
        if unseen is not None:
            self._submodule(unseen)
            return
        if self._is_method_of_tensor(call):
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

    def _submodule(self, path: str) -> None:
        """Take note that a submodule is called: the plan proves what it is, or refuses the site."""
        submodule = self.view.submodule(path)
        if type(submodule) is nn.Linear:
            self.linears.add(path)
        elif may_be_activation(submodule):
            self.activations.add(path)
        elif submodule is not None:
            self.norms.add(path)

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
            if not chain or reads_plainly(view.module, chain) or is_absent(view.module, chain):
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
            unseen = self._unseen_submodule(expression) is not None or self._is_method_of_tensor(expression)
            return unseen or self._helper(expression) == "tensor"
        if isinstance(expression, ast.BinOp):
            return self._on_tensors(expression)
        if isinstance(expression, ast.Name) and expression.id in self._assumed:
            return True
        if isinstance(expression, ast.Name):
            lines = {binding.line for binding in self.view.trace.bindings if binding.name == expression.id}
            supposed = {line for name, line in self._supposed if name == expression.id} - lines
            stored = self.view.stores(expression.id)
            found = bool(stored) and all(
                line is not None and (line in lines or line in supposed) for line in stored
            )
            if found:
                self._relied.update((expression.id, line) for line in supposed)
            return found
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

    def _is_same_kind(self, name: str) -> bool:
        """Whether a name holds what the trace saw in it, a tensor or a number whichever way an `if` goes."""
        if name not in self.view.branched or name in self.inputs:
            return True
        kept, self._assumed = self._assumed, {*self._assumed, name}  # while its other stores are looked at
        try:
            return self._stores_one_kind(name)
        finally:
            self._assumed = kept

    def _stores_one_kind(self, name: str) -> bool:
        tensors = {binding.line for binding in self.view.trace.bindings if binding.name == name}
        unpacked = self.view.unpacked(name)
        for line, value in self.view.values(name):
            if line == self.view.source.function.__code__.co_firstlineno or line in tensors:
                continue  # a parameter: the caller's
            if line is None or not (value is not None and self._is_known(value)):
                if line is not None and (name, line) in self._supposed:
                    self._relied.add((name, line))
                elif value is not None or not unpacked or not self._is_size(name):
                    return False
        return True

    def _is_known(self, value: ast.expr, depth: int = 0) -> bool:
        """Whether a value is a tensor, a number, or a display, from its text."""
        if depth > 4 or self._is_tensor(value) or self._is_scalar(value):
            return depth <= 4
        parts: list[ast.expr] = []
        if isinstance(value, (ast.Tuple, ast.List)):
            return True
        if isinstance(value, ast.IfExp):
            parts = [value.body, value.orelse]
        elif isinstance(value, ast.BoolOp):
            parts = value.values
        elif isinstance(value, ast.BinOp):
            parts = [value.left, value.right]
        elif isinstance(value, ast.Compare):
            if all(isinstance(op, (ast.Is, ast.IsNot)) for op in value.ops):
                return True
            parts = [value.left, *value.comparators]
        elif isinstance(value, ast.UnaryOp):
            parts = [value.operand]
        elif isinstance(value, ast.Subscript):
            parts = [value.value]
        elif isinstance(value, ast.Attribute):
            return value.attr in METADATA_ATTRS and self._is_tensor(value.value)
        elif isinstance(value, ast.Call):
            function = value.func
            is_metadata = isinstance(function, ast.Attribute) and function.attr in METADATA_CALLS
            return is_metadata and self._is_tensor(function.value)  # type: ignore[attr-defined]
        elif isinstance(value, ast.Name):
            parts = self.view.assigned(value.id)
        return bool(parts) and all(self._is_known(part, depth + 1) for part in parts)

    def _unseen_submodule(self, call: ast.Call) -> str | None:
        """The path of the submodule that a call the trace did not come by calls with one tensor."""
        chain = attribute_chain(call.func, self.view.source.self_name)
        if not chain or self.view.nodes_at.get(call) or call.keywords or len(call.args) != 1:
            return None
        module = self.view.module
        called = reads_plainly(module, chain) and isinstance(_value_at(module, chain), nn.Module)
        if (called or is_absent(module, chain)) and self._is_tensor(call.args[0]):
            return ".".join(chain)
        return None

    def _is_method_of_tensor(self, call: ast.Call) -> bool:
        """Whether a call the trace did not come by is a method of a tensor that gives another one."""
        function = call.func
        if not isinstance(function, ast.Attribute) or function.attr not in ONE_TENSOR or call.keywords:
            return False
        if self.view.nodes_at.get(call) or not self._is_tensor(function.value):
            return False
        return all(
            self._is_scalar(argument)
            or self._is_tensor(argument)
            or (not isinstance(argument, ast.Starred) and self._unpacks_plainly(argument))
            for argument in call.args
        )

    def _on_tensors(self, expression: ast.expr) -> bool:
        """Whether this is arithmetic, which the trace did not come by, on tensors and numbers."""
        if not isinstance(expression, ast.BinOp) or self.view.nodes_at.get(expression):
            return False
        if not isinstance(expression.op, (ast.Add, ast.Sub, ast.Mult, ast.Div)):
            return False
        operands = (expression.left, expression.right)
        tensors = [operand for operand in operands if self._is_tensor(operand)]
        return bool(tensors) and all(self._is_scalar(one) for one in operands if one not in tensors)

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


def is_absent(module: nn.Module, chain: tuple[str, ...]) -> bool:
    """Whether `self.<chain>` is None or no attribute at all: a call of it cannot run."""
    *way, last = chain
    owner = _value_at(module, way) if reads_plainly(module, way) else None
    found = module_attribute(owner, last) if isinstance(owner, nn.Module) else owner
    return isinstance(owner, nn.Module) and (found is None or found is MISSING)


def _computes(cls: type, name: str) -> bool:
    """Whether instances of `cls` find `name` by running code: a property, or a lookup of its own."""
    lookup = inspect.getattr_static(cls, "__getattribute__")
    known = getattr(lookup, "__module__", None) == "transformers.configuration_utils"  # renames, no more
    if lookup is not object.__getattribute__ and not known:
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
