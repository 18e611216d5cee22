"""A stand-in for a module tree: same classes and settings, every tensor on the meta device.

A forward may store on `self`, in its lists, or in a configuration. Run on a skeleton, all of
that happens to copies, and no weight is read or allocated.
"""

import copy
import types
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import torch
import torch.nn as nn

from fusekit.forward import NoSource, original_class

PLAIN = (int, float, complex, str, bytes, bool, type(None), torch.dtype, torch.device, torch.Size)
# What `nn.Module` itself keeps on an instance: hooks, and sets of names. A stand-in starts without.
TORCH_STATE = frozenset(nn.Module().__dict__) - {"training"}
WEAK = (weakref.ReferenceType, weakref.ProxyType, weakref.CallableProxyType)
Call = Callable[[nn.Module, str, tuple[Any, ...], dict[str, Any]], Any]


class Skeleton:
    """Stand-ins for the modules of a tree, made as they are asked for.

    `call` answers every call of a stand-in module: `call(stand_in, path, args, kwargs)`.
    """

    def __init__(self, root: nn.Module, call: Call):
        self._call = call
        self._made: dict[int, Any] = {}  # id of the original -> stand-in
        self._kept: list[Any] = []  # originals, so that no id is used again
        # A shared module has one name, that of its first place; so has one that a list holds too.
        self._names = {id(module): name for name, module in root.named_modules()}
        self._strangers = 0
        self.paths: dict[int, str] = {}  # id of a stand-in's parameter or buffer -> path
        self.trained: set[int] = set()  # ids of stand-ins of tensors that require grad
        self.module = self.of(root, "")

    def of(self, module: nn.Module, path: str | None = None) -> nn.Module:
        """The stand-in of `module`, which is `path` in the tree (None: it stands in none of its places)."""
        if id(module) in self._made:
            return self._made[id(module)]
        path = self._names.get(id(module), path)
        if path is None:
            # Two modules that are no part of the tree must not look like one.
            self._strangers += 1
            path = f"<{type(module).__name__} {self._strangers}>"
        with torch._C.DisableTorchFunction():  # making it is no part of what is traced
            return self._make(module, path)

    def _make(self, module: nn.Module, path: str) -> nn.Module:
        cls: Any = original_class(module)
        made: nn.Module = cls.__new__(cls)
        self._remember(module, made)
        state = module.__dict__
        prefix = f"{path}." if path else ""
        made.__dict__.update(nn.Module().__dict__)
        made.__dict__["training"] = state.get("training", True)
        made.__dict__["_parameters"] = self._tensors(state["_parameters"], prefix)
        made.__dict__["_buffers"] = self._tensors(state["_buffers"], prefix)
        made.__dict__["_non_persistent_buffers_set"] = set(state["_non_persistent_buffers_set"])
        made.__dict__["_modules"] = _Children(self, state["_modules"], prefix)
        for name, value in state.items():
            if name not in TORCH_STATE:
                made.__dict__[name] = self.value(value)
        for name, value in shared_by_instances(cls):
            # `self.seen.append(x)` may mean a list of the class.
            made.__dict__.setdefault(name, self.value(value))
        own = state.get("forward")
        if own is not None and not _is_bound_to(made.__dict__["forward"], made):
            # Not bound to a module of this tree: calling it could reach the real one.
            def refuse(*_: Any, **__: Any) -> None:
                raise NoSource("instance-forward", f"{path or 'the module'} carries a forward of its own")

            made.__dict__["forward"] = refuse
        made.__dict__["_compiled_call_impl"] = lambda *args, **kwargs: self._call(made, path, args, kwargs)
        return made

    def value(self, value: Any) -> Any:
        """The stand-in of a value that a forward can reach: tensors on meta, what can be written copied.

        What has no state of its own (sentinels, classes, functions without closures) stays itself,
        so that `is` still holds.
        """
        if isinstance(value, (*PLAIN, type, types.ModuleType)):
            return value
        if id(value) in self._made:
            return self._made[id(value)]
        if type(value) in WEAK:
            return self._weak(value)
        with torch._C.DisableTorchFunction():
            if isinstance(value, torch.Tensor):
                return self._tensor(value)
            if isinstance(value, nn.Module):
                return self.of(value)
            if isinstance(value, types.MethodType):
                return self._method(value)
            if isinstance(value, types.BuiltinFunctionType):
                return self._builtin(value)
            if isinstance(value, types.FunctionType):
                return self.function(value)
            if isinstance(value, partial):
                return self._partial(value)
            if isinstance(value, (tuple, list, set, frozenset, dict, deque)):
                return self._container(value)
            return self._object(value)

    # -- one kind of value each ---------------------------------------------------------------

    def _tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        # Without `requires_grad`, so that no operator builds a graph for autograd or refuses to
        # write in place; `Recorder` answers the question from `trained`.
        made = self._remember(tensor, on_meta(tensor).requires_grad_(False))
        if tensor.requires_grad:
            self.trained.add(id(made))
        return made

    def _weak(self, value: Any) -> Any:
        target = value() if isinstance(value, weakref.ReferenceType) else value.__init__.__self__
        made = self.value(target)
        try:
            return weakref.ref(made) if isinstance(value, weakref.ReferenceType) else weakref.proxy(made)
        except TypeError:
            return value

    def _method(self, value: types.MethodType) -> Any:
        owner = self.value(value.__self__)
        return value if owner is value.__self__ else types.MethodType(value.__func__, owner)

    def _builtin(self, value: Any) -> Any:
        """A method of a list or the like, say `self.log = self.lines.append`, is that of its stand-in."""
        owner = getattr(value, "__self__", None)
        if owner is None or isinstance(owner, (type, types.ModuleType)):
            return value
        return getattr(self.value(owner), value.__name__, value)

    def function(self, function: types.FunctionType) -> types.FunctionType:
        """`function` itself, or a copy of it where its closure or its defaults hold what has a stand-in."""
        if not function.__closure__ and not function.__defaults__ and not function.__kwdefaults__:
            return function
        self._made[id(function)] = function  # it may hold itself
        cells = self.cells(function.__closure__ or ())
        defaults, named = self.value(function.__defaults__), self.value(function.__kwdefaults__)
        same = all(_same_cell(new, old) for new, old in zip(cells, function.__closure__ or (), strict=True))
        if same and defaults is function.__defaults__ and named is function.__kwdefaults__:
            return self._remember(function, function)
        made = types.FunctionType(function.__code__, function.__globals__, function.__name__, defaults, cells)
        made.__kwdefaults__ = named
        made.__dict__.update(function.__dict__)
        return self._remember(function, made)

    def cells(self, closure: tuple[types.CellType, ...]) -> tuple[types.CellType, ...]:
        """Closure cells of their own, which hold stand-ins."""
        made = []
        for cell in closure:
            if id(cell) not in self._made:
                new = self._remember(cell, types.CellType())
                try:
                    new.cell_contents = self.value(cell.cell_contents)
                except ValueError:  # empty until later
                    pass
            made.append(self._made[id(cell)])
        return tuple(made)

    def _partial(self, value: Any) -> Any:
        named = {name: self.value(item) for name, item in value.keywords.items()}
        arguments = (self.value(item) for item in value.args)
        return self._remember(value, type(value)(self.value(value.func), *arguments, **named))

    def _container(self, value: Any) -> Any:
        if isinstance(value, frozenset):
            return value
        if isinstance(value, tuple):
            items = [self.value(item) for item in value]
            if all(new is old for new, old in zip(items, value, strict=True)):
                return self._remember(value, value)
            plain = type(value) is tuple
            try:
                return self._remember(value, tuple(items) if plain else type(value)(*items))
            except Exception:
                return self._remember(value, tuple(items))
        made = self._remember(value, _empty_like(value))
        if isinstance(value, dict):
            # Past methods of a subclass, which may make things of what is put in or taken out.
            for key, item in dict.items(value):
                base = OrderedDict if isinstance(value, OrderedDict) else dict
                base.__setitem__(made, key, self.value(item))
        elif isinstance(value, set):
            set.update(made, value)
        else:
            sequence: Any = list if isinstance(value, list) else deque
            sequence.extend(made, [self.value(item) for item in sequence.__iter__(value)])
        self._attributes(value, made)
        return made

    def _object(self, value: Any) -> Any:
        """A copy of an object with stand-ins for what it holds; itself where it cannot be copied."""
        if not _has_state(value):
            return value
        try:
            made = copy.copy(value)
        except Exception:
            return self._remember(value, value)
        if made is value or type(made) is not type(value):  # a logger, an enum's member, a lazy proxy
            return self._remember(value, value)
        self._remember(value, made)
        self._attributes(value, made)
        return made

    def _attributes(self, value: Any, made: Any) -> None:
        state = getattr(made, "__dict__", None)
        original = getattr(value, "__dict__", None)
        if isinstance(state, dict) and isinstance(original, dict) and state is not original:
            state.update((name, self.value(item)) for name, item in list(original.items()))
        for cls in type(value).__mro__:
            slots = cls.__dict__.get("__slots__", ())
            for name in (slots,) if isinstance(slots, str) else slots:
                try:
                    object.__setattr__(made, name, self.value(getattr(value, name)))
                except (AttributeError, TypeError):
                    pass

    def _tensors(self, tensors: dict[str, Any], prefix: str) -> dict[str, Any]:
        made = {name: self.value(tensor) for name, tensor in tensors.items()}
        for name, tensor in made.items():
            if tensor is not None:
                self.paths.setdefault(id(tensor), prefix + name)
        return made

    def _remember(self, original: Any, made: Any) -> Any:
        self._made[id(original)] = made
        self._kept.append(original)
        return made


def on_meta(tensor: torch.Tensor) -> torch.Tensor:
    """An empty tensor on the meta device like `tensor`, a parameter for a parameter."""
    try:
        made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
    except Exception:  # a subclass without strides
        made = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(made, requires_grad=tensor.requires_grad)
    return made


def shared_by_instances(cls: type) -> list[tuple[str, Any]]:
    """The lists, dicts, sets and tensors that lie on a class itself, not on its instances."""
    found: dict[str, Any] = {}
    for base in cls.__mro__:
        if base.__module__ == nn.Module.__module__:
            break
        for name, value in base.__dict__.items():
            if isinstance(value, (list, dict, set, torch.Tensor)) and not name.startswith("__"):
                found.setdefault(name, value)
    return list(found.items())


def _is_bound_to(value: Any, owner: Any) -> bool:
    return isinstance(value, types.MethodType) and value.__self__ is owner


def _has_state(value: Any) -> bool:
    if getattr(value, "__dict__", None):
        return True
    return any("__slots__" in cls.__dict__ and cls.__dict__["__slots__"] for cls in type(value).__mro__)


def _same_cell(new: types.CellType, old: types.CellType) -> bool:
    try:
        return new.cell_contents is old.cell_contents
    except ValueError:
        return False


def _empty_like(value: Any) -> Any:
    """An empty container of the class of `value`, of a plain one where that class wants arguments."""
    if isinstance(value, deque):
        return deque(maxlen=value.maxlen)
    if hasattr(value, "default_factory"):
        return type(value)(value.default_factory)
    cls: Any = type(value)
    return cls.__new__(cls)


class _Children(dict[str, Any]):
    """The `_modules` of a stand-in: children become stand-ins when they are looked at."""

    def __init__(self, skeleton: Skeleton, modules: dict[str, nn.Module | None], prefix: str):
        super().__init__(modules)
        self._skeleton, self._prefix = skeleton, prefix
        self._done: set[str] = set()

    def __getitem__(self, name: str) -> Any:
        found = super().__getitem__(name)
        if found is None or name in self._done:
            return found
        made = self._skeleton.of(found, self._prefix + name)
        super().__setitem__(name, made)
        self._done.add(name)
        return made

    def __setitem__(self, name: str, value: Any) -> None:
        self._done.add(name)
        super().__setitem__(name, value)

    def __delitem__(self, name: str) -> None:
        super().__delitem__(name)
        self._done.discard(name)

    def __iter__(self) -> Iterator[str]:
        # An `__iter__` of its own makes dict(children) and {**children} ask for items one by one.
        return super().__iter__()

    def get(self, name: str, default: Any = None) -> Any:
        return self[name] if name in self else default

    def pop(self, name: str, *default: Any) -> Any:
        found = self[name] if name in self else None
        super().pop(name, *default)
        self._done.discard(name)
        return found if found is not None or not default else default[0]

    def popitem(self) -> tuple[str, Any]:
        name = next(reversed(self))
        return name, self.pop(name)

    def setdefault(self, name: str, default: Any = None) -> Any:
        if name not in self:
            self[name] = default
        return self[name]

    def update(self, *others: Any, **named: Any) -> None:
        for name, value in dict(*others, **named).items():
            self[name] = value

    def copy(self) -> dict[str, Any]:
        return dict(self.items())

    def values(self) -> Iterable[Any]:  # type: ignore[override]
        return [self[name] for name in self]

    def items(self) -> Iterable[tuple[str, Any]]:  # type: ignore[override]
        return [(name, self[name]) for name in self]
