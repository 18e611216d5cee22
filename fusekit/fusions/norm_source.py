"""The text of a norm's forward, and of the methods it calls: proof that it does nothing beside the norm.

Where the forward branches on its own state, the fused line stands behind a test of that state and the
original text stays below it.
"""

import ast
import types
from collections.abc import Iterator
from dataclasses import dataclass, field
from dataclasses import replace as replaced
from typing import Any

import torch
from torch import fx

from fusekit.forward import NoSource, Span, source_of
from fusekit.forward.reads import MISSING, attribute_chain, resolve
from fusekit.fusions.match import Refused
from fusekit.fusions.norm_graph import Norm, placeholders
from fusekit.fusions.norm_text import (
    asks_state,
    asks_weight_dtype,
    constant,
    default_of,
    global_value,
    is_docstring,
    is_literal,
    is_none,
    is_parameter,
    negated,
    parameters,
    sides,
)
from fusekit.fusions.reading import METADATA_ATTRS, Reading, reads_plainly
from fusekit.fusions.view import UNEVALUATED, ForwardView, evaluation
from fusekit.tracing.schema import operator_name
from fusekit.tracing.trace import trace_function

DEPTH = 3  # how far methods that a method calls are read
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)  # of a weight


@dataclass
class Text:
    """What reading a forward found out.

    `guards` are tests of the module's state, or of an input that is None, that hold where the norm is
    what was traced. `kept` statements in front of the norm only raise. `by_weight_dtype` says that
    branches on the weight's dtype stand in it, each arm of which was read.
    """

    guards: list[str] = field(default_factory=list)
    kept: int = 0
    by_weight_dtype: bool = False


def read_text(view: ForwardView, norm: Norm) -> tuple[Text, "Frame"]:
    """The forward's text read to its end, or `Refused` naming what it does besides the norm."""
    text, frame = _read(view, norm, None)
    if text.by_weight_dtype:
        for dtype in DTYPES:
            other, _ = _read(view, norm, dtype)
            if other.guards != text.guards:
                raise _also(view, view.source.tree, "branches differently for another dtype of its weight")
    return text, frame


def _read(view: ForwardView, norm: Norm, dtype: torch.dtype | None) -> tuple[Text, "Frame"]:
    """One reading of the forward as it is, or as it is with a weight of `dtype`."""
    attributes: dict[str, Any] = {}
    if dtype is not None and norm.weight is not None:
        weight = norm.weight.meta["val"]
        attributes = {str(norm.weight.target): weight.to(dtype)}
        trace = trace_function(view.module, view.source, view.trace.inputs, attributes)
        if not trace.complete:
            raise _also(view, view.source.tree, f"cannot be followed for a weight of {dtype}")
        view = replaced(view, trace=trace, _expressions={}, _given=set(), freed=set())
    text = Text()
    frame = Frame(view, norm=norm, text=text, attributes=attributes)
    frame.read()
    return text, frame


def _also(view: ForwardView, node: ast.AST, what: str) -> Refused:
    line = getattr(node, "lineno", view.source.tree.lineno)
    return Refused("not-this-function", f"it looks like an RMSNorm, but it {what}", line)


@dataclass
class Frame(Reading):
    """A reading of one function of the module: its forward, or a method that this calls."""

    norm: Norm = None  # type: ignore[assignment]
    text: Text = None  # type: ignore[assignment]
    attributes: dict[str, Any] = field(default_factory=dict)
    caller: "Frame | None" = None
    arguments: dict[str, ast.expr] = field(default_factory=dict)  # of a method, as the caller gives them
    depth: int = 0
    methods: list[tuple[ast.Call, "Frame"]] = field(default_factory=list)
    pairs: dict[fx.Node, fx.Node] = field(default_factory=dict)  # a caller's node -> the same one here
    _reads: list[tuple[tuple[str, ...], ast.Attribute]] = field(default_factory=list)
    _names: list[ast.Name] = field(default_factory=list)
    _tests: set[ast.AST] = field(default_factory=set)
    _skipped: set[ast.AST] = field(default_factory=set)
    _decided: set[Span] = field(default_factory=set)
    _freed: set[ast.AST] = field(default_factory=set)  # what the fused line says in its own words
    _statement: ast.stmt | None = None

    def read(self) -> None:
        """Raise `Refused` unless the function does nothing but compute the norm."""
        view = self.view
        if view.source.wrappers and self.caller is not None:
            raise _also(view, view.source.tree, f"calls {view.source.name}, which is decorated")
        body = view.source.tree.body
        if is_docstring(body[0]):
            body = body[1:]
        while self.caller is None and body and self._only_raises(body[0]):
            self.text.kept += 1
            body = body[1:]
        self._block(body)
        for span, truth in view.trace.branches.items():
            if span not in self._decided:
                test = view._expressions.get(span)
                raise self._branch(test if test is not None else view.source.tree, truth)
        self._check_reads()

    # -- statements ---------------------------------------------------------------------------

    def _block(self, statements: list[ast.stmt]) -> bool:
        """Read statements in order; True where they return."""
        for statement in statements:
            self._statement = statement
            if isinstance(statement, ast.If):
                truth = self._decide(statement.test)
                if self._block(statement.body if truth else statement.orelse):
                    return True
                continue
            for inner in ast.walk(statement):
                if isinstance(inner, ast.IfExp):
                    truth = self._decide(inner.test)
                    self._skipped.update(ast.walk(inner.test))
                    self._skipped.update(ast.walk(inner.orelse if truth else inner.body))
            try:
                self.statement(statement)
            except Refused as refused:
                raise self._does(statement, refused) from None
            self._expressions_of(statement, statement)
            if isinstance(statement, ast.Return):
                return True
        return False

    def _expressions_of(self, node: ast.AST, statement: ast.stmt) -> None:
        for expression, _ in evaluation(node):
            if expression in self._skipped:
                continue
            try:
                self.expression(expression)
            except Refused as refused:
                if refused.message.startswith("it looks like"):
                    raise
                raise self._does(statement, refused) from None

    def _does(self, statement: ast.stmt, refused: Refused) -> Refused:
        line = self.view.text(statement).splitlines()[0]
        return Refused(
            "not-this-function", f"it looks like an RMSNorm, but it also does this: {line}", refused.line
        )

    def _only_raises(self, statement: ast.stmt) -> bool:
        """Whether a statement in front of the norm does nothing, or raises: it stays where it is."""
        if isinstance(statement, ast.If):
            held = not statement.orelse and all(isinstance(inner, ast.Raise) for inner in statement.body)
        else:
            held = isinstance(statement, ast.Assert)
        if not held or self.view.trace.branches.get(Span.of(statement.test)) is None:  # type: ignore[attr-defined]
            return False
        self._mark(statement.test)  # type: ignore[attr-defined]
        self._expressions_of(statement.test, statement)  # type: ignore[attr-defined]
        return True

    # -- branches -----------------------------------------------------------------------------

    def _mark(self, test: ast.expr) -> None:
        self._tests.update(ast.walk(test))
        self._decided.update(Span.of(node) for node in ast.walk(test) if isinstance(node, ast.expr))

    def _decide(self, test: ast.expr) -> bool:
        """Which way a test went, where it asks the module's state (a guard then) or the weight's dtype."""
        truth = self.view.trace.branches.get(Span.of(test))
        if truth is None:
            raise self._branch(test, truth)
        if asks_weight_dtype(self.view, self.norm, test):
            self.text.by_weight_dtype = True
        elif self._asks_state(test):
            guard = negated(test) if not truth else ast.unparse(test)
            if guard not in self.text.guards:
                self.text.guards.append(guard)
        else:
            raise self._branch(test, truth)
        self._mark(test)
        return truth

    def _branch(self, test: ast.AST, truth: Any) -> Refused:
        said = " ".join(self.view.text(test).split()) if isinstance(test, ast.expr) else "something"
        what = f"branches on `{said}`" + (f" (which was {truth} while tracing)" if truth is not None else "")
        return _also(self.view, test, what)

    def _asks_state(self, test: ast.expr) -> bool:
        gate = self.norm.gate if self.caller is None else None
        same_self = self._outer_self() == self.view.source.self_name
        return same_self and asks_state(self.view, str(gate.target) if gate is not None else None, test)

    def _outer_self(self) -> str:
        return self.view.source.self_name if self.caller is None else self.caller._outer_self()

    # -- expressions --------------------------------------------------------------------------

    def expression(self, expression: ast.expr) -> None:
        if isinstance(expression, ast.Name) and expression not in self._tests:
            self._names.append(expression)
        if isinstance(expression, ast.Subscript) and self._is_activation_table(expression):
            self.passed.add(expression)
            return
        super().expression(expression)

    def _attribute(self, expression: ast.Attribute) -> None:
        chain = attribute_chain(expression, self.view.source.self_name)
        if chain and expression not in self._tests:
            self._reads.append((chain, expression))
        super()._attribute(expression)

    def _call(self, call: ast.Call, nodes: list[fx.Node]) -> None:
        chain = attribute_chain(call.func, self.view.source.self_name)
        method = resolve(self.view.module, chain) if chain else None
        if isinstance(method, types.MethodType):
            return self._follow(call, chain, method, nodes)
        if isinstance(call.func, ast.Subscript) and self._is_activation_table(call.func):
            act = self.norm.act
            is_act = [node.name for node in nodes] == [act.name] if act is not None else False
            if is_act and len(call.args) == 1 and not call.keywords:
                return None
        return super()._call(call, nodes)

    def _is_activation_table(self, expression: ast.Subscript) -> bool:
        """Whether it is an entry of Transformers' table of activations, which makes the module anew."""
        table = global_value(self.view, expression.value)
        return type(table).__module__ == "transformers.activations" and isinstance(table, dict)

    def _unpacks_plainly(self, expression: ast.expr | None, depth: int = 0) -> bool:
        if isinstance(expression, ast.Name) and self._is_rest_of_shape(expression.id):
            return True
        return super()._unpacks_plainly(expression, depth)

    def _is_rest_of_shape(self, name: str) -> bool:
        """Whether a name is stored once, as the `*name` of an unpacked shape: it holds a list of numbers."""
        found = [
            node
            for node in ast.walk(self.view.source.tree)
            if isinstance(node, ast.Assign)
            and any(
                isinstance(part, ast.Starred)
                and isinstance(part.value, ast.Name)
                and part.value.id == name
                and isinstance(part.ctx, ast.Store)
                for target in node.targets
                for part in ast.walk(target)
            )
        ]
        return len(found) == 1 == len(self.view.stores(name)) and super()._unpacks_plainly(found[0].value)

    # -- methods ------------------------------------------------------------------------------

    def _follow(
        self, call: ast.Call, chain: tuple[str, ...], method: types.MethodType, nodes: list[fx.Node]
    ) -> None:
        """Read a method of the module as the forward is read, on what it is called with."""
        module, said = self.view.module, self.view.text(call.func)
        function = method.__func__
        if len(chain) > 1 or method.__self__ is not module or chain[0] in module.__dict__:
            raise _also(self.view, call, f"calls {said}(), which is no method of its class")
        if self.depth >= DEPTH:
            raise _also(self.view, call, f"calls {said}(), a method too deep to be followed")
        if not isinstance(function, types.FunctionType):
            raise _also(self.view, call, f"calls {said}(), which is no plain method")
        try:
            source = source_of((function,))
        except NoSource as error:
            raise _also(self.view, call, f"calls {said}(), whose source cannot be read ({error})") from None
        if source.tree.decorator_list:
            raise _also(self.view, call, f"calls {said}(), which is decorated")
        if any(isinstance(argument, ast.Starred) for argument in call.args) or any(
            keyword.arg is None for keyword in call.keywords
        ):
            raise _also(self.view, call, f"calls {said}() with arguments that are not written out")
        args = tuple(self._value(argument) for argument in call.args)
        kwargs = {str(keyword.arg): self._value(keyword.value) for keyword in call.keywords}
        trace = trace_function(module, source, (args, kwargs), self.attributes)
        inner = ForwardView(module, source, trace)
        made = [node for node in trace.graph.nodes if node.op not in UNEVALUATED]
        if not trace.complete or list(map(_what, made)) != list(map(_what, nodes)):
            raise _also(self.view, call, f"calls {said}(), which cannot be followed by itself")
        parameters = [*source.tree.args.posonlyargs, *source.tree.args.args][1:]
        arguments = dict(zip((p.arg for p in parameters), call.args, strict=False))
        arguments.update({str(keyword.arg): keyword.value for keyword in call.keywords})
        pairs = dict(zip(nodes, made, strict=True))
        frame = Frame(
            inner,
            norm=self.norm,
            text=self.text,
            attributes=self.attributes,
            caller=self,
            arguments=arguments,
            depth=self.depth + 1,
            pairs=pairs,
        )
        frame.read()
        self.methods.append((call, frame))

    def _value(self, expression: ast.expr) -> Any:
        """What an argument of a method was: a tensor on meta, a number, a plain attribute."""
        nodes = self.view.nodes_at.get(expression)
        if nodes:
            return nodes[-1].meta["val"]
        if isinstance(expression, ast.Constant):
            return expression.value
        chain = attribute_chain(expression, self.view.source.self_name)
        if chain and reads_plainly(self.view.module, chain):
            return self.attributes.get(".".join(chain), resolve(self.view.module, chain))
        if isinstance(expression, ast.Name) and self._statement is not None:
            before = self._statement.lineno
            found = [
                binding
                for binding in self.view.trace.bindings
                if binding.name == expression.id and binding.line is not None and binding.line < before
            ]
            nodes_by_name = {node.name: node for node in self.view.trace.graph.nodes}
            if found and found[-1].node in nodes_by_name:
                return nodes_by_name[found[-1].node].meta["val"]
        said = self.view.text(expression)
        raise _also(self.view, expression, f"calls a method with {said}, which is no tensor or number known")

    # -- what may be read ---------------------------------------------------------------------

    def _check_reads(self) -> None:
        """The fused line reads the weight and eps alone: what else is read must not matter."""
        weight = str(self.norm.weight.target) if self.norm.weight is not None else None
        inside = {node.value for _, node in self._reads}
        free = self._spoken()
        for chain, node in self._reads:
            if node in inside or node in self.view.called or node in free:
                continue
            if chain[0] == weight and (len(chain) == 1 or chain[1] in METADATA_ATTRS):
                continue
            said = self.view.text(node)
            raise _also(self.view, node, f"reads {said}, which may be set to another value later")
        tree = self.view.source.tree
        own = {*placeholders(self.norm)} if self.caller is None else set(self.arguments)
        inputs = {argument.arg for argument in parameters(tree)}
        if self.caller is not None:  # what a method is not given is its default
            own |= {name for name in inputs if is_literal(default_of(tree, name))}
        for name in self._names:
            if name.id in inputs - own and name not in free and isinstance(name.ctx, ast.Load):
                raise _also(self.view, name, f"takes more than one input, and reads {name.id}")

    def _spoken(self) -> set[ast.AST]:
        """The expressions that the fused line says itself: eps, the activation's name, a group's size."""
        found = self._freed
        eps = self.eps()
        if eps is not None:
            self._said(eps)
        for root in (self.act_name(), self.group_size()):
            found.update(ast.walk(root) if root is not None else ())
        size = self.group_size()
        if size is not None:  # other sizes are made of it, on the way to the views
            found.update(same for same in ast.walk(self.view.source.tree) if _same(same, size))
        if self.norm.inverse is None:
            for node in self._own(self.norm.eps_node):
                found.update(self._call_of_torch(self.view.expression(node)))
        return found

    def _call_of_torch(self, call: ast.expr | None) -> set[ast.AST]:
        """What F.rms_norm is called with, which the fused line says; a weight pins the width, else x does."""
        if not isinstance(call, ast.Call):  # in a method
            return set()
        given = dict(zip(("input", "normalized_shape", "weight", "eps"), call.args, strict=False))
        given.update({str(keyword.arg): keyword.value for keyword in call.keywords})
        if self.norm.weight is None:
            weight, shape = given.get("weight"), given.get("normalized_shape")
            if weight is not None and not is_none(weight):
                raise _also(self.view, weight, f"reads {self.view.text(weight)}, which may be set later")
            x = str(self.norm.input.target)
            widths = (f"{x}.shape[-1:]", f"({x}.shape[-1],)", f"[{x}.shape[-1]]", f"({x}.size(-1),)")
            if shape is None or ast.unparse(shape) not in widths:
                raise _also(self.view, call, "takes rows of one width alone, and no weight says which")
        return set(ast.walk(call))

    def _own(self, node: fx.Node | None) -> Iterator[fx.Node]:
        """`node`, a node of the forward, as this frame's trace has it; nothing where another made it."""
        if node is None:
            return
        if self.caller is None:
            same = [one for one in self.view.trace.graph.nodes if one.name == node.name]
            yield from same
            return
        for outer in self.caller._own(node):
            if outer in self.pairs:
                yield self.pairs[outer]

    def eps(self) -> ast.expr | None:
        """The expression in this function that eps is added from."""
        for node in self._own(self.norm.eps_node):
            for side in sides(self.view.expression(node), self.norm.inverse is None):
                if side is not None and self._is_value(side, self.norm.eps):
                    return side
        return None

    def eps_text(self) -> str | None:
        """eps as the forward can say it: a number, an attribute of the module, an input left alone."""
        for _, frame in self.methods:
            found = frame.eps_text()
            if found is not None:
                return found
        side = self.eps()
        return None if side is None else self._said(side)

    def _said(self, side: ast.expr) -> str | None:
        view, own = self.view, self.view.source.self_name
        self._freed.update(ast.walk(side))
        if isinstance(side, ast.Constant):
            return repr(side.value) if self.caller is not None else view.text(side)
        chain = attribute_chain(side, own)
        if chain:
            return ".".join((self._outer_self(), *chain))
        if isinstance(side, ast.Name):
            values = view.assigned(side.id)
            if len(values) == 1 and not is_parameter(view.source.tree, side.id):
                return self._said(values[0])
            if len(view.stores(side.id)) != 1:
                return None
            if self.caller is None:
                return side.id
            given = self.arguments.get(side.id, default_of(view.source.tree, side.id))
            if given is None:
                return None
            return self.caller._said(given) if side.id in self.arguments else constant(given)
        return None

    def _is_value(self, side: ast.expr, value: Any) -> bool:
        """Whether an expression has the value of eps, by plain reading alone."""
        if isinstance(side, ast.Constant):
            return type(side.value) is type(value) and side.value == value
        chain = attribute_chain(side, self.view.source.self_name)
        if chain:
            found = resolve(self.view.module, chain)
            plain = reads_plainly(self.view.module, chain) and isinstance(found, (int, float, type(None)))
            return plain and found == value
        if not isinstance(side, ast.Name):
            return False
        values = self.view.assigned(side.id)
        if len(values) == 1 and not is_parameter(self.view.source.tree, side.id):
            return self._is_value(values[0], value)
        if len(self.view.stores(side.id)) != 1:
            return False
        if self.caller is not None and side.id in self.arguments:
            return self.caller._is_value(self.arguments[side.id], value)
        default = default_of(self.view.source.tree, side.id)
        return isinstance(default, ast.Constant) and default.value == value

    def act_name(self) -> ast.expr | None:
        """The index into Transformers' table of activations, where the gate is activated so."""
        for node in self._own(self.norm.act):
            call = self.view.expression_at(node)
            if isinstance(call, ast.Call) and isinstance(call.func, ast.Subscript):
                if self._is_activation_table(call.func):
                    return call.func.slice
        return None

    def value_of(self, expression: ast.expr) -> Any:
        """The value of a constant or of a plain attribute of the module, else MISSING."""
        if isinstance(expression, ast.Constant):
            return expression.value
        chain = attribute_chain(expression, self.view.source.self_name)
        plain = chain and reads_plainly(self.view.module, chain)
        return resolve(self.view.module, chain) if plain else MISSING

    def group_size(self) -> ast.expr | None:
        """The attribute of the module that is the size of a group, in the view that makes them."""
        for node in self._own(self.norm.groups):
            call = self.view.expression(node)
            last = call.args[-1] if isinstance(call, ast.Call) and call.args else None
            for side in ast.walk(last) if last is not None else ():
                chain = attribute_chain(side, self.view.source.self_name)
                if chain and reads_plainly(self.view.module, chain):
                    if resolve(self.view.module, chain) == self.norm.group_size:
                        assert isinstance(side, ast.expr)
                        return side
        return None


def _what(node: fx.Node) -> tuple[str, Any]:
    return node.op, operator_name(node) or node.target


def _same(node: ast.AST, other: ast.AST) -> bool:
    return isinstance(node, ast.expr) and ast.unparse(node) == ast.unparse(other)
