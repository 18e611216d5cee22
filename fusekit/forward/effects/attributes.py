"""Attributes of tensors, modules and other objects: what reading one gives, and what storing one does."""

import ast
import functools
import types
from dataclasses import replace
from typing import Any

import torch
import torch.nn as nn

from fusekit.forward.effects import known as objects
from fusekit.forward.effects.frames import Arguments, Frame, Super
from fusekit.forward.effects.notes import Effect, Notes, text_of
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
    join,
    joined,
    plain,
    tensor,
)
from fusekit.forward.operators import SPELLINGS, operator_signature
from fusekit.forward.reads import DYNAMIC, MISSING, SIMPLE
from fusekit.forward.source import original_class


class Attributes(Notes):
    """The part of the interpreter that follows attributes."""

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

    def asked_object(self, one: Any, node: ast.AST, state: State, frame: Frame) -> None:
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

    def attribute(self, owner: Value, name: str, state: State, frame: Frame, node: ast.AST) -> Value:
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

    def _tensor_attribute(self, owner: Value, name: str, state: State, node: ast.AST, frame: Frame) -> Value:
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

    def _object_attribute(self, one: Any, name: str, state: State, frame: Frame, node: ast.AST) -> Value:
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

    def is_super(self, node: ast.Call, frame: Frame) -> bool:
        return (
            isinstance(node.func, ast.Name)
            and node.func.id == "super"
            and self._method_frame(frame) is not None
        )

    def _method_frame(self, frame: Frame) -> Frame | None:
        at: Frame | None = frame
        while at is not None and at.home is None:
            at = at.outer
        return at

    def super_object(self, frame: Frame) -> Value:
        at = self._method_frame(frame)
        assert at is not None and at.home is not None
        one = Super(at.home, at.own)
        self._kept.append(one)
        return Value(NOWHERE, frozenset({KNOWN}), objects=(one,))

    def stored_attribute(
        self, owner: Value, name: str, value: Value, state: State, frame: Frame, node: ast.AST
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
            self.effect(node, Effect("store", NOWHERE, f"{text_of(node)} is stored", (id(one), name)))
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


def _own_tensor(found: torch.Tensor, name: str) -> Region:
    try:
        key = found.untyped_storage()._cdata
    except Exception:  # a subclass without one storage
        key = id(found)
    floating = found.dtype.is_floating_point or found.dtype.is_complex
    return Region("own", ("storage", key), name, False, floating)


def _setter(one: Any, name: str) -> types.FunctionType | None:
    found = getattr(type(one), name, None) if not isinstance(one, (type, types.ModuleType)) else None
    return found.fset if isinstance(found, property) and isinstance(found.fset, types.FunctionType) else None
