"""One function that is being followed, and what it was called with."""

import ast
import functools
import types
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from fusekit.forward.effects.values import (
    State,
    Value,
)
from fusekit.forward.names import parameters_of


@dataclass
class Arguments:
    """What a call gives: `rest` and `named` are unpacked from what has no known length or keys."""

    positional: list[Value] = field(default_factory=list)
    keywords: dict[str, Value] = field(default_factory=dict)
    rest: Value | None = None
    named: Value | None = None
    maybe: set[str] = field(default_factory=set)  # keywords that may not be there

    def all(self) -> list[Value]:
        found = [*self.positional, *self.keywords.values()]
        return found + [value for value in (self.rest, self.named) if value is not None]

    def given(self, index: int, name: str) -> list[Value]:
        """What may be the argument at a position or of a name."""
        names = (name, "input") if name == "self" else (name,)
        found = [self.keywords[one] for one in names if one in self.keywords]
        if index < len(self.positional):
            found.append(self.positional[index])
        elif self.rest is not None:
            found.append(self.rest)
        if self.named is not None:
            found.append(self.named)
        return found or list(self.keywords.values())  # spelled in a way that the schema does not know

    def before(self, *values: Value) -> "Arguments":
        return Arguments([*values, *self.positional], self.keywords, self.rest, self.named, self.maybe)


@dataclass(frozen=True, eq=False)
class Super:
    """`super()` in a method: attributes are looked for behind `home`."""

    home: type
    own: Any


@dataclass
class Loop:
    breaks: State | None = None
    continues: State | None = None


@dataclass(eq=False)
class Frame:
    """One function that is being followed."""

    number: int
    tree: ast.FunctionDef | ast.Lambda | ast.AsyncFunctionDef
    globals: dict[str, Any]
    cells: dict[str, Any] = field(default_factory=dict)  # closure variables of a function that exists
    outer: "Frame | None" = None  # of a nested function
    is_forward: bool = False
    class_name: str | None = None
    home: type | None = None  # the class whose method it is, for `super()`
    own: Any = None  # the object whose method it is
    local: frozenset[str] = frozenset()
    returned: list[Value] = field(default_factory=list)
    yielded: list[Value] | None = None
    exit: State | None = None
    loops: list[Loop] = field(default_factory=list)
    tries: list[list[State | None]] = field(default_factory=list)
    has_closures: bool = False


@functools.lru_cache(maxsize=4096)
def locals_of(tree: Any) -> frozenset[str]:
    """The names that are local to a function."""
    found = set(parameters_of(tree))
    declared: set[str] = set()
    for node in own_nodes(tree):
        if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
            found.add(node.id)
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            found.add(node.name)
        elif isinstance(node, (ast.Global, ast.Nonlocal)):
            declared.update(node.names)
        elif isinstance(node, ast.ExceptHandler) and node.name:
            found.add(node.name)
        elif isinstance(node, ast.alias):
            found.add(node.asname or node.name.partition(".")[0])
        elif isinstance(node, (ast.MatchAs, ast.MatchStar)) and node.name:
            found.add(node.name)
        elif isinstance(node, ast.MatchMapping) and node.rest:
            found.add(node.rest)
    return frozenset(found - declared)


def own_nodes(tree: Any) -> Iterator[ast.AST]:
    """The nodes of a function that are not of functions in it; of comprehensions only what `:=` stores."""
    body = tree.body if isinstance(tree.body, list) else [tree.body]
    todo: list[tuple[ast.AST, bool]] = [(node, False) for node in body]
    while todo:
        node, inside = todo.pop()
        if isinstance(node, ast.Name) and inside and not isinstance(node.ctx, ast.Load):
            continue
        yield node
        if isinstance(node, ast.NamedExpr):
            yield node.target
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)):
            continue
        inside |= isinstance(node, (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp))
        todo += [(child, inside) for child in ast.iter_child_nodes(node)]


def defaults_of(function: types.FunctionType, tree: Any) -> dict[str, Any]:
    names = [parameter.arg for parameter in (*tree.args.posonlyargs, *tree.args.args)]
    given = function.__defaults__ or ()
    found = dict(zip(names[len(names) - len(given) :], given, strict=True)) if given else {}
    return {**found, **(function.__kwdefaults__ or {})}
