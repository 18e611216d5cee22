"""Which names of a forward may share storage, followed to a fixed point."""

import ast
import types
from collections.abc import Iterable
from typing import Any

import torch
import torch.nn as nn

from fusekit.forward.fresh import Instance
from fusekit.forward.names import (
    FUNCTIONS,
    KEEPS,
    MODULE_NAMES,
    base_name,
    call_name,
    captured_names,
    captures,
    has_underscore,
    parameters_of,
    rebound_names,
)
from fusekit.forward.reads import DYNAMIC, SEES_NAMES, attribute_chain, resolve
from fusekit.forward.sharing import How, sources
from fusekit.forward.source import NoSource, cell_contents, forward_chain


def aliasing_names(forward: ast.FunctionDef, seed: str | Iterable[str], module: nn.Module) -> set[str]:
    """The seed names and every name of `forward` that may share storage with one, anywhere in it.

    Every name is followed back to what its values may lie in: what a parameter or an outer name
    holds, and each expression that allocates. Names share storage if they have one such origin in
    common, through any chain of assignments (tuples, starred, `:=`, `+=`, `for`, `with`,
    comprehensions, `match`), containers, attributes (`self.h = x` makes `self` share with `x`), views,
    branches, and nested functions that capture or are given one. The order of the statements does
    not count, nor do scopes: a name is one name. What `returns_fresh` holds for `module`, whose
    attributes count as they are now, shares nothing. Two parameters are taken to be apart. A call may
    keep an argument in `self` if it is a method of it or gets it, and in another argument if its result is
    dropped or it is called as the methods of containers are.
    Teaching-only: the library follows the traced values instead (`fusekit.tracing.aliasing`).

    >>> tree = ast.parse("def forward(self, x, y):\\n a = [x.view(-1)]\\n b, c = a[0], y + 1\\n return b")
    >>> sorted(aliasing_names(tree.body[0], {"b"}, nn.Module()))
    ['a', 'b', 'x']
    """
    seeds = {seed} if isinstance(seed, str) else set(seed)
    return _Flow(forward, module).sharing(seeds)


TABLES = frozenset({"__dict__", "__setattr__", "__delattr__", "_modules", "_parameters", "_buffers"})


class _Flow:
    """Which origins the names of a forward may hold: a name outside, or an expression that allocates."""

    def __init__(self, forward: ast.FunctionDef, module: nn.Module):
        self.forward = forward
        parameters = parameters_of(forward)
        positional = [*forward.args.posonlyargs, *forward.args.args]
        self.own = positional[0].arg if positional else ""
        self.nodes = [node for statement in forward.body for node in ast.walk(statement)]
        self.names = {node.id for node in self.nodes if isinstance(node, ast.Name)} | set(parameters)
        self.functions = [node for node in self.nodes if isinstance(node, FUNCTIONS)]
        stored, outer = self._stored()
        bound = stored | set(parameters)
        self.names |= bound
        self.how = How(self._instance(module, stored), frozenset(bound), _around(module))
        self.held: dict[str, set[Any]] = {}
        self.inside: dict[Any, set[Any]] = {}  # origin -> origins of what it may hold
        for name in (*parameters, *(self.names - bound), *outer):
            self.held[name] = {name}
        self.binds: list[tuple[str, ast.AST]] = []
        self.keeps: list[tuple[ast.AST, ast.AST]] = []
        self.calls = [node for node in self.nodes if isinstance(node, ast.Call)]
        for node in self.nodes:
            self._collect(node)
        self._solve()

    def _stored(self) -> tuple[set[str], set[str]]:
        """The names stored anywhere in the forward, and those of them that are of an outer scope."""
        stored, outer = rebound_names(self.forward.body), set()
        for node in self.nodes:
            stored |= {*parameters_of(node), *rebound_names([node])}
            if isinstance(node, ast.comprehension):
                stored |= {part.id for part in ast.walk(node.target) if isinstance(part, ast.Name)}
            elif isinstance(node, (ast.Global, ast.Nonlocal)):
                outer.update(node.names)
        return stored, outer

    def _instance(self, module: nn.Module, names: set[str]) -> Instance:
        stored: set[str] = set()
        settled, handed_on = bool(self.own) and self.own not in names, False
        read_through = {id(node.value) for node in self.nodes if isinstance(node, ast.Attribute)}
        for node in self.nodes:
            if isinstance(node, ast.Attribute):
                if not isinstance(node.ctx, ast.Load):
                    stored.add(node.attr)
                settled &= node.attr not in TABLES
            elif isinstance(node, ast.Name) and node.id == self.own:
                handed_on |= id(node) not in read_through
            elif isinstance(node, ast.Call):
                name = call_name(node)
                settled &= name not in ("setattr", "delattr", "add_module")
                settled &= not (name or "").startswith("register_")
                handed_on |= name == "super"
            chain = attribute_chain(node, self.own)
            handed_on |= bool(chain) and _runs_code_of(module, resolve(module, chain))
        settled &= not stored & {"forward", "__call__", "__class__"}
        return Instance(module, self.own, frozenset(stored), settled, handed_on)

    def _collect(self, node: ast.AST) -> None:
        if isinstance(node, ast.Assign):
            for target in node.targets:
                self._assign(target, node.value)
        elif isinstance(node, (ast.AnnAssign, ast.NamedExpr)):
            if node.value is not None:
                self._assign(node.target, node.value)
        elif isinstance(node, ast.AugAssign):
            self._assign(node.target, node.value)
            self.keeps.append((node.target, node.value))  # a list takes the items of the other
        elif isinstance(node, (ast.For, ast.AsyncFor, ast.comprehension)):
            self._assign(node.target, node.iter)
        elif isinstance(node, ast.withitem):
            if node.optional_vars is not None:
                self._assign(node.optional_vars, node.context_expr)
        elif isinstance(node, ast.Match):
            for case in node.cases:
                self.binds += [(name, node.subject) for name in captured_names(case.pattern)]
        elif isinstance(node, ast.ExceptHandler) and node.name:
            raised = [other.exc for other in self.nodes if isinstance(other, ast.Raise) and other.exc]
            self.binds += [(node.name, exc) for exc in raised]
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            for name in rebound_names([node]):
                self.held.setdefault(name, {name}).add(name)
        elif isinstance(node, (*FUNCTIONS, ast.ClassDef)):
            self._function(node)
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
            self._kept_by(node.value, dropped=True)
        elif isinstance(node, ast.Call):
            self._kept_by(node, dropped=False)

    def _assign(self, target: ast.expr, value: ast.expr) -> None:
        if isinstance(target, ast.Starred):
            self._assign(target.value, value)
        elif isinstance(target, ast.Name):
            self.binds.append((target.id, value))
        elif isinstance(target, (ast.Tuple, ast.List)):
            parts = [value] * len(target.elts)
            if isinstance(value, (ast.Tuple, ast.List)) and len(value.elts) == len(parts):
                if not any(isinstance(item, ast.Starred) for item in (*value.elts, *target.elts)):
                    parts = value.elts
            for item, part in zip(target.elts, parts, strict=True):
                self._assign(item, part)
        elif isinstance(target, (ast.Attribute, ast.Subscript)):
            self.keeps.append((target.value, value))

    def _function(self, node: ast.AST) -> None:
        defaults: list[ast.expr] = []
        if isinstance(node, FUNCTIONS):
            defaults = [*node.args.defaults, *(d for d in node.args.kw_defaults if d is not None)]
            self.binds += [(name, default) for name in parameters_of(node) for default in defaults]
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            self.held.setdefault(node.name, set()).add(node)
            if isinstance(node, ast.ClassDef):
                self.inside[node] = {part for part in ast.walk(node) if isinstance(part, FUNCTIONS)}
            # A decorator gets the function, and what it returns stands in its place.
            extra = [*node.decorator_list, *(node.bases if isinstance(node, ast.ClassDef) else defaults)]
            self.binds += [(node.name, part) for part in (*captures(node), *extra)]

    def _kept_by(self, call: ast.Call, dropped: bool) -> None:
        """What a call may store in what it is given."""
        name = call_name(call)
        value = self.how.instance.value(call.func) if self.how.instance else DYNAMIC
        parts = [*call.args, *(keyword.value for keyword in call.keywords)]
        receiver = call.func.value if isinstance(call.func, ast.Attribute) else None
        is_self = isinstance(receiver, ast.Name) and receiver.id == self.own
        keepers: list[ast.expr] = []
        is_tensors = has_underscore(name) and name != "set_" and hasattr(torch.Tensor, str(name))
        if is_tensors and receiver is not None and not is_self:
            pass  # it copies
        elif name in KEEPS or (dropped and base_name(call.func) not in MODULE_NAMES - self.how.bound):
            keepers = [*parts, *([] if receiver is None or self.how.holds_nothing(receiver) else [receiver])]
        if is_self and receiver is not None and not isinstance(value, nn.Module):
            keepers.append(receiver)
        keepers += [part for part in parts if isinstance(part, ast.Name) and part.id == self.own]
        self.keeps += [(keeper, part) for keeper in keepers for part in parts if part is not keeper]

    def _solve(self) -> None:
        size = -1
        while size != (size := self._size()):
            for name, value in self.binds:
                self.held.setdefault(name, set()).update(self.origins(value))
            for keeper, value in self.keeps:
                kept = self.origins(value)
                for origin in self.origins(keeper):
                    self.inside.setdefault(origin, set()).update(kept - {origin})
            for call in self.calls if self.functions else ():
                arguments = [*call.args, *(keyword.value for keyword in call.keywords)]
                given = set().union(*map(self.origins, arguments))
                called = given | self.origins(call.func)
                for function in self.functions:
                    if function in called:
                        for name in parameters_of(function):
                            self.held.setdefault(name, set()).update(given)

    def _size(self) -> int:
        return sum(map(len, self.held.values())) + sum(map(len, self.inside.values()))

    def origins(self, expr: ast.AST) -> set[Any]:
        """Everything that the value of an expression may lie in or hold."""
        found: set[Any] = set()
        for source in sources(expr, self.how):
            found |= self.held.get(source.id, set()) if isinstance(source, ast.Name) else {source}
        return self._reached(found)

    def _reached(self, origins: set[Any]) -> set[Any]:
        found, todo = set(origins), list(origins)
        while todo:
            new = self.inside.get(todo.pop(), set()) - found
            found |= new
            todo.extend(new)
        return found

    def sharing(self, seeds: set[str]) -> set[str]:
        """The seeds and the names that have an origin in common with one."""
        if self.names & SEES_NAMES:
            return self.names | seeds  # locals() hands all of them to any code
        every = {name: self._reached(origins) for name, origins in self.held.items()}
        wanted = set().union(*(every.get(name, set()) for name in seeds))
        return seeds | {name for name, origins in every.items() if origins & wanted}


def _runs_code_of(module: nn.Module, value: Any) -> bool:
    """Whether an attribute of the module is a method or property of it, whose code gets `self`."""
    return value is DYNAMIC or (isinstance(value, types.MethodType) and value.__self__ is module)


def _around(module: nn.Module) -> dict[str, Any]:
    """The globals and the closure of a module's forward, empty where it is no function."""
    try:
        function = forward_chain(module, original=True)[-1]
    except NoSource:
        return {}
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    return {**function.__globals__, **{name: cell_contents(cell) for name, cell in cells}}
