"""What calls do: operators by their schemas, functions and modules by their own text, all else anything."""

import ast
import builtins
import contextlib
import dataclasses
import functools
import inspect
import logging
import types
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
import torch.nn as nn

from fusekit.forward.effects import known as objects
from fusekit.forward.effects.rules import on
from fusekit.forward.effects.values import (
    ANY,
    BOTTOM,
    CONTAINER,
    CONTEXT,
    FUNCTION,
    KNOWN,
    NOWHERE,
    OUTSIDE,
    PLAIN,
    PLAIN_VALUE,
    REST,
    TENSOR,
    UNSET,
    Region,
    State,
    Value,
    anything,
    container,
    join,
    joined,
    plain,
    tensor,
)
from fusekit.forward.names import parameters_of
from fusekit.forward.operators import SPELLINGS, Signature, operator_signature, signature_of
from fusekit.forward.reads import DYNAMIC, MISSING, SIMPLE, module_shape
from fusekit.forward.source import original_class

if TYPE_CHECKING:
    from fusekit.forward.effects.interpreter import Frame

DEPTH = 10  # calls within calls that are followed
AGAIN = 3  # how often one function may stand in them
WORK = 60_000  # expressions and statements that are followed for one forward
CALL_WORK = 4_000  # and for one call in it

Kind = str  # "write", "may write", "store", "context"


class TooMuch(Exception):
    """The forward is too large to be followed."""


class _Unreadable(Exception):
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


class Calls:
    """The part of the interpreter that follows calls, attributes and items."""

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

    # these are the other half's
    evaluate: Callable[..., Value]
    block: Callable[..., State | None]
    bind: Callable[..., None]

    # -- taking notes ---------------------------------------------------------------------------

    def count(self) -> None:
        self._work += 1
        if self._work > WORK:
            raise TooMuch("the forward, and what it calls, are too large to be followed")
        if self._anchor is not None and self._work > self._call_limit:
            raise _Unreadable("does too much to be followed")

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
            self.effect(node, Effect("write", regions, f"{_text(node)} {why}", lays=lays))

    def context(self, node: ast.AST, why: str) -> None:
        if on("context"):
            self.effect(node, Effect("context", NOWHERE, f"{_text(node)} {why}"))

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

    def region(self, node: ast.AST, frame: "Frame") -> Region:
        self._kept.append(node)
        return Region(
            "new", (id(self._anchor), frame.number if not frame.is_forward else 0, id(node)), _text(node)
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
            self.effect(node, Effect("may write", reached, f"{_text(node)} goes on with a generator"))

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

    def captured(self, node: Any, frame: "Frame", state: State) -> list[Value]:
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

    def unknown(self, node: ast.AST, state: State, values: list[Value], why: str, frame: "Frame") -> Value:
        """Code that cannot be read gets these values."""
        reached = self.reach(values, state)
        if OUTSIDE in reached and self._anchor is not None and on("unknown-calls"):
            raise _Unreadable(f"gets to what is not known: {_text(node)} {why}")
        for region in sorted(reached & self.closures.keys(), key=lambda r: r.label):
            self.run_closure(region, Arguments(rest=anything(reached), named=anything(reached)), node, state)
        reached = self.reach(values, state)
        for region in reached:
            for effect in self.delayed.get(region, ()):
                self.effect(node, effect)
        if reached and on("unknown-calls"):
            self.effect(node, Effect("may write", reached, f"{_text(node)} {why}"))
        if any(region.kind != "new" and region.deep for region in reached):
            self.escape(anything(reached), state)
        for region in reached:
            if region.kind == "new" and region not in self.of_tensors:
                state.put(region, REST, anything(reached))
        if any(CONTEXT in value.kinds for value in values):
            self.context(node, "gets a context manager")
        return anything({*reached, replace(self.region(node, frame), deep=False)})

    # -- objects that are there -------------------------------------------------------------------

    def value_of(self, found: Any, name: str, home: Any = None, fixed: bool = False) -> Value:
        """A value that is there when the forward is read."""
        if isinstance(found, SIMPLE):
            in_torch = isinstance(home, dict) and str(home.get("__name__", "")).startswith("torch")
            return plain(found, fixed or in_torch)
        if isinstance(found, torch.Tensor):
            own = _own_tensor(found, name)
            return tensor({own, *self.shared.get(own, NOWHERE)})
        if type(found) is tuple and all(isinstance(item, SIMPLE) for item in found):
            holds_none = any(item is None for item in found)
            return (
                join(plain(found), anything({OUTSIDE})) if holds_none and not fixed else plain(found, fixed)
            )
        self._kept.append(found)
        inert = isinstance(found, (*objects.INERT, types.MethodType, functools.partial))
        regions = [] if inert else [Region("own", id(found), name, True, False)]
        return Value(frozenset(regions), frozenset({KNOWN}), objects=(found,))

    def asked_object(self, one: Any, node: ast.AST, state: State, frame: "Frame") -> None:
        kind = type(one)
        if isinstance(one, objects.INERT) or kind in objects.BUILTIN_CONTAINERS:
            return
        cls = original_class(one) if isinstance(one, nn.Module) else kind
        for name in ("__bool__", "__len__"):
            method = getattr(cls, name, None)
            if method is not None:
                if isinstance(method, types.FunctionType):
                    self.function(method, Arguments([self.value_of(one, name)]), node, state, frame)
                else:
                    self.unknown(node, state, [self.value_of(one, name)], "is asked for its truth", frame)
                return

    def is_strange(self, value: Value, state: State, depth: int = 0) -> bool:
        """Whether an operator, an index or a text of this value may run code of its class."""
        if value.kinds & {ANY, FUNCTION} or self.overrides(value):
            return True
        if CONTAINER not in value.kinds or depth > 3:
            return CONTAINER in value.kinds
        inside = (item for _, item in self.keyed_items(value, state))
        return any(self.is_strange(item, state, depth + 1) for item in inside)

    def overrides(self, value: Value) -> bool:
        """Whether a known object may have operators of its own."""
        return KNOWN in value.kinds and any(
            type(one) not in objects.BUILTIN_CONTAINERS and not isinstance(one, objects.INERT)
            for one in value.objects
        )

    def attribute(self, owner: Value, name: str, state: State, frame: "Frame", node: ast.AST) -> Value:
        found = BOTTOM
        if TENSOR in owner.kinds:
            found = join(found, self._tensor_attribute(owner, name, state, node, frame))
        if PLAIN in owner.kinds:
            found = join(found, PLAIN_VALUE)
        if KNOWN in owner.kinds:
            for one in owner.objects:
                found = join(found, self._object_attribute(one, name, state, frame, node))
        if CONTAINER in owner.kinds:
            for region in owner.regions:
                fields = state.heap.get(region, {})
                if name in fields or REST in fields:  # an object of fields, such as a model's output
                    found = join(found, fields.get(name, fields.get(REST, BOTTOM)))
            if not found.kinds:
                found = anything(self.reach([owner], state))
        if owner.kinds & {ANY, FUNCTION, CONTEXT}:
            if ANY in owner.kinds and on("properties"):
                found = join(found, self.unknown(node, state, [owner], "may be computed by code", frame))
            else:
                found = join(found, anything(self.reach([owner], state)))
        return found.without_token()

    def _tensor_attribute(
        self, owner: Value, name: str, state: State, node: ast.AST, frame: "Frame"
    ) -> Value:
        put = [fields[name] for r in owner.regions if name in (fields := state.heap.get(r, {}))]
        if put:
            return joined([tensor(owner.regions), *put])
        if name in objects.PLAIN_ATTRIBUTES:
            return PLAIN_VALUE
        signature = operator_signature(SPELLINGS.get(name, name))
        if signature is not None and not on("views"):
            return tensor({self.region(node, frame)})
        self.seen_view(node, f"`.{name}` of a tensor is a view of it")
        return tensor(owner.regions)

    def seen_view(self, node: ast.AST, rule: str) -> None:
        if self._anchor is None:
            self.views.setdefault(node, rule)
        else:
            self.views.setdefault(self._anchor, f"{rule} (in {self._inside[0]})")

    def _object_attribute(self, one: Any, name: str, state: State, frame: "Frame", node: ast.AST) -> Value:
        region = Region("own", id(one))
        stored = state.heap.get(region, {}).get(name) if on("attributes") else None
        if stored is not None:
            return stored
        for kind in ("_parameters", "_buffers", "_modules") if isinstance(one, nn.Module) else ():
            fields = state.heap.get(Region("own", id(one.__dict__.get(kind))), {})
            if fields and on("attributes"):  # stored there by its name, or by any other
                return joined([*fields.values(), anything({OUTSIDE})])
        if isinstance(one, Super):
            return self._behind(one, name)
        found = objects.static_attribute(one, name)
        # The mode changes between calls, without a new analysis.
        owned = isinstance(one, nn.Module) and one is not self.owner and name != "training"
        if found is DYNAMIC:
            if not on("properties"):
                return anything({OUTSIDE})
            getter = objects.property_of(one, name)
            own = self.value_of(one, name)
            if getter is not None:
                return self.function(getter, Arguments([own]), node, state, frame)
            return self.unknown(node, state, [own], "is computed by code", frame)
        if found is MISSING:
            return anything({OUTSIDE})
        if isinstance(found, torch.Tensor) and state.escaped and on("escapes"):
            # Code that was not read may have put there what it was given.
            return tensor(self.value_of(found, name).regions | state.escaped)
        home = vars(one) if isinstance(one, types.ModuleType) else None
        value = self.value_of(found, name, home, fixed=owned)
        if on("attributes") and name in self.restored:
            value = join(value, self.restored[name])  # an earlier call of this very forward has stored it
        if on("attributes") and found is None and not owned and not isinstance(one, types.ModuleType):
            value = replace(join(value, anything({OUTSIDE})), constant=None)  # until other code sets it
        if (owned and value.fixed) or (found is None and isinstance(one, nn.Module)):
            value = replace(value, settings=frozenset({(id(one), name)}))
        return value

    def _behind(self, one: Super, name: str) -> Value:
        mro = (original_class(one.own) if isinstance(one.own, nn.Module) else type(one.own)).__mro__
        behind = mro[mro.index(one.home) + 1 :] if one.home in mro else ()
        for cls in behind:
            if name in cls.__dict__:
                found = cls.__dict__[name]
                if isinstance(found, types.FunctionType):
                    return self.value_of(types.MethodType(found, one.own), name)
                break
        return anything({OUTSIDE})

    def is_super(self, node: ast.Call, frame: "Frame") -> bool:
        return (
            isinstance(node.func, ast.Name)
            and node.func.id == "super"
            and self._method_frame(frame) is not None
        )

    def _method_frame(self, frame: "Frame") -> "Frame | None":
        at: Frame | None = frame
        while at is not None and at.home is None:
            at = at.outer
        return at

    def super_object(self, frame: "Frame") -> Value:
        at = self._method_frame(frame)
        assert at is not None and at.home is not None
        one = Super(at.home, at.own)
        self._kept.append(one)
        return Value(NOWHERE, frozenset({KNOWN}), objects=(one,))

    def stored_attribute(
        self, owner: Value, name: str, value: Value, state: State, frame: "Frame", node: ast.AST
    ) -> None:
        if TENSOR in owner.kinds:
            if on("tensor-attributes"):
                self.write(node, owner.regions, "changes the tensor", lays=True)
                for region in owner.regions:
                    state.put(region, name, value)
                if name in ("data", "grad"):
                    self._share(owner, value, state)
        for one in owner.objects if KNOWN in owner.kinds else ():
            region = Region("own", id(one), name, True, False)
            setter = getattr(type(one), "__setattr__", None)
            is_plain = setter in (object.__setattr__, nn.Module.__setattr__) or isinstance(
                one, types.ModuleType
            )
            descriptor = _setter(one, name)
            if descriptor is not None:
                self.function(descriptor, Arguments([self.value_of(one, name), value]), node, state, frame)
            elif not is_plain:
                self.unknown(node, state, [self.value_of(one, name), value], "stores by code", frame)
            if on("attributes"):
                surely = len(owner.objects) == 1 and owner.kinds == {KNOWN}
                state.put(region, name, value, surely)
            regions = {OUTSIDE if region.kind == "new" else region for region in value.regions}
            left = replace(value.without_token(), regions=frozenset(regions), constant=UNSET, fixed=False)
            self.left[name] = join(self.left.get(name, BOTTOM), left)
            self.effect(node, Effect("store", NOWHERE, f"{_text(node)} is stored", (id(one), name)))
            self.escape(value, state)
        if CONTAINER in owner.kinds:
            for region in owner.regions:
                state.put(region, name, value)
        if owner.kinds & {ANY, FUNCTION, CONTEXT}:
            self.unknown(node, state, [owner, value], "stores an attribute", frame)

    def _share(self, owner: Value, value: Value, state: State) -> None:
        """From now on, what lies in the one may lie in the other."""
        for mine, theirs in ((owner, value), (value, owner)):
            for name, held in state.names.items():
                if held.regions & mine.regions:
                    state.names[name] = replace(held, regions=held.regions | theirs.regions)
            for region, fields in list(state.heap.items()):
                for key, held in fields.items():
                    if held.regions & mine.regions:
                        state.put(region, key, anything(theirs.regions))
        for region in owner.regions:
            if region.kind == "own":  # a tensor of the module: it is found again under its name
                self.shared[region] = self.shared.get(region, NOWHERE) | value.regions

    # -- items --------------------------------------------------------------------------------------

    def item(self, owner: Value, index: Value, state: State, frame: "Frame", node: ast.AST) -> Value:
        found = BOTTOM
        if TENSOR in owner.kinds:
            self.seen_view(node, "aten::slice returns a view of its input")
            regions = owner.regions if on("views") else frozenset()
            if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.List):
                regions = frozenset()  # an index by a list of numbers copies
            # An index may be a tensor, and the result a copy.
            found = join(found, tensor(regions | {self.region(node, frame)}))
        if self.is_strange(index, state):
            self.unknown(node, state, [index], "is an index that may run code", frame)
        if PLAIN in owner.kinds:
            inner = owner.constant
            key = index.constant if index.is_plain else UNSET
            if isinstance(inner, tuple) and isinstance(key, int) and -len(inner) <= key < len(inner):
                found = join(found, plain(inner[key], owner.fixed))
            else:
                found = join(found, PLAIN_VALUE)
        if CONTAINER in owner.kinds:
            found = join(found, self._container_item(owner, index, state, frame, node))
        for one in owner.objects if KNOWN in owner.kinds else ():
            found = join(found, self._object_item(one, index, state, frame, node))
        if owner.kinds & {ANY, FUNCTION, CONTEXT}:
            found = join(
                found, self.unknown(node, state, [owner, index], "asks what may run code for an item", frame)
            )
        return found.without_token()

    def _container_item(
        self, owner: Value, index: Value, state: State, frame: "Frame", node: ast.AST
    ) -> Value:
        if not on("containers"):
            return anything({self.region(node, frame)})
        found = BOTTOM
        self.consume(owner, node, state)
        is_slice = isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Slice)
        is_sure = index.is_plain and index.fixed and not index.settings
        key: Any = index.constant if is_sure and type(index.constant) in (int, str, bool) else UNSET
        for region in owner.regions:
            fields = state.heap.get(region, {})
            exact = key is not UNSET and (isinstance(key, str) or key >= 0) and not is_slice
            for name, value in fields.items():
                if not exact or name in (key, REST):
                    found = join(found, value)
            if region.kind != "new":
                found = join(found, anything({region, OUTSIDE}) if region.deep else tensor({region}))
        if is_slice:
            return self.listed(node, [found], state, frame)
        return found if found.kinds else anything({self.region(node, frame)})

    def _object_item(self, one: Any, index: Value, state: State, frame: "Frame", node: ast.AST) -> Value:
        if isinstance(one, (nn.ModuleList, nn.Sequential, nn.ModuleDict)) and type(one).__module__.startswith(
            "torch."
        ):
            children = list(one._modules.values())
            key = index.constant if index.is_plain and index.fixed and not index.settings else UNSET
            if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Slice):
                return joined(self.value_of(child, "item") for child in children)
            if isinstance(key, int) and -len(children) <= key < len(children):
                children = [children[key]]
            elif isinstance(key, str) and key in one._modules:
                children = [one._modules[key]]
            return self.any_of(children)
        if type(one) in objects.BUILTIN_CONTAINERS:
            values = list(one.values()) if isinstance(one, dict) else list(one)
            key = index.constant if index.is_plain and index.fixed and not index.settings else UNSET
            if isinstance(one, dict) and isinstance(key, (str, int)) and key in one:
                values = [one[key]]
            found = self.any_of(values)
            stored = state.heap.get(Region("own", id(one)), {})
            for value in stored.values():
                found = join(found, value)
            return join(found, anything({OUTSIDE})) if _may_change(one, values) else found
        getter = getattr(type(one), "__getitem__", None)
        own = self.value_of(one, "item")
        if isinstance(getter, types.FunctionType):
            return self.function(getter, Arguments([own, index]), node, state, frame)
        if isinstance(one, type):
            return anything({OUTSIDE})  # an alias such as list[int], or a member of an enum
        return self.unknown(node, state, [own, index], "asks what may run code for an item", frame)

    def any_of(self, values: list[Any]) -> Value:
        """One of these objects; of many that are alike, one stands for all."""
        found = BOTTOM
        seen: dict[Hashable, nn.Module] = {}
        for value in values:
            if isinstance(value, nn.Module) and len(values) > 4:
                shape = (type(value), module_shape(value), "forward" in value.__dict__)
                known = seen.setdefault(shape, value)
                if known is not value:
                    self.alike.setdefault(id(known), []).append(value)
                    continue
            found = join(found, self.value_of(value, "item", fixed=False))
        return found

    def stored_item(
        self, owner: Value, index: Value, value: Value, state: State, frame: "Frame", node: ast.AST
    ) -> None:
        if TENSOR in owner.kinds and on("items"):
            self.write(node, owner.regions, "writes into the tensor")
        if CONTAINER in owner.kinds:
            key: Hashable = REST
            if index.is_plain and type(index.constant) in (int, str, bool):
                key = index.constant
                if type(key) is int and key < 0:
                    key = REST
            is_slice = isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Slice)
            stored = joined([*self.all_items(value, state)]) if is_slice else value
            self.consume(value, node, state)
            for region in owner.regions:
                if is_slice:
                    self._loosen(region, state)
                state.put(region, REST if is_slice else key, stored)
                if region.kind != "new":
                    self.escape(value, state)
        for one in owner.objects if KNOWN in owner.kinds else ():
            if type(one) in objects.BUILTIN_CONTAINERS:
                state.put(Region("own", id(one), "", True, False), REST, value)
                self.escape(value, state)
                self.effect(node, Effect("store", NOWHERE, f"{_text(node)} is stored", (id(one), "[]")))
            else:
                self.unknown(node, state, [owner, value], "stores an item by code", frame)
        if owner.kinds & {ANY, FUNCTION, CONTEXT}:
            self.unknown(node, state, [owner, index, value], "stores an item", frame)

    def all_items(self, value: Value, state: State) -> list[Value]:
        """Everything that may lie in a value."""
        found = [item for _, item in self.keyed_items(value, state)]
        if TENSOR in value.kinds:
            found.append(tensor(value.regions))
        outside = [region for region in value.regions if region.kind != "new"]
        if ANY in value.kinds or (CONTAINER in value.kinds and outside):
            deep = any(region.deep for region in outside)
            regions = value.regions | ({OUTSIDE} if deep else NOWHERE)
            found.append(anything(regions) if deep or ANY in value.kinds else tensor(regions))
        if KNOWN in value.kinds:
            for one in value.objects:
                if type(one) in objects.BUILTIN_CONTAINERS:
                    found.append(self.any_of(list(one.values() if isinstance(one, dict) else one)))
                    if _may_change(one, list(one)):
                        found.append(anything({OUTSIDE}))
                else:
                    found.append(anything({OUTSIDE}))
        return found

    def pairs_of(self, value: Value, state: State) -> list[Value]:
        """What may lie in a value, and in the pairs that lie in it."""
        items = self.all_items(value, state)
        return items + [inner for item in items for inner in self.all_items(item, state)]

    def all_of(self, values: list[Value], state: State) -> list[Value]:
        return [item for value in values for item in self.all_items(value, state)]

    def keyed_items(self, value: Value, state: State) -> list[tuple[Hashable, Value]]:
        if CONTAINER not in value.kinds or not on("containers"):
            return []
        return [pair for region in value.regions for pair in state.heap.get(region, {}).items()]

    def exact_items(self, value: Value, state: State) -> list[Value] | None:
        """The items of a sequence whose length and order are known."""
        if value.kinds == {PLAIN} and isinstance(value.constant, tuple):
            return [plain(item, value.fixed) for item in value.constant]
        if value.kinds != {CONTAINER} or len(value.regions) != 1 or not on("containers"):
            return None
        (region,) = value.regions
        fields = state.heap.get(region)
        if region.kind != "new" or fields is None or list(fields) != list(range(len(fields))):
            return None
        if region in self.delayed:
            return None
        return list(fields.values())

    def element(self, value: Value, state: State, frame: "Frame", node: ast.AST) -> Value:
        """What iterating over a value gives; nothing of an empty one that is known."""
        found = BOTTOM
        self.consume(value, node, state)
        if PLAIN in value.kinds:
            found = join(found, PLAIN_VALUE)
        if TENSOR in value.kinds:
            self.seen_view(node, "aten::unbind returns views of its input")
            found = join(found, tensor(value.regions if on("views") else {self.region(node, frame)}))
        if CONTAINER in value.kinds:
            inside = joined(self.all_items(replace(value, kinds=frozenset({CONTAINER})), state))
            found = join(found, inside) if inside.kinds else join(found, BOTTOM)
            if not on("containers"):
                found = join(found, anything({self.region(node, frame)}))
        for one in value.objects if KNOWN in value.kinds else ():
            found = join(found, self._object_element(one, state, frame, node))
        if value.kinds & {ANY, FUNCTION, CONTEXT}:
            found = join(
                found, self.unknown(node, state, [value], "is gone through, which may run code", frame)
            )
        return found.without_token()

    def _object_element(self, one: Any, state: State, frame: "Frame", node: ast.AST) -> Value:
        if isinstance(one, (nn.ModuleList, nn.Sequential)) and type(one).__module__.startswith("torch."):
            return self.any_of(list(one._modules.values()))
        if type(one) in objects.BUILTIN_CONTAINERS:
            if isinstance(one, dict):
                return PLAIN_VALUE
            return joined(self.all_items(self.value_of(one, "item"), state))
        if isinstance(one, type):
            return anything({OUTSIDE})  # the members of an enum
        own = self.value_of(one, "item")
        begin = getattr(type(one), "__iter__", None)
        if isinstance(begin, types.FunctionType):
            found = self.function(begin, Arguments([own]), node, state, frame)
            return joined([*self.all_items(found, state), anything({OUTSIDE})])
        return self.unknown(node, state, [own], "is gone through, which may run code", frame)

    def listed(self, node: ast.AST, values: list[Value], state: State, frame: "Frame") -> Value:
        """A new container that may hold these."""
        region = self.region(node, frame)
        state.heap.setdefault(region, {})
        for value in values:
            if value.kinds:
                state.put(region, REST, value)
        return container({region})

    # -- calls --------------------------------------------------------------------------------------

    def call(
        self, called: Value, arguments: Arguments, node: ast.Call, state: State, frame: "Frame"
    ) -> Value:
        found = BOTTOM
        for value in arguments.all():
            self.consume(value, node, state)
        if called.constant is None and PLAIN in called.kinds:
            self.decides(called, node)
            return found  # what is not there cannot be called
        for one in called.objects if KNOWN in called.kinds else ():
            found = join(found, self.object(one, arguments, node, state, frame))
        if FUNCTION in called.kinds:
            for region in called.regions:
                if region in self.closures:
                    if on("closures"):
                        found = join(found, self.run_closure(region, arguments, node, state))
                    else:
                        found = join(found, anything({self.region(node, frame)}))
        if called.kinds & {ANY, TENSOR, CONTAINER, CONTEXT}:
            found = join(
                found, self.unknown(node, state, [called, *arguments.all()], "calls what is not known", frame)
            )
        return found if found.kinds else BOTTOM

    def method(
        self, receiver: Value, name: str, arguments: Arguments, node: ast.Call, state: State, frame: "Frame"
    ) -> Value:
        """`receiver.name(arguments)`, for each kind of thing that the receiver may be."""
        for value in arguments.all():
            self.consume(value, node, state)
        if receiver.is_plain:
            self.decides(receiver, node)
        found = BOTTOM
        if PLAIN in receiver.kinds:
            strange = [value for value in arguments.all() if self.is_strange(value, state)]
            if strange and receiver.is_plain:
                self.unknown(node, state, strange, "is given to a method of a plain value", frame)
            found = join(found, PLAIN_VALUE)
        if TENSOR in receiver.kinds:
            found = join(found, self.tensor_method(receiver, name, arguments, node, state, frame))
        if CONTAINER in receiver.kinds:
            one = replace(receiver, kinds=frozenset({CONTAINER}))
            found = join(found, self.container_method(one, name, arguments, node, state, frame))
        for one in receiver.objects if KNOWN in receiver.kinds else ():
            if type(one) in objects.BUILTIN_CONTAINERS:
                own = self.value_of(one, name)
                found = join(found, self.container_method(own, name, arguments, node, state, frame))
                continue
            if isinstance(one, logging.Logger):
                found = join(found, PLAIN_VALUE)
                continue
            called = self._object_attribute(one, name, state, frame, node)
            found = join(found, self.call(called, arguments, node, state, frame))
        if receiver.kinds & {ANY, FUNCTION, CONTEXT}:
            if CONTEXT in receiver.kinds:
                self.context(node, "enters or leaves a context")
            values = [receiver, *arguments.all()]
            found = join(
                found, self.unknown(node, state, values, "calls a method of what is not known", frame)
            )
        return found

    def tensor_method(
        self, receiver: Value, name: str, arguments: Arguments, node: ast.AST, state: State, frame: "Frame"
    ) -> Value:
        own = tensor(receiver.regions)
        if not hasattr(torch.Tensor, name):
            values = [own, *arguments.all()]
            return self.unknown(node, state, values, "calls a method that tensors do not have", frame)
        if name == "__getitem__" and arguments.positional:
            return self.item(own, arguments.positional[0], state, frame, node)
        strange = [value for value in arguments.all() if self.overrides(value)]
        if strange:
            self.unknown(node, state, strange, "is given what may run code", frame)
        if name in objects.PLAIN_METHODS or (name == "type" and not arguments.all()):
            return PLAIN_VALUE
        if name.startswith("register_") and name.endswith("hook"):
            return PLAIN_VALUE  # it runs when gradients are taken
        copies = arguments.keywords.get("copy")
        if name == "to" and copies is not None and copies.is_plain and copies.constant is True:
            return tensor({self.region(node, frame)})
        if name in ("set_", "swap_"):
            for value in arguments.all():
                self._share(own, value, state)
        if name in ("apply_", "map_", "map2_"):
            for value in arguments.all():
                if FUNCTION in value.kinds or KNOWN in value.kinds:
                    self.call(value, Arguments(rest=PLAIN_VALUE), node, state, frame)  # type: ignore[arg-type]
        return self.operator(SPELLINGS.get(name, name), arguments.before(own), node, state, frame, name)

    def operator(
        self,
        name: str,
        arguments: Arguments,
        node: ast.AST,
        state: State,
        frame: "Frame",
        spelled: str | None = None,
        signature: Signature | None = None,
    ) -> Value:
        """A call of an operator of PyTorch, or of a method that is named like none.

        What an operator is given is taken to be tensors: no code of a class of their own runs for it.
        """
        signature = signature or operator_signature(name)
        spelled = spelled or name
        out = arguments.keywords.get("out")
        new = self.region(node, frame)
        written: set[Region] = set()
        if signature is None:
            ends = (spelled.endswith("_") and not spelled.endswith("__")) or spelled == "__setitem__"
            if ends and on("writes"):
                written |= self.storages(arguments.positional[:1], state)
            elif not ends:
                return self.unknown(
                    node, state, arguments.all(), f"calls {spelled}, which is no operator", frame
                )
            viewed = self.storages(arguments.all(), state)
        else:
            for index, argument in signature.writes if on("writes") else ():
                written |= self.storages(arguments.given(index, argument), state)
            if signature.views is None:
                viewed = self.storages(arguments.all(), state) if on("maybe-views") else frozenset()
            elif on("views"):
                sources = [v for index, argument in signature.views for v in arguments.given(index, argument)]
                viewed = self.storages(sources, state)
            else:
                viewed = frozenset()
        inplace = arguments.keywords.get("inplace")
        if inplace is not None:
            self.decides(inplace, node)
        if inplace is not None and not (inplace.is_plain and inplace.constant is False) and on("writes"):
            written |= self.storages(arguments.positional[:1], state)
            viewed |= written
        if out is not None and not (out.is_plain and out.constant is None):
            outs = self.storages([out], state)
            if on("out"):
                written |= outs
            viewed |= outs
        if written:
            self.write(node, frozenset(written), f"writes in place (aten::{name})", name == "set_")
        if viewed:
            kind = "may return" if signature is None or signature.views is None else "returns"
            self.seen_view(node, f"aten::{name} {kind} a view of its input")
        self.of_tensors.add(new)
        return tensor({*viewed, new})

    def storages(self, values: list[Value], state: State) -> frozenset[Region]:
        """The storage of tensors, and of those in containers of them."""
        found: set[Region] = set()
        for value in values:
            found |= value.regions
            if CONTAINER in value.kinds or KNOWN in value.kinds:
                todo = [value]
                seen: set[Region] = set()
                while todo:
                    one = todo.pop()
                    for item in self.all_items(one, state):
                        new = item.regions - found
                        found |= item.regions
                        if new and CONTAINER in item.kinds and not new & seen:
                            seen |= new
                            todo.append(item)
        return frozenset(found)

    # -- containers -----------------------------------------------------------------------------------

    def container_method(
        self, own: Value, name: str, arguments: Arguments, node: ast.AST, state: State, frame: "Frame"
    ) -> Value:
        """A method of a list, dict, set or tuple."""
        self.consume(own, node, state)
        given = arguments.all()
        regions = [region for region in own.regions]
        known = [one for one in own.objects if KNOWN in own.kinds]
        strange = [value for value in given if self.is_strange(value, state)]

        def keep(value: Value, key: Hashable = REST) -> None:
            for region in regions:
                state.put(region, key if region.kind == "new" else REST, value)
                if region.kind != "new":
                    self.escape(value, state)
            for one in known:
                self.effect(node, Effect("store", NOWHERE, f"{_text(node)} stores", (id(one), "[]")))

        if name == "keys":  # tensors too can be keys
            return self.listed(node, [PLAIN_VALUE, *self.all_items(own, state)], state, frame)
        if name in ("append", "appendleft", "add", "insert"):
            for region in regions:
                self._loosen(region, state)
            keep(given[-1] if given else BOTTOM)
            return plain(None, True)
        if name in ("extend", "extendleft", "update", "__ior__", "__iadd__", "union", "__or__"):
            for region in regions:
                self._loosen(region, state) if name.startswith("extend") else None
            for value in arguments.positional:
                for key, item in self.keyed_items(value, state) if name == "update" else ():
                    keep(item, key)
                keep(joined([*self.pairs_of(value, state), self.element(value, state, frame, node)]))
            for key, value in arguments.keywords.items():
                keep(value, key)
            return plain(None, True)
        if name in ("get", "pop", "setdefault", "popitem", "popleft", "__getitem__", "move_to_end"):
            index = arguments.positional[0] if arguments.positional else plain()
            if name == "setdefault" and len(arguments.positional) > 1:
                key = index.constant if index.is_plain and isinstance(index.constant, str) else REST
                keep(arguments.positional[1], key)
            if name in ("pop", "popitem", "popleft"):
                for region in regions:
                    self._loosen(region, state)
            found = joined(self.all_items(own, state))
            if name in ("get", "__getitem__", "pop", "setdefault") and CONTAINER in own.kinds:
                found = self._container_item(own, index, state, frame, node)
            elif name in ("get", "__getitem__"):
                found = joined(self._object_item(one, index, state, frame, node) for one in known)
            for value in arguments.positional[1:]:
                found = join(found, value)
            if name == "popitem":
                found = self.listed(node, [found, PLAIN_VALUE], state, frame)
            return join(found, PLAIN_VALUE) if name == "get" and len(given) < 2 else found
        if name in (
            "index",
            "count",
            "__len__",
            "__contains__",
            "issubset",
            "isdisjoint",
            "issuperset",
        ):
            if strange or self.is_strange(own, state):
                self.unknown(node, state, [own, *strange], "is compared with, which may run code", frame)
            return PLAIN_VALUE
        if name == "items":
            values = joined(self.all_items(own, state))
            pair = self.listed(node, [PLAIN_VALUE, values], state, frame)  # a key may be a tensor too
            outer = Region("new", (id(node), "items", *[r.key for r in pair.regions]), "items")
            state.put(outer, REST, pair)
            return container({outer, *own.regions})
        if name in ("values", "copy", "__iter__", "difference", "intersection", "__reversed__"):
            listed = self.listed(node, self.all_items(own, state), state, frame)
            return listed if name == "copy" else container(listed.regions | own.regions)
        if name in ("clear", "remove", "discard", "reverse", "__delitem__", "sort", "rotate"):
            for region in regions:
                self._loosen(region, state)
            for value in given:
                if value.kinds & {FUNCTION, KNOWN, ANY}:
                    self.call(value, Arguments(self.all_items(own, state)), node, state, frame)  # type: ignore[arg-type]
            return plain(None, True)
        return self.unknown(node, state, [own, *given], f"calls {name} of a container", frame)

    def _loosen(self, region: Region, state: State) -> None:
        """The items of a list are no longer where they were."""
        fields = state.heap.get(region)
        if fields and any(isinstance(key, int) for key in fields):
            rest = joined(value for key, value in fields.items() if isinstance(key, int) or key == REST)
            kept = {key: value for key, value in fields.items() if not isinstance(key, int)}
            state.heap[region] = {**kept, REST: rest}

    # -- objects ----------------------------------------------------------------------------------------

    def object(self, one: Any, arguments: Arguments, node: ast.Call, state: State, frame: "Frame") -> Value:
        """A call of an object that is there when the forward is read."""
        if one is None or one is NotImplemented:
            return BOTTOM  # it raises
        if isinstance(one, nn.Module):
            return self.module(one, arguments, node, state, frame)
        if not isinstance(one, CALLABLES):  # an object: nothing of it may be asked but what its class calls
            called = inspect.getattr_static(type(one), "__call__", None)
            if isinstance(called, types.FunctionType):
                own = self.value_of(one, type(one).__name__)
                return self.function(called, arguments.before(own), node, state, frame, one)
            values = [self.value_of(one, "an object"), *arguments.all()]
            return self.unknown(node, state, values, "calls what cannot be read", frame)
        if objects.is_never(one):
            return plain(False, True)
        if objects.is_harmless(one):
            strange = [value for value in arguments.all() if self.overrides(value)]
            if strange:
                self.unknown(node, state, strange, "is given what may run code", frame)
            return PLAIN_VALUE
        if getattr(one, "__name__", None) in objects.MODES and _is_torch(one) and not self._with:
            self.context(node, "changes a mode of PyTorch")
            if not isinstance(one, type):
                return PLAIN_VALUE
        if isinstance(one, type) and issubclass(one, objects.MANAGERS):
            held = self.storages(arguments.all(), state)
            return Value(frozenset({*held, self.region(node, frame)}), frozenset({CONTEXT}))
        if isinstance(one, (type, types.BuiltinFunctionType)) and one in BUILTINS:
            return self.builtin(one.__name__, arguments, node, state, frame)
        signature = signature_of(one)
        if signature is not None:
            return self.operator(str(one), arguments, node, state, frame, signature=signature)
        if isinstance(one, types.MethodType):
            own = self.value_of(one.__self__, "self")
            if isinstance(one.__func__, types.FunctionType):
                return self.function(one.__func__, arguments.before(own), node, state, frame, one.__self__)
            return self.unknown(
                node, state, [own, *arguments.all()], "calls a method that cannot be read", frame
            )
        if type(one) is functools.partial:
            fixed = Arguments(
                [self.value_of(value, "argument") for value in one.args] + arguments.positional,
                {**{k: self.value_of(v, k) for k, v in one.keywords.items()}, **arguments.keywords},
                arguments.rest,
                arguments.named,
            )
            return self.object(one.func, fixed, node, state, frame)
        if isinstance(one, types.FunctionType):
            return self.function(one, arguments, node, state, frame)
        if isinstance(one, type):
            return self.new(one, arguments, node, state, frame)
        name = getattr(one, "__name__", "")
        holder = getattr(one, "__self__", None)
        if isinstance(holder, torch.Tensor):  # a method of a tensor of the module
            return self.tensor_method(self.value_of(holder, name), name, arguments, node, state, frame)
        if isinstance(one, types.MethodDescriptorType) and one.__objclass__ in (
            torch.Tensor,
            torch._C.TensorBase,
        ):
            if arguments.positional:
                after = Arguments(
                    arguments.positional[1:], arguments.keywords, arguments.rest, arguments.named
                )
                return self.tensor_method(arguments.positional[0], name, after, node, state, frame)
        if objects.is_operator_module(one):
            return self.python_operator(name, arguments, node, state, frame)
        if isinstance(one, types.BuiltinFunctionType) and _is_torch(one):
            if operator_signature(SPELLINGS.get(name, name)) is not None and name not in MAKERS:
                return self.operator(SPELLINGS.get(name, name), arguments, node, state, frame, name)
            if name in MAKERS:
                return tensor({*self.storages(arguments.all(), state), self.region(node, frame)})
            self.context(node, "calls a function of PyTorch's core that is not known")
        return self.unknown(node, state, arguments.all(), "calls what cannot be read", frame)

    def python_operator(
        self, name: str, arguments: Arguments, node: ast.Call, state: State, frame: "Frame"
    ) -> Value:
        """A function of Python's `operator`."""
        given = arguments.positional
        if name == "getitem" and len(given) == 2:
            return self.item(given[0], given[1], state, frame, node)
        if name == "setitem" and len(given) == 3:
            self.stored_item(given[0], given[1], given[2], state, frame, node)
            return plain(None, True)
        if given and all(value.kinds <= {TENSOR, PLAIN} for value in given):
            if any(TENSOR in value.kinds for value in given):
                return self.operator(SPELLINGS.get(name, name), arguments, node, state, frame, name)
            return PLAIN_VALUE
        return self.unknown(node, state, arguments.all(), f"calls operator.{name}", frame)

    def new(self, cls: type, arguments: Arguments, node: ast.Call, state: State, frame: "Frame") -> Value:
        """An object of a class."""
        given = arguments.all()
        home = cls.__module__
        if issubclass(cls, BaseException):
            return anything({self.region(node, frame), *self.reach(given, state)})
        if issubclass(cls, torch.Tensor):  # a parameter around a tensor shares it
            return tensor({*self.storages(given, state), self.region(node, frame)})
        if (home == "builtins" and cls is not object) or issubclass(cls, SIMPLE):
            if not any(ANY in value.kinds for value in given):
                return PLAIN_VALUE
        if home.startswith("torch") and not issubclass(cls, nn.Module) and not given:
            return Value(frozenset({self.region(node, frame)}), frozenset({CONTAINER}))
        if cls in (torch.finfo, torch.iinfo):
            return PLAIN_VALUE
        is_data = dataclasses.is_dataclass(cls) and not hasattr(cls, "__post_init__")
        if is_data or (issubclass(cls, tuple) and hasattr(cls, "_fields")) or _is_model_output(cls):
            region = self.region(node, frame)  # nothing runs yet; what its class says may run later
            state.heap.setdefault(region, {})
            for value in given:
                state.put(region, REST, value)
            return anything({region})
        return self.unknown(node, state, given, f"makes a {cls.__name__}", frame)

    def module(
        self, one: nn.Module, arguments: Arguments, node: ast.Call, state: State, frame: "Frame"
    ) -> Value:
        """A call of a module: its forward. That no hooks run with it is asked of each instance."""
        if not self._silent:
            called = self.called.setdefault(self._anchor or node, {})
            called.update((id(each), each) for each in (one, *self.alike.get(id(one), ())))
        if not on("callees"):
            return tensor({self.region(node, frame)})
        cls = original_class(one)
        own = self.value_of(one, cls.__name__)
        forward = one.__dict__.get("forward", cls.__dict__.get("forward", getattr(cls, "forward", None)))
        caller = inspect.getattr_static(cls, "__call__")
        if caller is not nn.Module.__call__ and isinstance(caller, types.FunctionType):
            return self.function(caller, arguments.before(own), node, state, frame, one)
        if isinstance(forward, types.MethodType):
            return self.object(forward, arguments, node, state, frame)
        if isinstance(forward, types.FunctionType):
            bound = "forward" not in one.__dict__
            return self.function(
                forward,
                arguments.before(own) if bound else arguments,
                node,
                state,
                frame,
                one if bound else None,
            )
        return self.unknown(node, state, [own, *arguments.all()], "calls a module that cannot be read", frame)

    # -- functions that are read ------------------------------------------------------------------------

    def function(
        self,
        function: types.FunctionType,
        arguments: Arguments,
        node: ast.AST,
        state: State,
        frame: "Frame",
        own: Any = None,
    ) -> Value:
        """A call of a function, read from its own text."""
        from fusekit.forward.effects.interpreter import Frame

        code = function.__code__
        if not on("callees"):
            return anything({self.region(node, frame)})
        if function.__module__ == "torch.functional" and operator_signature(function.__name__):
            return self.operator(function.__name__, arguments, node, state, frame)
        found: tuple[Any, str | None] | None = objects.tree_of(function)
        if found is None and (known := objects.lambda_of(function)) is not None:
            found = (known, None)
        too_deep = len(self._stack) >= DEPTH or self._stack.count(code) >= AGAIN
        if found is None or too_deep or isinstance(found[0], ast.AsyncFunctionDef):
            why = "is called, and its text cannot be had" if found is None else "goes too deep to be followed"
            values = [*arguments.all(), anything({OUTSIDE})]
            return self.unknown(node, state, values, f"({code.co_qualname}) {why}", frame)
        tree, class_name = found
        home = None
        if arguments.positional and KNOWN in arguments.positional[0].kinds and class_name:
            receiver = own if own is not None else arguments.positional[0].objects[0]
            classes = receiver.__mro__ if isinstance(receiver, type) else type(receiver).__mro__
            home = next((c for c in classes if function in c.__dict__.values()), None)
            own = receiver
        key = (id(self._anchor), id(node), frame.number, id(code))
        self._kept += [node, code]
        inner = Frame(
            self._frames.setdefault(key, len(self._frames) + 1),
            tree,
            function.__globals__,
            objects.cells_of(function),
            class_name=class_name,
            home=home,
            own=own,
            local=locals_of(tree),
            tries=list(frame.tries),
        )
        defaults = {
            name: self.value_of(value, name, fixed=True)
            for name, value in defaults_of(function, tree).items()
        }
        return self.run(inner, arguments, defaults, node, state, code, code.co_qualname)

    def run_closure(self, region: Region, arguments: Arguments, node: ast.AST, state: State) -> Value:
        """A call of a nested function or lambda."""
        from fusekit.forward.effects.interpreter import Frame

        tree, outer = self.closures[region]
        if self._stack.count(tree) >= AGAIN - 1 or len(self._stack) >= DEPTH:
            reached = self.reach([anything({region}), *arguments.all()], state)
            self.effect(node, Effect("may write", reached, f"{_text(node)} calls a function again and again"))
            return anything(reached)
        key = (id(self._anchor), id(node), outer.number, id(tree))
        inner = Frame(
            self._frames.setdefault(key, len(self._frames) + 1),
            tree,
            outer.globals,
            outer=outer,
            local=locals_of(tree),
        )
        held = state.heap.get(region, {})
        defaults = {key[1]: value for key, value in held.items() if isinstance(key, tuple)}
        name = getattr(tree, "name", "a lambda")
        return self.run(inner, arguments, defaults, node, state, tree, name)

    def run(
        self,
        inner: "Frame",
        arguments: Arguments,
        defaults: dict[str, Value],
        node: ast.AST,
        state: State,
        identity: Any,
        name: str,
    ) -> Value:
        tree = inner.tree
        for parameter, value in self._parameters(tree, arguments, defaults, state, node, inner).items():
            state.names[inner.number, parameter] = replace(value, token=("given", inner.number, parameter))
        anchor, self._anchor = self._anchor, self._anchor or node
        if anchor is None:
            self._call_limit = self._work + CALL_WORK
        self._stack.append(identity)
        self._inside.append(name)
        in_with, self._with = self._with, 0
        body = tree.body if isinstance(tree.body, list) else None
        is_generator = body is not None and any(
            isinstance(part, (ast.Yield, ast.YieldFrom)) for part in _own_nodes(tree)
        )
        inner.yielded = [] if is_generator else None
        entry, unreadable = state.copy(), None
        try:
            with self.listening() as effects:
                if body is None:
                    result = self.evaluate(tree.body, state, inner)  # type: ignore[arg-type]
                    end: State | None = state
                else:
                    end = self.block(body, state, inner)
                    result = joined(inner.returned)
                    if end is not None:
                        result = join(result, plain(None, True))
                    end = self._behind_call(end, inner)
            if is_generator:
                result = self.listed(node, inner.yielded or [], end or state, inner)
                made = next(iter(result.regions))
                self.delay(made, effects)
                for value in arguments.all():
                    (end or state).put(made, REST, value)
                if inner.outer is not None:
                    self.behind[made] = (tree, inner.outer)
        except _Unreadable as error:
            if anchor is not None:
                raise
            unreadable = str(error)
        finally:
            self._stack.pop()
            self._inside.pop()
            self._anchor, self._with = anchor, in_with
        if unreadable is not None:
            state.names, state.heap, state.escaped = entry.names, entry.heap, entry.escaped
            values = [*arguments.all(), anything({OUTSIDE})]
            return self.unknown(node, state, values, f"({name}) {unreadable}", inner)
        after = end if end is not None else entry  # it always raises
        if after is not state:
            state.names, state.heap, state.escaped = after.names, after.heap, after.escaped
        if not inner.has_closures:
            for key in [key for key in state.names if key[0] == inner.number]:
                del state.names[key]
        return result.without_token()

    def _behind_call(self, end: State | None, inner: "Frame") -> State | None:
        from fusekit.forward.effects.values import meet

        return meet(end, inner.exit, (inner.number, "end"))

    def _parameters(
        self,
        tree: Any,
        arguments: Arguments,
        defaults: dict[str, Value],
        state: State,
        node: ast.AST,
        inner: "Frame",
    ) -> dict[str, Value]:
        """What each parameter holds."""
        signature: ast.arguments = tree.args
        names = [parameter.arg for parameter in (*signature.posonlyargs, *signature.args)]
        found: dict[str, Value] = {}
        keywords = dict(arguments.keywords)
        for name, value in zip(names, arguments.positional, strict=False):
            found[name] = value
        extra = arguments.positional[len(names) :]
        for name in (*names, *(parameter.arg for parameter in signature.kwonlyargs)):
            if name in found:
                continue
            if name in keywords:
                found[name] = keywords.pop(name)
                if name in arguments.maybe and name in defaults:
                    found[name] = joined([found[name], defaults[name]])
                continue
            may_be = [arguments.named] if arguments.named is not None else []
            if arguments.rest is not None and name in names:
                may_be.append(arguments.rest)
            if name in defaults:
                may_be.append(defaults[name])
            found[name] = may_be[0] if len(may_be) == 1 else joined(value for value in may_be)
            if not may_be:
                found[name] = anything({OUTSIDE})  # the call raises
        if signature.vararg is not None:
            region = Region("new", (inner.number, signature.vararg.arg, "*"), signature.vararg.arg)
            state.heap[region] = {index: value.without_token() for index, value in enumerate(extra)}
            if arguments.rest is not None:
                state.put(region, REST, arguments.rest)
            found[signature.vararg.arg] = container({region})
        if signature.kwarg is not None:
            region = Region("new", (inner.number, signature.kwarg.arg, "**"), signature.kwarg.arg)
            state.heap[region] = {name: value.without_token() for name, value in keywords.items()}
            if arguments.named is not None:
                state.put(region, REST, arguments.named)
            found[signature.kwarg.arg] = container({region})
        return found

    # -- builtins -------------------------------------------------------------------------------------------

    def builtin(self, name: str, arguments: Arguments, node: ast.Call, state: State, frame: "Frame") -> Value:
        given = arguments.all()
        if name in objects.PURE:
            strange = [value for value in given if self.is_strange(value, state)]
            if strange and name not in objects.BLIND:
                self.unknown(node, state, strange, "runs code of what may be anything", frame)
            if name in ("any", "all"):
                for value in given:
                    self.element(value, state, frame, node)
            if name == "type" and len(given) == 1 and given[0].objects:
                return joined(self.value_of(type(one), "a class") for one in given[0].objects)
            return PLAIN_VALUE
        if name in (
            "list",
            "tuple",
            "set",
            "frozenset",
            "sorted",
            "reversed",
            "iter",
            "dict",
            "enumerate",
            "zip",
        ):
            return self._gather(name, arguments, node, state, frame)
        if name in ("map", "filter"):
            return self._mapped(name, arguments, node, state, frame)
        if name == "next":
            found = joined(self.element(value, state, frame, node) for value in given[:1])
            return joined([found, *given[1:]]) if found.kinds else anything({OUTSIDE})
        if name in ("min", "max", "sum"):
            if len(given) == 1 or name == "sum":
                items = [self.element(given[0], state, frame, node), *given[1:]] if given else []
            else:
                items = given
            kinds = [item for item in items if item.kinds]
            total = self.arithmetic(node, kinds, state, frame) if kinds else PLAIN_VALUE  # type: ignore[attr-defined]
            keys = arguments.keywords.get("key")
            if keys is not None:
                self.call(keys, Arguments(items), node, state, frame)
            return joined([total, *items])
        if name in ("abs", "round", "pow", "divmod"):
            return self.arithmetic(node, given, state, frame)  # type: ignore[attr-defined]
        if name in ("getattr", "setattr", "delattr"):
            return self._by_name(name, arguments, node, state, frame)
        return self.unknown(node, state, [*given, anything({OUTSIDE})], f"calls {name}", frame)

    def _gather(self, name: str, arguments: Arguments, node: ast.Call, state: State, frame: "Frame") -> Value:
        elements = []
        for value in arguments.positional + ([arguments.rest] if arguments.rest is not None else []):
            if name in ("list", "tuple") and self.exact_items(value, state) is not None:
                region = self.region(node, frame)
                items = self.exact_items(value, state) or []
                state.heap[region] = dict(enumerate(items))
                return container({region})
            elements.append(self.element(value, state, frame, node))
        if name == "dict":
            items = [item for value in arguments.positional for item in self.pairs_of(value, state)]
            made = self.listed(node, items, state, frame)
            for region in made.regions:
                for key, value in arguments.keywords.items():
                    state.put(region, key, value)
            return made
        if name in ("zip", "enumerate"):
            whole = [PLAIN_VALUE, *elements[:1]] if name == "enumerate" else elements
            inner = Region("new", (id(self._anchor), frame.number, id(node), "pair"), "a pair")
            state.heap[inner] = {index: value for index, value in enumerate(whole)}
            found = self.listed(node, [container({inner})], state, frame)
        else:
            found = self.listed(node, elements, state, frame)
        order = arguments.keywords.get("key")
        if order is not None:
            self.call(order, Arguments(elements), node, state, frame)
        for value in arguments.positional:
            for region in value.regions:
                if region in self.delayed:
                    for made_region in found.regions:
                        self.delay(made_region, self.delayed[region])
        if name in ("iter", "enumerate", "zip", "reversed"):  # they look when they are gone through
            return container(found.regions.union(*(value.regions for value in arguments.positional)))
        return found

    def _mapped(self, name: str, arguments: Arguments, node: ast.Call, state: State, frame: "Frame") -> Value:
        elements = [self.element(value, state, frame, node) for value in arguments.positional[1:]]
        with self.listening() as effects:
            found = BOTTOM
            if arguments.positional:
                found = self.call(arguments.positional[0], Arguments(elements), node, state, frame)
        made = self.listed(node, elements if name == "filter" else [found], state, frame)
        for region in made.regions:
            self.delay(region, effects)
            for value in arguments.positional:
                state.put(region, REST, anything(value.regions))
        return container(made.regions.union(*(value.regions for value in arguments.positional[1:])))

    def _by_name(
        self, name: str, arguments: Arguments, node: ast.Call, state: State, frame: "Frame"
    ) -> Value:
        given = arguments.positional
        known = len(given) > 1 and given[1].is_plain and isinstance(given[1].constant, str)
        if not known or not (given[1].fixed):
            values = [*arguments.all(), anything({OUTSIDE})]
            found = self.unknown(node, state, values, "names an attribute by a value", frame)
            if name != "getattr" and given:
                for one in given[0].objects:
                    self.effect(node, Effect("store", NOWHERE, f"{_text(node)} stores", (id(one), "*")))
            return found
        attribute: str = given[1].constant
        if name == "getattr":
            found = self.attribute(given[0], attribute, state, frame, node)
            return joined([found, *given[2:]])
        value = given[2] if name == "setattr" and len(given) > 2 else anything({OUTSIDE})
        self.stored_attribute(given[0], attribute, value, state, frame, node)
        return plain(None, True)

    # -- frames ---------------------------------------------------------------------------------------------

    def inner_frame(self, node: ast.AST, frame: "Frame") -> "Frame":
        """The scope of a comprehension."""
        key = ("comprehension", id(node), frame.number, id(self._anchor))
        self._kept.append(node)
        names = frozenset(
            name.id
            for generator in node.generators  # type: ignore[attr-defined]
            for name in ast.walk(generator.target)
            if isinstance(name, ast.Name)
        )
        return dataclasses.replace(
            frame,
            number=self._frames.setdefault(key, len(self._frames) + 1),
            local=names,
            outer=frame,
            loops=[],
        )

    def comprehension_home(self, frame: "Frame") -> "Frame":
        """Where `:=` stores: outside of comprehensions."""
        while frame.outer is not None and frame.outer.tree is frame.tree:
            frame = frame.outer
        return frame


CALLABLES = (
    type,
    types.FunctionType,
    types.BuiltinFunctionType,
    types.MethodType,
    types.MethodDescriptorType,
    types.WrapperDescriptorType,
    types.MethodWrapperType,
    types.ClassMethodDescriptorType,
    functools.partial,
    torch._ops.OpOverload,
    torch._ops.OpOverloadPacket,
)
MAKERS = frozenset(
    {"as_tensor", "asarray", "from_numpy", "frombuffer", "tensor", "from_dlpack", "_from_dlpack"}
)
BUILTINS = frozenset(
    getattr(builtins, name)
    for name in (
        *objects.PURE,
        *("list", "tuple", "set", "frozenset", "sorted", "reversed", "iter", "dict", "enumerate", "zip"),
        *("map", "filter", "next", "min", "max", "sum", "abs", "round", "pow", "divmod"),
        *("getattr", "setattr", "delattr"),
    )
)


def _text(node: ast.AST) -> str:
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


def _own_tensor(found: torch.Tensor, name: str) -> Region:
    try:
        key = found.untyped_storage()._cdata
    except Exception:  # a subclass without one storage
        key = id(found)
    floating = found.dtype.is_floating_point or found.dtype.is_complex
    return Region("own", ("storage", key), name, False, floating)


def _may_change(one: Any, values: list[Any]) -> bool:
    """Whether a container may hold other things by the time the forward runs."""
    return not (
        isinstance(one, (tuple, frozenset)) and all(isinstance(v, (*SIMPLE, nn.Module)) for v in values)
    )


def _setter(one: Any, name: str) -> types.FunctionType | None:
    found = getattr(type(one), name, None) if not isinstance(one, (type, types.ModuleType)) else None
    return found.fset if isinstance(found, property) and isinstance(found.fset, types.FunctionType) else None


def _is_torch(one: Any) -> bool:
    home = getattr(one, "__module__", None)
    if home is None:  # functions of torch._C say nothing
        name = getattr(one, "__name__", "")
        return any(
            getattr(place, name, None) is one for place in (torch._C, torch._C._VariableFunctions, torch)
        )
    return home == "torch" or home.startswith("torch.")


def _is_model_output(cls: type) -> bool:
    return any(base.__name__ == "ModelOutput" for base in cls.__mro__)


@functools.lru_cache(maxsize=4096)
def locals_of(tree: Any) -> frozenset[str]:
    """The names that are local to a function."""
    found = set(parameters_of(tree))
    declared: set[str] = set()
    for node in _own_nodes(tree):
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


def _own_nodes(tree: Any) -> Iterator[ast.AST]:
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
