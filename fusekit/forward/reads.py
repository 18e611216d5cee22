"""What a forward reads of its own module: the key under which its analysis is remembered."""

import ast
import functools
import inspect
import types
from collections.abc import Hashable
from dataclasses import dataclass
from types import CodeType
from typing import Any

import torch
import torch.nn as nn

from fusekit.forward.once import once
from fusekit.forward.source import ForwardSource, NoSource, cell_contents, source_of

SIMPLE = (int, float, complex, str, bytes, bool, type(None), torch.dtype, torch.device, torch.Size)
TORCH_STATE = frozenset(nn.Module().__dict__) - {"training"}
SIMPLE_TYPES = frozenset(SIMPLE)  # told by a look-up, which is quicker than isinstance
# With one of these the names of locals are data: what a forward reads is not in its text, and probes
# or a rewrite, which add names, would be seen.
SEES_NAMES = frozenset({"locals", "vars", "dir", "eval", "exec"})
LONG = 1000  # a container with more than this is not looked through
DEPTH = 4  # how far methods of the module that a forward calls are read themselves


@dataclass(frozen=True)
class Read:
    """An attribute chain of the module, `self.config.eps` as ("config", "eps"), and where it stands."""

    chain: tuple[str, ...]
    node: ast.Attribute


@dataclass(frozen=True)
class _Reads:
    found: tuple[Read, ...]
    complete: bool  # False when attributes are asked for by computed names
    bare: tuple[ast.Name, ...]  # `self` itself, or `super`, going somewhere: all may be read there


def bare_uses(source: ForwardSource) -> tuple[ast.Name, ...]:
    """Where the forward hands `self` itself on, or says `super`: what reads there is not seen."""
    return _reads(source.tree, source.self_name).bare


def reads(source: ForwardSource) -> tuple[tuple[Read, ...], bool]:
    """The longest attribute chains on `self` in a forward, and whether that is all it can read.

    It is not all when the forward asks for attributes by computed names.
    """
    found = _reads(source.tree, source.self_name)
    return found.found, found.complete


@functools.lru_cache(maxsize=4096)
def _reads(tree: ast.FunctionDef, own: str) -> _Reads:
    found: list[Read] = []
    bare: list[ast.Name] = []
    complete = bool(own)

    def visit(node: ast.AST) -> None:
        nonlocal complete
        chain = attribute_chain(node, own)
        if chain:
            assert isinstance(node, ast.Attribute)
            found.append(Read(chain, node))
            complete &= not any(name in ("__dict__", "__getattr__", "__getattribute__") for name in chain)
            return
        if isinstance(node, ast.Name):
            if node.id in (own, "super"):
                bare.append(node)
            complete &= node.id not in SEES_NAMES
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Name)
            and node.func.id in ("getattr", "hasattr", "setattr", "delattr")
            and node.args
            and isinstance(node.args[0], ast.Name)
            and node.args[0].id == own
        ):
            complete = False
        for child in ast.iter_child_nodes(node):
            visit(child)

    for statement in tree.body:
        visit(statement)
    return _Reads(tuple(found), complete, tuple(bare))


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
    if type(module).__getattribute__ is not object.__getattribute__:
        return DYNAMIC
    return found


class Uncachable(Exception):
    """The forward reads something whose value no key can hold."""


def key(
    module: nn.Module, source: ForwardSource, by_type: frozenset[tuple[str, ...]], depth: int = 0
) -> Hashable:
    """A key equal for two instances only if what their forward reads is equal.

    Chains in `by_type` count by the type of their value; the empty chain there says that what reads
    `self` as a whole does not count. Raises `Uncachable`.
    """
    found = _reads(source.tree, source.self_name)
    if not found.complete or depth > DEPTH:
        raise Uncachable
    parts: list[Hashable] = [_outside(source, module, depth)]
    for read in found.found:
        if read.chain not in by_type or depth:
            parts.append((read.chain, describe(resolve(module, read.chain), module, depth)))
        else:
            parts.append((read.chain, type(resolve(module, read.chain))))
    if found.bare and () not in by_type:
        parts.append(_whole(module, by_type, depth))
    return tuple(parts)


def _outside(source: ForwardSource, module: nn.Module, depth: int) -> Hashable:
    """The globals and closure cells of a forward: a flag or a patched function among them decides too."""
    function: types.FunctionType = source.chain[-1]
    return once(function, "outside", lambda: _outside_of(function, module, depth))


def _outside_of(function: types.FunctionType, module: nn.Module, depth: int) -> Hashable:
    parts: list[Hashable] = []
    for name in global_names(function.__code__):
        if name in function.__globals__:
            parts.append((name, describe(function.__globals__[name], module, depth)))
    for cell in function.__closure__ or ():
        parts.append(describe(cell_contents(cell), module, depth))
    parts.append(describe(function.__defaults__, module, depth))
    parts.append(describe(function.__kwdefaults__, module, depth))
    return tuple(parts)


@functools.lru_cache(maxsize=4096)
def global_names(code: CodeType) -> tuple[str, ...]:
    """Every name that the code, or code nested in it, may look up among its globals (attributes too)."""
    found = set(code.co_names)
    for const in code.co_consts:
        if isinstance(const, CodeType):
            found.update(global_names(const))
    return tuple(sorted(found))


def _whole(module: nn.Module, by_type: frozenset[tuple[str, ...]], depth: int) -> Hashable:
    """Everything that lies on the module: where `self` itself is handed on, any of it may be read."""
    state = module.__dict__
    parts: list[Hashable] = []
    for name, value in state.items():
        if name in TORCH_STATE:
            continue
        if (name,) in by_type:
            parts.append((name, type(value)))
        elif not (isinstance(value, types.MethodType) and value.__self__ is module):
            parts.append((name, describe(value, module, depth)))
    for kind in ("_parameters", "_buffers", "_modules"):
        parts += [(name, describe(value, module, depth)) for name, value in state[kind].items()]
    return tuple(parts)


def describe(value: Any, owner: nn.Module, depth: int = 0) -> Hashable:
    """What of a value can change the course of a forward that reads it."""
    if type(value) in SIMPLE_TYPES:
        return type(value), value
    return once(value, "described", lambda: _describe(value, owner, depth))


def _describe(value: Any, owner: nn.Module, depth: int) -> Hashable:
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
    if isinstance(value, types.MethodType) and value.__self__ is owner:
        return _method(value, owner, depth)
    if isinstance(getattr(value, "__self__", None), torch.Tensor):  # `self.weight.float`: made anew when read
        return type(value), value.__name__, describe(value.__self__, owner, depth)
    if isinstance(value, (type, types.FunctionType, types.BuiltinFunctionType, types.ModuleType)):
        return _Same(value)
    if type(value) is functools.partial:
        inner = (value.func, value.args, value.keywords)
        return functools.partial, tuple(describe(item, owner, depth + 1) for item in inner)
    return _described_object(value, owner, depth)


def _described_object(value: Any, owner: nn.Module, depth: int) -> Hashable:
    """An object that code may have changed since it was last looked at: what lies in it counts."""
    if depth > DEPTH:
        return _Same(value)
    deeper = depth + 1
    if isinstance(value, (tuple, list, set, frozenset, dict)) and len(value) > LONG:
        raise Uncachable
    if isinstance(value, (tuple, list)):
        return type(value), tuple(describe(item, owner, deeper) for item in value)
    if isinstance(value, (set, frozenset)):
        return type(value), frozenset(describe(item, owner, deeper) for item in value)
    if isinstance(value, dict):
        items = ((describe(k, owner, deeper), describe(item, owner, deeper)) for k, item in value.items())
        return type(value), tuple(items)
    return _settings(value, owner, deeper)


def _settings(value: Any, owner: nn.Module, depth: int) -> Hashable:
    """An object by its class and its attributes (configurations), or as itself where they cannot say all."""
    state = getattr(value, "__dict__", None)
    if not isinstance(state, dict) or len(state) > LONG or type(value).__module__ == "builtins":
        return _Same(value)
    items = tuple((name, describe(item, owner, depth)) for name, item in state.items())
    return (type(value) if _holds_all(value, state) else _Same(value)), items


class _Bare:
    """An object whose attributes are all that it holds."""


def _holds_all(value: Any, state: dict[str, Any]) -> bool:
    """Whether equal attributes make equal objects: plain data in `__dict__`, and nothing beside it.

    A `functools.partial` holds its function in fields of its own, a class with slots its values.
    """
    slots = any(base.__dict__.get("__slots__") for base in type(value).__mro__)
    return not slots and type(value).__basicsize__ == _Bare.__basicsize__ and _is_plain_data(state)


def _is_plain_data(value: Any, depth: int = 0) -> bool:
    """Whether numbers, names and containers of them are all there is: equal contents are then equal."""
    if isinstance(value, SIMPLE):
        return True
    if depth > DEPTH:
        return False
    if isinstance(value, (tuple, list, set, frozenset)):
        return all(_is_plain_data(item, depth + 1) for item in value)
    if isinstance(value, dict):
        return all(_is_plain_data(item, depth + 1) for pair in value.items() for item in pair)
    return False


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
    return once(module, "shape", lambda: _shape_of(module))


def _shape_of(module: nn.Module) -> Hashable:
    state = module.__dict__
    settings = tuple(
        [
            (name, value)
            for name, value in state.items()
            if (type(value) in SIMPLE_TYPES or isinstance(value, SIMPLE)) and name[0] != "_"
        ]
    )
    tensors = tuple(
        [
            (name, None if value is None else (tuple(value.shape), value.dtype))
            for kind in (state["_parameters"], state["_buffers"])
            for name, value in kind.items()
        ]
    )
    children = tuple(
        [(name, None if child is None else module_shape(child)) for name, child in state["_modules"].items()]
    )
    return type(module), settings, tensors, children
