"""What following a forward finds: effects by the node that has them, values, and what code can reach."""

import ast
import contextlib
import functools
import types
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch.nn as nn

from fusekit.forward.effects import known as objects
from fusekit.forward.effects.frames import Arguments, Frame, Super
from fusekit.forward.effects.rules import on
from fusekit.forward.effects.values import (
    ANY,
    CONTEXT,
    KNOWN,
    NOWHERE,
    OUTSIDE,
    REST,
    TENSOR,
    Region,
    State,
    Value,
    anything,
    join,
)

WORK = 60_000  # expressions and statements that are followed for one forward

Kind = str  # "write", "may write", "store", "context"


class TooMuch(Exception):
    """The forward is too large to be followed."""


class Unreadable(Exception):
    """A call in it is too large, or gets to code that cannot be read and may do anything."""


@dataclass(frozen=True)
class Effect:
    """What evaluating a node may do to `regions`: `write`, `may write` (code that is not known does it),
    `store` (an attribute of a known object) or `context` (the grad mode, autocast and the like change).

    `lays`: the tensor itself gets other storage or attributes, not only other numbers.
    """

    kind: Kind
    regions: frozenset[Region]
    why: str
    stored: tuple[int, str] | None = None  # of a store: the id of the object, and the attribute
    lays: bool = False


class Notes:
    """The part of the interpreter that takes notes."""

    def __init__(self, owner: nn.Module, hints: Callable[[ast.AST], bool]):
        self.owner = owner
        self.is_hinted = hints
        self.closures: dict[Region, tuple[Any, Frame]] = {}
        self.delayed: dict[Region, dict[Effect, None]] = {}
        self.behind: dict[Region, tuple[Any, Frame]] = {}  # the generator whose body is delayed
        self.globals: dict[tuple[int, str], Value] = {}  # what the forward, or what it calls, stores there
        self.shared: dict[Region, frozenset[Region]] = {}  # what lies in tensors of the module since
        self.of_tensors: set[Region] = set()  # storage that operators have made: it holds nothing
        self.volatile: set[str] = set()
        self.restored: dict[str, Value] = {}  # what earlier calls may have stored in attributes
        self.left: dict[str, Value] = {}  # and what this one does
        self.found: dict[ast.AST, dict[Effect, None]] = {}
        self.values: dict[ast.AST, Value] = {}
        self.views: dict[ast.AST, str] = {}
        self.stores: dict[tuple[ast.AST, str], Value] = {}
        self.called: dict[ast.AST, dict[int, nn.Module]] = {}
        self.alike: dict[int, list[nn.Module]] = {}  # modules for which another one is followed
        self.settings: dict[ast.AST, set[tuple[int, str]]] = {}
        self._anchor: ast.AST | None = None
        self._silent = 0
        self._with = 0
        self._listeners: list[dict[Effect, None]] = []
        self._stack: list[Any] = []
        self._frames: dict[Hashable, int] = {}
        self._work = 0
        self._call_limit = 0
        self._kept: list[Any] = []
        self._inside: list[str] = []

    # What the other parts do, and these here need.
    evaluate: Callable[..., Value]
    block: Callable[..., State | None]
    bind: Callable[..., None]
    arithmetic: Callable[..., Value]
    keyed_items: Callable[..., list[tuple[Hashable, Value]]]
    function: Callable[..., Value]
    run_closure: Callable[..., Value]
    call: Callable[..., Value]
    operator: Callable[..., Value]

    # -- taking notes ---------------------------------------------------------------------------

    def count(self) -> None:
        self._work += 1
        if self._work > WORK:
            raise TooMuch("the forward, and what it calls, are too large to be followed")
        if self._anchor is not None and self._work > self._call_limit:
            raise Unreadable("does too much to be followed")

    @contextlib.contextmanager
    def silence(self) -> Iterator[None]:
        """Nothing is noted: the state has not settled yet."""
        self._silent += 1
        try:
            yield
        finally:
            self._silent -= 1

    @contextlib.contextmanager
    def in_with(self) -> Iterator[None]:
        self._with += 1
        try:
            yield
        finally:
            self._with -= 1

    @contextlib.contextmanager
    def listening(self) -> Iterator[dict[Effect, None]]:
        """The effects that are found meanwhile, noted or not."""
        heard: dict[Effect, None] = {}
        self._listeners.append(heard)
        try:
            yield heard
        finally:
            self._listeners.pop()

    def effect(self, node: ast.AST, effect: Effect) -> None:
        if self._inside:
            effect = replace(effect, why=f"{effect.why} in {self._inside[0]}")
        for heard in self._listeners:
            heard[effect] = None
        if not self._silent:
            self.found.setdefault(self._anchor or node, {})[effect] = None

    def write(self, node: ast.AST, regions: frozenset[Region], why: str, lays: bool = False) -> None:
        if regions:
            self.effect(node, Effect("write", regions, f"{text_of(node)} {why}", lays=lays))

    def context(self, node: ast.AST, why: str) -> None:
        if on("context"):
            self.effect(node, Effect("context", NOWHERE, f"{text_of(node)} {why}"))

    def decides(self, value: Value, node: ast.AST) -> None:
        """A constant has decided which way is followed: where it is a setting, that may change later."""
        if value.settings and not self._silent:
            self.settings.setdefault(self._anchor or node, set()).update(value.settings)

    def noted(self, node: ast.AST, value: Value) -> None:
        if self._silent:
            return
        old = self.values.get(node)
        self.values[node] = value if old is None else join(old, value)

    def hinted(self, node: ast.AST, value: Value) -> Value:
        if ANY in value.kinds and self.is_hinted(node):
            return replace(value, kinds=(value.kinds - {ANY}) | {TENSOR})
        return value

    def stored_name(self, node: ast.AST, name: str, value: Value) -> None:
        if not self._silent:
            old = self.stores.get((node, name))
            self.stores[node, name] = value if old is None else join(old, value)

    def region(self, node: ast.AST, frame: Frame) -> Region:
        self._kept.append(node)
        return Region(
            "new", (id(self._anchor), frame.number if not frame.is_forward else 0, id(node)), text_of(node)
        )

    def delay(self, region: Region, effects: dict[Effect, None]) -> None:
        if effects and on("generators"):
            self.delayed.setdefault(region, {}).update(effects)

    def consume(self, value: Value, node: ast.AST, state: State) -> None:
        """A generator goes on: what its body does happens now, with what its names hold now."""
        for region in value.regions:
            effects = self.delayed.get(region)
            if not effects:
                continue
            for effect in effects:
                self.effect(node, effect)
            reached = self.reach([anything({region})], state)
            if region in self.behind:
                reached |= self.reach(self.captured(*self.behind[region], state), state)
            self.effect(node, Effect("may write", reached, f"{text_of(node)} goes on with a generator"))

    # -- what can be reached ----------------------------------------------------------------------

    def reach(self, values: list[Value], state: State) -> frozenset[Region]:
        """Everything that code which gets these values can write."""
        found: set[Region] = set()
        todo = [region for value in values for region in value.regions]
        if any(KNOWN in value.kinds and _reaches(one) for value in values for one in value.objects):
            todo.append(OUTSIDE)
        while todo:
            region = todo.pop()
            if region in found:
                continue
            found.add(region)
            if region.deep:
                todo += [OUTSIDE, *(state.escaped if on("escapes") else ())]
            if on("containers"):
                for value in state.heap.get(region, {}).values():
                    todo += value.regions
                    if KNOWN in value.kinds and any(map(_reaches, value.objects)):
                        todo.append(OUTSIDE)
            if region in self.closures and on("closures"):
                for value in self.captured(*self.closures[region], state):
                    todo += value.regions
        return frozenset(found)

    def captured(self, node: Any, frame: Frame, state: State) -> list[Value]:
        found = []
        for name in ast.walk(node):
            if isinstance(name, ast.Name):
                at: Frame | None = frame
                while at is not None:
                    if (at.number, name.id) in state.names:
                        found.append(state.names[at.number, name.id])
                        break
                    at = at.outer
        return found

    def escape(self, value: Value, state: State) -> None:
        """A value is stored where other code may find it."""
        state.escaped |= frozenset(r for r in self.reach([value], state) if r.kind == "new")

    def unknown(self, node: ast.AST, state: State, values: list[Value], why: str, frame: Frame) -> Value:
        """Code that cannot be read gets these values."""
        reached = self.reach(values, state)
        if OUTSIDE in reached and self._anchor is not None and on("unknown-calls"):
            raise Unreadable(f"gets to what is not known: {text_of(node)} {why}")
        for region in sorted(reached & self.closures.keys(), key=lambda r: r.label):
            self.run_closure(region, Arguments(rest=anything(reached), named=anything(reached)), node, state)
        reached = self.reach(values, state)
        for region in reached:
            for effect in self.delayed.get(region, ()):
                self.effect(node, effect)
        if reached and on("unknown-calls"):
            self.effect(node, Effect("may write", reached, f"{text_of(node)} {why}"))
        if any(region.kind != "new" and region.deep for region in reached):
            self.escape(anything(reached), state)
        for region in reached:
            if region.kind == "new" and region not in self.of_tensors:
                state.put(region, REST, anything(reached))
        if any(CONTEXT in value.kinds for value in values):
            self.context(node, "gets a context manager")
        return anything({*reached, replace(self.region(node, frame), deep=False)})


def text_of(node: ast.AST) -> str:
    try:
        text = (
            " ".join(ast.unparse(node).split())
            if isinstance(node, (ast.expr, ast.stmt))
            else type(node).__name__
        )
    except Exception:
        text = type(node).__name__
    return text if len(text) <= 60 else f"{text[:57]}..."


def _reaches(one: Any) -> bool:
    """Whether other things can be reached through a known object."""
    if isinstance(one, (types.MethodType, functools.partial, Super)):
        return True
    return not isinstance(one, objects.INERT)
