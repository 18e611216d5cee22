"""What a forward reads of its own module: the key under which its analysis is remembered."""

import ast
import functools
import inspect
import types
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn as nn

from fusekit.forward.source import ForwardSource, NoSource, source_of

SIMPLE = (int, float, complex, str, bytes, bool, type(None), torch.dtype, torch.device, torch.Size)
DEPTH = 4  # how far methods of the module that a forward calls are read themselves


@dataclass(frozen=True)
class Read:
    """An attribute chain of the module, `self.config.eps` as ("config", "eps"), and where it stands."""

    chain: tuple[str, ...]
    node: ast.Attribute


@functools.lru_cache(maxsize=4096)
def reads(source: ForwardSource) -> tuple[tuple[Read, ...], bool]:
    """The longest attribute chains on `self` in a forward, and whether that is all it can read.

    It is not all when the forward asks for attributes by computed names.
    """
    own, found, complete = source.self_name, [], True

    def visit(node: ast.AST) -> None:
        nonlocal complete
        chain = attribute_chain(node, own)
        if chain:
            assert isinstance(node, ast.Attribute)
            found.append(Read(chain, node))
            complete &= not any(name in ("__dict__", "__getattr__", "__getattribute__") for name in chain)
            return
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Name)
            and node.func.id in ("getattr", "hasattr", "vars", "setattr", "delattr")
            and node.args
            and isinstance(node.args[0], ast.Name)
            and node.args[0].id == own
        ):
            complete = False
        for child in ast.iter_child_nodes(node):
            visit(child)

    for statement in source.tree.body:
        visit(statement)
    return tuple(found), complete


def attribute_chain(node: ast.AST, root: str) -> tuple[str, ...]:
    """("a", "b") for the expression `root.a.b`, () for any other."""
    names: list[str] = []
    while isinstance(node, ast.Attribute):
        names.append(node.attr)
        node = node.value
    return tuple(reversed(names)) if isinstance(node, ast.Name) and node.id == root and names else ()


def resolve(module: nn.Module, chain: tuple[str, ...]) -> Any:
    """The value of `self.<chain>`, without running a property of a module; MISSING if there is none.

    Objects that are not modules (configurations) are asked as the forward itself would.
    """
    value: Any = module
    for name in chain:
        if isinstance(value, nn.Module):
            value = module_attribute(value, name)
        else:
            try:
                value = getattr(value, name)
            except Exception:
                return MISSING
        if value is MISSING or value is DYNAMIC:
            return value
    return value


class _Marker:
    def __init__(self, name: str):
        self.name = name

    def __repr__(self) -> str:
        return self.name


MISSING = _Marker("missing")
DYNAMIC = _Marker("computed by a property")


def module_attribute(module: nn.Module, name: str) -> Any:
    """`module.name` found as `nn.Module` finds it, MISSING, or DYNAMIC where code would run."""
    state = module.__dict__
    if name in state:
        return state[name]
    for kind in ("_parameters", "_buffers", "_modules"):
        if name in state.get(kind, ()):
            return state[kind][name]
    found = inspect.getattr_static(type(module), name, MISSING)
    if isinstance(found, types.FunctionType):
        return types.MethodType(found, module)
    if isinstance(found, (staticmethod, classmethod)):
        return found.__func__
    if found is not MISSING and hasattr(type(found), "__get__"):
        return DYNAMIC
    if found is MISSING and type(module).__getattr__ is not nn.Module.__getattr__:
        return DYNAMIC
    return found


class Uncachable(Exception):
    """The forward reads something whose value no key can hold."""


def key(
    module: nn.Module, source: ForwardSource, by_type: frozenset[tuple[str, ...]], depth: int = 0
) -> Hashable:
    """A key equal for two instances only if what their forward reads is equal.

    Chains in `by_type` count by the type of their value. Raises `Uncachable`.
    """
    found, complete = reads(source)
    if not complete or depth > DEPTH:
        raise Uncachable
    parts: list[Hashable] = []
    for read in found:
        if read.chain not in by_type or depth:
            parts.append((read.chain, describe(resolve(module, read.chain), module, depth)))
        else:
            parts.append((read.chain, type(resolve(module, read.chain))))
    return tuple(parts)


def describe(value: Any, owner: nn.Module, depth: int = 0) -> Hashable:
    """What of a value can change the course of a forward that reads it."""
    if isinstance(value, _Marker):
        if value is DYNAMIC:
            raise Uncachable
        return value
    if isinstance(value, SIMPLE):
        return type(value), value
    if isinstance(value, nn.Module):
        return module_shape(value)
    if isinstance(value, torch.Tensor):
        return type(value), tuple(value.shape), value.dtype, value.device.type
    if isinstance(value, (tuple, list)) and len(value) < 100:
        return type(value), tuple(describe(item, owner, depth) for item in value)
    if isinstance(value, types.MethodType) and value.__self__ is owner:
        return _method(value, owner, depth)
    return _Same(value)


def _method(value: types.MethodType, owner: nn.Module, depth: int) -> Hashable:
    function = value.__func__
    if not isinstance(function, types.FunctionType):
        return _Same(function)
    try:
        source = source_of((function,))
    except NoSource:
        raise Uncachable from None
    return _Same(function), key(owner, source, frozenset(), depth + 1)


class _Same:
    """A value that equals itself alone."""

    def __init__(self, value: Any):
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and other.value is self.value

    def __hash__(self) -> int:
        return id(self.value)


def module_shape(module: nn.Module) -> Hashable:
    """A submodule as a forward that calls it sees it: classes, shapes, settings, down the tree."""
    state = module.__dict__
    settings = tuple(
        (name, value)
        for name, value in state.items()
        if isinstance(value, SIMPLE) and not name.startswith("_")
    )
    tensors = tuple(
        (name, None if value is None else (tuple(value.shape), value.dtype))
        for name, value in (*state["_parameters"].items(), *state["_buffers"].items())
    )
    children = tuple(
        (name, None if child is None else module_shape(child)) for name, child in state["_modules"].items()
    )
    return type(module), settings, tensors, children
