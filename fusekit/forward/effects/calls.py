"""What calls do: operators by their schemas, modules and functions by their text, all else anything."""

import ast
import builtins
import dataclasses
import functools
import inspect
import logging
import types
from dataclasses import replace
from typing import Any

import torch
import torch.nn as nn

from fusekit.forward.effects import known as objects
from fusekit.forward.effects.frames import Arguments, Frame
from fusekit.forward.effects.functions import Functions
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
from fusekit.forward.operators import SPELLINGS, Signature, operator_signature, signature_of
from fusekit.forward.reads import SIMPLE
from fusekit.forward.source import original_class


class Calls(Functions):
    """The part of the interpreter that follows calls."""

    def call(self, called: Value, arguments: Arguments, node: ast.AST, state: State, frame: Frame) -> Value:
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
        self, receiver: Value, name: str, arguments: Arguments, node: ast.AST, state: State, frame: Frame
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
        self, receiver: Value, name: str, arguments: Arguments, node: ast.AST, state: State, frame: Frame
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
                    self.call(value, Arguments(rest=PLAIN_VALUE), node, state, frame)
        return self.operator(SPELLINGS.get(name, name), arguments.before(own), node, state, frame, name)

    def operator(
        self,
        name: str,
        arguments: Arguments,
        node: ast.AST,
        state: State,
        frame: Frame,
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

    # -- objects ----------------------------------------------------------------------------------------

    def object(self, one: Any, arguments: Arguments, node: ast.AST, state: State, frame: Frame) -> Value:
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
        self, name: str, arguments: Arguments, node: ast.AST, state: State, frame: Frame
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

    def new(self, cls: type, arguments: Arguments, node: ast.AST, state: State, frame: Frame) -> Value:
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
        self, one: nn.Module, arguments: Arguments, node: ast.AST, state: State, frame: Frame
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

    # -- builtins -------------------------------------------------------------------------------------------

    def builtin(self, name: str, arguments: Arguments, node: ast.AST, state: State, frame: Frame) -> Value:
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
            total = self.arithmetic(node, kinds, state, frame) if kinds else PLAIN_VALUE
            keys = arguments.keywords.get("key")
            if keys is not None:
                self.call(keys, Arguments(items), node, state, frame)
            return joined([total, *items])
        if name in ("abs", "round", "pow", "divmod"):
            return self.arithmetic(node, given, state, frame)
        if name in ("getattr", "setattr", "delattr"):
            return self._by_name(name, arguments, node, state, frame)
        return self.unknown(node, state, [*given, anything({OUTSIDE})], f"calls {name}", frame)

    def _gather(self, name: str, arguments: Arguments, node: ast.AST, state: State, frame: Frame) -> Value:
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

    def _mapped(self, name: str, arguments: Arguments, node: ast.AST, state: State, frame: Frame) -> Value:
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

    def _by_name(self, name: str, arguments: Arguments, node: ast.AST, state: State, frame: Frame) -> Value:
        given = arguments.positional
        known = len(given) > 1 and given[1].is_plain and isinstance(given[1].constant, str)
        if not known or not (given[1].fixed):
            values = [*arguments.all(), anything({OUTSIDE})]
            found = self.unknown(node, state, values, "names an attribute by a value", frame)
            if name != "getattr" and given:
                for one in given[0].objects:
                    self.effect(node, Effect("store", NOWHERE, f"{text_of(node)} stores", (id(one), "*")))
            return found
        attribute: str = given[1].constant
        if name == "getattr":
            found = self.attribute(given[0], attribute, state, frame, node)
            return joined([found, *given[2:]])
        value = given[2] if name == "setattr" and len(given) > 2 else anything({OUTSIDE})
        self.stored_attribute(given[0], attribute, value, state, frame, node)
        return plain(None, True)


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
