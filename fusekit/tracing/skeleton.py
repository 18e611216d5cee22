"""A stand-in for a module tree: same classes and settings, every tensor on the meta device.

A forward may store on `self`, in its lists, or in a configuration. Run on a skeleton, all of
that happens to copies, and no weight is read or allocated.
"""

import copy
import types
from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn as nn

from fusekit.forward import NoSource, original_class

HOOKS = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_backward_hooks",
    "_backward_pre_hooks",
)
PLAIN = (int, float, complex, str, bytes, bool, type(None), torch.dtype, torch.device, torch.Size)
Call = Callable[[nn.Module, str, tuple[Any, ...], dict[str, Any]], Any]


class Skeleton:
    """Stand-ins for the modules of a tree, made as they are asked for.

    `call` answers every call of a stand-in module: `call(stand_in, path, args, kwargs)`.
    """

    def __init__(self, root: nn.Module, call: Call):
        self._call = call
        self._made: dict[int, Any] = {}  # id of the original -> stand-in
        self._kept: list[Any] = []  # originals, so that no id is used again
        self.paths: dict[int, str] = {}  # id of a stand-in's parameter or buffer -> path
        self.module = self.of(root, "")

    def of(self, module: nn.Module, path: str) -> nn.Module:
        """The stand-in of `module`, which is `path` in the tree."""
        if id(module) in self._made:
            return self._made[id(module)]
        with torch._C.DisableTorchFunction():  # making it is no part of what is traced
            return self._make(module, path)

    def _make(self, module: nn.Module, path: str) -> nn.Module:
        cls = original_class(module)
        made = cls.__new__(cls)
        self._remember(module, made)
        state = dict(module.__dict__)
        prefix = f"{path}." if path else ""
        state["_parameters"] = self._tensors(state["_parameters"], prefix)
        state["_buffers"] = self._tensors(state["_buffers"], prefix)
        state["_modules"] = _Children(self, state["_modules"], prefix)
        for name in HOOKS:
            state[name] = OrderedDict()
        made.__dict__.update(state)
        own = state.get("forward")
        for name, value in state.items():
            if not name.startswith("_") or isinstance(value, torch.Tensor):
                made.__dict__[name] = self.value(value)
        if own is not None and made.__dict__["forward"] is own:
            # Not bound to a module of this tree: calling it could reach the real one.
            def refuse(*_: Any, **__: Any) -> None:
                raise NoSource("instance-forward", f"{path or 'the module'} carries a forward of its own")

            made.__dict__["forward"] = refuse
        made.__dict__["_compiled_call_impl"] = lambda *args, **kwargs: self._call(made, path, args, kwargs)
        return made

    def value(self, value: Any) -> Any:
        """The stand-in of an attribute's value: tensors on meta, containers and settings copied."""
        if isinstance(value, PLAIN):
            return value
        if id(value) in self._made:
            return self._made[id(value)]
        if isinstance(value, torch.Tensor):
            return self._remember(value, on_meta(value))
        if isinstance(value, nn.Module):
            return self.of(value, f"<{type(value).__name__}>")
        if isinstance(value, types.MethodType) and isinstance(value.__self__, nn.Module):
            return types.MethodType(value.__func__, self.of(value.__self__, ""))
        if type(value) in (list, tuple, set, OrderedDict, dict):
            return self._container(value)
        if isinstance(value, (type, types.FunctionType, types.BuiltinFunctionType, types.ModuleType)):
            return value
        return self._remember(value, _shallow(value))

    def _container(self, value: Any) -> Any:
        if isinstance(value, tuple):
            return self._remember(value, tuple(self.value(item) for item in value))
        made = self._remember(value, type(value)())
        if isinstance(value, dict):
            made.update((key, self.value(item)) for key, item in value.items())
        elif isinstance(value, set):
            made.update(self.value(item) for item in value)
        else:
            made.extend(self.value(item) for item in value)
        return made

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


def _shallow(value: Any) -> Any:
    try:
        return copy.copy(value)
    except Exception:
        return value


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

    def get(self, name: str, default: Any = None) -> Any:
        return self[name] if name in self else default

    def values(self) -> Iterable[Any]:  # type: ignore[override]
        return [self[name] for name in self]

    def items(self) -> Iterable[tuple[str, Any]]:  # type: ignore[override]
        return [(name, self[name]) for name in self]
