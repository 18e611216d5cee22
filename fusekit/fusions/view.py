"""A traced forward as a fusion sees it: nodes of the graph and expressions of the source, tied by spans."""

import ast
import inspect
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from types import CodeType

import torch.nn as nn
from torch import fx

from fusekit.errors import FusekitError
from fusekit.forward import ForwardSource, Span, block_chain, text_at
from fusekit.forward.effects import Effects
from fusekit.forward.reads import DYNAMIC, MISSING, module_attribute
from fusekit.forward.rewriting import Block
from fusekit.forward.span import lines_of
from fusekit.tracing import Trace
from fusekit.tracing.effects import UNEVALUATED, effects_of_trace, expressions_of
from fusekit.tracing.instrument import captured_names


@dataclass
class ForwardView:
    """One instance's forward: its source, its trace, and the module they came from."""

    module: nn.Module
    source: ForwardSource
    trace: Trace
    _expressions: dict[Span, ast.expr] = field(default_factory=dict)
    _given: set[str] = field(default_factory=set)  # names that rewrites of this forward have taken
    freed: set[str] = field(default_factory=set)  # parts that a refused fusion leaves to another one

    def __post_init__(self) -> None:
        self._expressions.update(expressions_of(self.source.tree))

    def expression(self, node: fx.Node) -> ast.expr | None:
        """The expression of the source that made `node`, itself and not a helper that it called."""
        span = node.meta.get("span")
        return self._expressions.get(span) if span is not None and node.meta.get("direct") else None

    def expression_at(self, node: fx.Node) -> ast.expr | None:
        """The expression of the source during which `node` was made, in a helper or not."""
        span = node.meta.get("span") if node.op not in UNEVALUATED else None
        return self._expressions.get(span) if span is not None else None

    def stands_alone(self, expression: ast.expr) -> bool:
        """Whether it is all of an assignment's value or the one argument of a call: needs no parentheses."""
        for node in ast.walk(self.source.tree):
            if isinstance(node, ast.Call) and node.args == [expression] and not node.keywords:
                return True
            if isinstance(node, ast.Assign) and node.value is expression:
                return True
        return False

    def text(self, node: ast.expr | ast.stmt) -> str:
        """The source text of an expression or statement."""
        return text_at(self.source.file_text, Span.of(node))

    def submodule(self, path: str) -> nn.Module | None:
        """The submodule at `path`, None if there is none."""
        try:
            return self.module.get_submodule(path)
        except AttributeError:
            return None

    def call_of(self, node: fx.Node) -> ast.Call | None:
        """The expression `self.path(argument)` that a `call_module` node came from, if it is that."""
        found = self.expression(node)
        if not isinstance(found, ast.Call) or not isinstance(found.func, ast.Attribute):
            return None
        return found if ast.unparse(found.func) == f"{self.source.self_name}.{node.target}" else None

    @cached_property
    def nodes_at(self) -> dict[ast.expr, list[fx.Node]]:
        """The nodes of each expression, those of helpers it called included."""
        found: dict[ast.expr, list[fx.Node]] = {}
        for node in self.trace.graph.nodes:
            span = node.meta.get("span")
            if node.op not in UNEVALUATED and span in self._expressions:
                found.setdefault(self._expressions[span], []).append(node)
        return found

    @cached_property
    def effects(self) -> Effects:
        """What the forward may write, and which of its values may share storage, on every way."""
        return effects_of_trace(self.trace, self.module, self.source)

    @cached_property
    def paths(self) -> dict[int, str]:
        """The path of each submodule, by its id."""
        return {id(module): path for path, module in self.module.named_modules() if path}

    @cached_property
    def called(self) -> frozenset[ast.expr]:
        """The expressions that are called: the `f` of every `f(...)`."""
        return frozenset(node.func for node in ast.walk(self.source.tree) if isinstance(node, ast.Call))

    @cached_property
    def names(self) -> set[str]:
        """Every name that stands in the forward, or that it stores in another way."""
        found = set()
        for node in ast.walk(self.source.tree):
            if isinstance(node, ast.Name):
                found.add(node.id)
            elif isinstance(node, (ast.Global, ast.Nonlocal)):
                found.update(node.names)
        todo = [self.source.function.__code__]
        while todo:
            code = todo.pop()
            found.update(code.co_varnames, code.co_cellvars, code.co_freevars)
            todo.extend(const for const in code.co_consts if isinstance(const, CodeType))
        return found

    @cached_property
    def added_to(self) -> frozenset[ast.expr]:
        """The targets of `x += y`: they are stores in the tree, and read what `x` holds."""
        return frozenset(
            node.target for node in ast.walk(self.source.tree) if isinstance(node, ast.AugAssign)
        )

    def is_own_local(self, name: str) -> bool:
        """Whether `name` is a local of the forward that no other code can see."""
        code = self.source.function.__code__
        return name in code.co_varnames and name not in (*code.co_cellvars, *code.co_freevars)

    def is_local(self, name: str) -> bool:
        """Whether `name` is a local of the forward, seen by nested functions or not."""
        code = self.source.function.__code__
        return name in code.co_varnames or name in code.co_cellvars

    def short(self, expression: ast.expr | ast.stmt) -> str:
        """The text of an expression on one line, cut at 60 letters."""
        text = " ".join(self.text(expression).split())
        return text if len(text) <= 60 else f"{text[:57]}..."

    def new_name(self, wanted: str) -> str:
        """`wanted`, or with underscores behind it, such that nothing in the forward is called so."""
        while wanted in self.names or wanted in self._given:
            wanted += "_"
        self._given.add(wanted)
        return wanted

    def new_storage(self, *wanted: str) -> str:
        """The first of `wanted` that no attribute has for a name, or the last with underscores behind it."""
        attributes = {node.attr for node in ast.walk(self.source.tree) if isinstance(node, ast.Attribute)}

        def is_taken(name: str) -> bool:
            value = module_attribute(self.module, name)
            if value is DYNAMIC:  # asked of a `__getattr__` of the class, unless there is one of that name
                value = inspect.getattr_static(self.module, name, MISSING)
            held = value is not MISSING and not getattr(value, "is_merged_storage", False)
            return held or name in attributes or f".{name}" in self._given

        found = next((name for name in wanted if not is_taken(name)), wanted[-1])
        while is_taken(found):
            found += "_"
        self._given.add(f".{found}")
        return found

    @cached_property
    def _stores(self) -> dict[str, list[tuple[int | None, ast.expr | None]]]:
        """Of each name the places that store it: (line as bindings of the trace have it, a single value)."""
        found: dict[str, list[tuple[int | None, ast.expr | None]]] = {}
        function = self.source.function.__code__
        known: set[ast.AST] = set()
        for node in ast.walk(self.source.tree):
            targets: list[ast.expr] = []
            value = None
            if isinstance(node, ast.Assign):
                targets, value = node.targets, node.value
            elif isinstance(node, (ast.AnnAssign, ast.AugAssign, ast.For)):
                targets = [node.target]
                value = node.value if isinstance(node, ast.AnnAssign) else None
            for target in targets:
                singles = _pairs(target, value)
                for part in ast.walk(target):
                    if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Store):
                        known.add(part)
                        alone = singles.get(part)
                        found.setdefault(part.id, []).append((node.lineno, alone))  # type: ignore[attr-defined]
        stored = {
            node.id
            for node in ast.walk(self.source.tree)
            if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load) and node not in known
        }
        count = function.co_argcount + function.co_kwonlyargcount
        for name in function.co_varnames[:count]:
            found.setdefault(name, []).append((function.co_firstlineno, None))
        for node in ast.walk(self.source.tree):
            stored |= _bound(node) if node is not self.source.tree else set()
        locals_ = {*function.co_varnames[count:], *function.co_cellvars, *function.co_freevars}
        for name in stored | (locals_ - set(found)):  # by `with`, `except`, `import`, `:=`, a closure
            found.setdefault(name, []).append((None, None))
        return found

    def stores(self, name: str) -> list[int | None]:
        """The lines of the statements that store `name`, None for one that the trace does not follow."""
        return [line for line, _ in self._stores.get(name, ())]

    def values(self, name: str) -> list[tuple[int | None, ast.expr | None]]:
        """(line, value) of each statement that stores `name`; see `stores` and `assigned`."""
        return self._stores.get(name, [])

    def assigned(self, name: str) -> list[ast.expr]:
        """The values assigned to `name`; none where it is stored in any other way too."""
        values = [value for _, value in self._stores.get(name, ())]
        return [value for value in values if value is not None] if None not in values else []

    def unpacked(self, name: str) -> list[ast.expr]:
        """The values that are unpacked into `name` and others by an assignment."""
        return self._unpacked.get(name, [])

    @cached_property
    def _unpacked(self) -> dict[str, list[ast.expr]]:
        found: dict[str, list[ast.expr]] = {}
        for node in ast.walk(self.source.tree):
            for target in node.targets if isinstance(node, ast.Assign) else ():
                for item in target.elts if isinstance(target, (ast.Tuple, ast.List)) else ():
                    if isinstance(item, ast.Name):
                        found.setdefault(item.id, []).append(node.value)  # type: ignore[attr-defined]
        return found

    def place(self, expression: ast.expr) -> tuple[Block, int] | None:
        """The innermost block and the index of the statement in it that holds `expression`.

        None when the expression stands in code of its own: a lambda, a comprehension, a nested def.
        """
        chain = self.chain(expression)
        return chain[-1] if chain else None

    def chain(self, expression: ast.expr) -> list[tuple[Block, int]]:
        """The blocks around `expression`, outermost first, and the index in each of what holds it.

        Empty when it stands in code of its own: a lambda, a comprehension, a nested def.
        """
        try:
            chain = block_chain(self.source.tree.body, expression)
        except FusekitError:
            return []
        block, index = chain[-1]
        if any(isinstance(held[at], SCOPES) for held, at in chain):
            return []
        return chain if any(own is expression for own in own_expressions(block[index])) else []

    def statement_start(self, statement: ast.stmt) -> tuple[Span, str, bool]:
        """(insertion point before a statement, its indentation, whether it begins its line)."""
        span = Span(statement.lineno, statement.col_offset, statement.lineno, statement.col_offset)
        before = text_at(
            self.source.file_text, Span(statement.lineno, 0, statement.lineno, statement.col_offset)
        )
        above = lines_of(self.source.file_text)[statement.lineno - 2] if statement.lineno > 1 else ""
        return span, before, not before.strip() and not above.rstrip("\r\n").endswith("\\")


def _pairs(target: ast.expr, value: ast.expr | None) -> dict[ast.expr, ast.expr]:
    """The names of an assignment's target whose one value stands in the text: `a, b = 1, 2` has two."""
    if value is None:
        return {}
    sequences = (ast.Tuple, ast.List)
    if isinstance(target, sequences) and isinstance(value, sequences) and len(target.elts) == len(value.elts):
        if not any(isinstance(item, ast.Starred) for item in (*target.elts, *value.elts)):
            pairs = [_pairs(*pair) for pair in zip(target.elts, value.elts, strict=True)]
            return {name: one for pair in pairs for name, one in pair.items()}
    return {target: value}


def _bound(node: ast.AST) -> set[str]:
    """The names that a node stores without naming them in an expression."""
    if isinstance(node, ast.ExceptHandler):
        return {node.name} if node.name else set()
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        return {node.name}
    if isinstance(node, ast.alias):
        return {node.asname or node.name.partition(".")[0]}
    if isinstance(node, (ast.Global, ast.Nonlocal)):
        return set(node.names)
    return captured_names(node) if isinstance(node, ast.pattern) else set()


def stored_by(node: ast.AST) -> set[str]:
    """The names that a node stores itself, in whatever way."""
    if isinstance(node, ast.Name):
        return set() if isinstance(node.ctx, ast.Load) else {node.id}
    return {node.target.id} if isinstance(node, ast.NamedExpr) else _bound(node)


def line_of(node: fx.Node | None) -> int | None:
    """The line of the forward during which `node` was made, None where that is not known."""
    span = node.meta.get("span") if node is not None else None
    return span.line if span is not None else None


SCOPES = (ast.Lambda, ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)


def own_expressions(node: ast.AST) -> Iterator[ast.expr]:
    """Expressions of a statement that are evaluated with it: not its blocks, not code of another scope."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (ast.stmt, ast.ExceptHandler, ast.match_case)):
            continue
        if isinstance(child, ast.expr):
            yield child
            if isinstance(child, (*COMPREHENSIONS, ast.Lambda)):
                continue
        yield from own_expressions(child)


def evaluation(node: ast.AST, conditional: bool = False) -> Iterator[tuple[ast.expr, bool]]:
    """The expressions under `node` in the order of their evaluation, and whether each may be skipped."""
    if isinstance(node, (*COMPREHENSIONS, ast.Lambda)):
        yield node, conditional  # type: ignore[misc]
        return
    if isinstance(node, ast.BoolOp):
        for index, value in enumerate(node.values):
            yield from evaluation(value, conditional or index > 0)
    elif isinstance(node, ast.IfExp):
        yield from evaluation(node.test, conditional)
        yield from evaluation(node.body, True)
        yield from evaluation(node.orelse, True)
    elif isinstance(node, ast.Compare):
        yield from evaluation(node.left, conditional)
        for index, value in enumerate(node.comparators):
            yield from evaluation(value, conditional or index > 0)
    elif isinstance(node, (ast.Assign, ast.AnnAssign, ast.AugAssign)):
        if node.value is not None:
            yield from evaluation(node.value, conditional)
        for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
            yield from evaluation(target, conditional)
    elif isinstance(node, ast.Dict):
        for key, value in zip(node.keys, node.values, strict=True):
            if key is not None:
                yield from evaluation(key, conditional)
            yield from evaluation(value, conditional)
    else:
        for child in ast.iter_child_nodes(node):
            if not isinstance(child, (ast.stmt, ast.expr_context, ast.operator)):
                yield from evaluation(child, conditional)
    if isinstance(node, ast.expr):
        yield node, conditional
