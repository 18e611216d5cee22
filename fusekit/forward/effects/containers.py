"""Items of lists, dicts, tensors and module lists: what lies in them, and what their methods do."""

import ast
import types
from collections.abc import Hashable
from dataclasses import replace
from typing import Any

import torch.nn as nn

from fusekit.forward.effects import known as objects
from fusekit.forward.effects.attributes import Attributes
from fusekit.forward.effects.frames import Arguments, Frame
from fusekit.forward.effects.notes import Effect, text_of
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
from fusekit.forward.reads import SIMPLE, module_shape


class Containers(Attributes):
    """The part of the interpreter that follows items."""

    def item(self, owner: Value, index: Value, state: State, frame: Frame, node: ast.AST) -> Value:
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

    def _container_item(self, owner: Value, index: Value, state: State, frame: Frame, node: ast.AST) -> Value:
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

    def _object_item(self, one: Any, index: Value, state: State, frame: Frame, node: ast.AST) -> Value:
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
        self, owner: Value, index: Value, value: Value, state: State, frame: Frame, node: ast.AST
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
                self.effect(node, Effect("store", NOWHERE, f"{text_of(node)} is stored", (id(one), "[]")))
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

    def element(self, value: Value, state: State, frame: Frame, node: ast.AST) -> Value:
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

    def _object_element(self, one: Any, state: State, frame: Frame, node: ast.AST) -> Value:
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

    def listed(self, node: ast.AST, values: list[Value], state: State, frame: Frame) -> Value:
        """A new container that may hold these."""
        region = self.region(node, frame)
        state.heap.setdefault(region, {})
        for value in values:
            if value.kinds:
                state.put(region, REST, value)
        return container({region})

    # -- containers -----------------------------------------------------------------------------------

    def container_method(
        self, own: Value, name: str, arguments: Arguments, node: ast.AST, state: State, frame: Frame
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
                self.effect(node, Effect("store", NOWHERE, f"{text_of(node)} stores", (id(one), "[]")))

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
                    self.call(value, Arguments(self.all_items(own, state)), node, state, frame)
            return plain(None, True)
        return self.unknown(node, state, [own, *given], f"calls {name} of a container", frame)

    def _loosen(self, region: Region, state: State) -> None:
        """The items of a list are no longer where they were."""
        fields = state.heap.get(region)
        if fields and any(isinstance(key, int) for key in fields):
            rest = joined(value for key, value in fields.items() if isinstance(key, int) or key == REST)
            kept = {key: value for key, value in fields.items() if not isinstance(key, int)}
            state.heap[region] = {**kept, REST: rest}


def _may_change(one: Any, values: list[Any]) -> bool:
    """Whether a container may hold other things by the time the forward runs."""
    return not (
        isinstance(one, (tuple, frozenset)) and all(isinstance(v, (*SIMPLE, nn.Module)) for v in values)
    )
