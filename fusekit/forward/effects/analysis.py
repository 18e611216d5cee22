"""The effects of one forward: what each of its expressions may write, on every way through it."""

import ast
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from types import FunctionType
from typing import Any

import torch
import torch.nn as nn

from fusekit.forward.effects.frames import Frame, defaults_of, locals_of
from fusekit.forward.effects.interpreter import Interpreter
from fusekit.forward.effects.known import cells_of
from fusekit.forward.effects.notes import Effect, TooMuch
from fusekit.forward.effects.rules import on
from fusekit.forward.effects.values import (
    CONTAINER,
    PLAIN,
    TENSOR,
    Region,
    State,
    Value,
    anything,
    container,
    tensor,
)
from fusekit.forward.reads import SIMPLE
from fusekit.forward.source import ForwardSource, original_class


@dataclass(frozen=True)
class Stored:
    """A name of the forward after a statement has stored it."""

    name: str
    node: ast.AST
    value: Value


@dataclass(frozen=True)
class Effects:
    """Of each expression and statement of a forward what it may write, of each expression what it may be.

    `failed` says why the forward could not be followed; nothing is known then.
    """

    found: Mapping[ast.AST, tuple[Effect, ...]]
    values: Mapping[ast.AST, Value]
    stored: tuple[Stored, ...]
    views: Mapping[ast.AST, str]  # expressions that may return a view of an input, and by what rule
    called: Mapping[ast.AST, tuple[nn.Module, ...]]  # modules whose forwards an expression runs
    settings: Mapping[ast.AST, frozenset[tuple[int, str]]]  # (id of a submodule, attribute) that decided it
    volatile: frozenset[str]  # names that nested functions store, or that are global
    given: tuple[Stored, ...] = ()
    failed: str | None = None

    def at(self, node: ast.AST) -> tuple[Effect, ...]:
        return self.found.get(node, ())

    def value(self, node: ast.AST) -> Value | None:
        return self.values.get(node)


def touches(written: Iterable[Region], read: Iterable[Region]) -> Region | None:
    """A region of `written` that may be one of `read`, None where none can be.

    What lies outside of the forward may be one and the same: the caller may pass a tensor twice, or one
    of the module's own. Two tensors of the module are told apart by their storage.
    """
    theirs = list(read)
    for mine in written:
        for other in theirs:
            if mine == other or _may_be_one(mine, other):
                return mine
    return None


def _may_be_one(one: Region, other: Region) -> bool:
    if one.kind == "new" or other.kind == "new":
        return False
    if one.kind == "own" and other.kind == "own":
        # Objects by identity; which tensors an object holds is what `outside` stands for.
        return False
    if not on("same-inputs"):
        return "outside" in (one.kind, other.kind)
    kinds = {one.kind, other.kind}
    if "own" in kinds and "given" in kinds:
        own = one if one.kind == "own" else other
        return own.can_be_input
    return True


def effects_of(
    source: ForwardSource,
    module: nn.Module,
    given: Mapping[str, Any] | None = None,
    is_tensor: Callable[[ast.AST], bool] = lambda node: False,
) -> Effects:
    """Follow every way through the forward of `source`, as `module` runs it.

    `given` are examples of what its parameters are called with, by name: they say which are tensors.
    `is_tensor` tells of an expression whether a run has seen a tensor there. Calls are followed into
    methods, functions and the forwards of submodules, with their attributes as they are now; hooks of
    those are not looked at (see `Effects.called`).
    """
    restored: dict[str, Value] = {}
    for _ in range(PASSES):
        found, left = _followed(source, module, given or {}, is_tensor, restored)
        if left == restored or found.failed is not None:
            return found
        restored = left
    return replace(found, failed="what it stores on the module does not settle")


PASSES = 4  # what one call stores in attributes, the next one finds


def _followed(
    source: ForwardSource,
    module: nn.Module,
    given: Mapping[str, Any],
    is_tensor: Callable[[ast.AST], bool],
    restored: dict[str, Value],
) -> tuple[Effects, dict[str, Value]]:
    """The effects where earlier calls have left `restored` in attributes, and what this call leaves there."""
    tree = source.tree
    function: FunctionType = source.chain[-1]
    one = Interpreter(module, is_tensor)
    one.volatile, one.restored = _volatile(tree), restored
    frame = Frame(
        0,
        tree,
        function.__globals__,
        cells_of(function),
        is_forward=True,
        class_name=source.class_name,
        home=_home(source, module),
        own=module,
        local=locals_of(tree),
    )
    state = State()
    parameters: list[Stored] = []
    for parameter, value in _given(one, source, module, given, state):
        one.bind(parameter.arg, value, state, frame, parameter)
        parameters.append(Stored(parameter.arg, parameter, value))
    failed = None
    try:
        one.block(tree.body, state, frame)
    except TooMuch as error:
        failed = str(error)
    except RecursionError:
        failed = "the forward is nested too deeply to be followed"
    found = Effects(
        {node: tuple(effects) for node, effects in one.found.items()},
        one.values,
        tuple(Stored(name, node, value) for (node, name), value in one.stores.items()),
        one.views,
        {node: tuple(modules.values()) for node, modules in one.called.items()},
        {node: frozenset(settings) for node, settings in one.settings.items()},
        frozenset(one.volatile),
        tuple(parameters),
        failed,
    )
    return found, one.left


def _home(source: ForwardSource, module: nn.Module) -> type | None:
    for cls in original_class(module).__mro__:
        forward = cls.__dict__.get("forward")
        if forward is source.chain[0] or forward is source.function:
            return cls
    return None


def _volatile(tree: ast.FunctionDef) -> set[str]:
    """Names that nested functions store, or that are no locals: they may change at any call."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, (ast.Global, ast.Nonlocal)):
            found.update(node.names)
    return found


def _given(
    one: Interpreter, source: ForwardSource, module: nn.Module, given: Mapping[str, Any], state: State
) -> list[tuple[ast.arg, Value]]:
    arguments = source.tree.args
    positional = [*arguments.posonlyargs, *arguments.args]
    found: list[tuple[ast.arg, Value]] = []
    defaults = defaults_of(source.chain[-1], source.tree)
    if positional:
        found.append((positional[0], one.value_of(module, positional[0].arg)))
    for parameter in (*positional[1:], *arguments.kwonlyargs):
        name = parameter.arg
        value = _value_given(parameter, given.get(name), name in defaults, defaults.get(name))
        found.append((parameter, value))
    for several in (arguments.vararg, arguments.kwarg):
        if several is not None:
            region = Region("given", several.arg, several.arg, deep=True)
            found.append((several, container({region})))
    return found


TENSOR_WORDS = frozenset(
    {"Tensor", "FloatTensor", "LongTensor", "BoolTensor", "torch", "Optional", "None", "typing"}
)
PLAIN_WORDS = frozenset(
    {"int", "float", "bool", "str", "Optional", "None", "typing", "torch", "dtype", "device"}
)


def _value_given(parameter: ast.arg, example: Any, has_default: bool, default: Any) -> Value:
    """A parameter by an example of it, or by its annotation."""
    name = parameter.arg
    region = Region("given", name, name)
    if isinstance(example, torch.Tensor):
        return tensor({region})
    if isinstance(example, (tuple, list)) and example and all(isinstance(t, torch.Tensor) for t in example):
        return container({region})
    if example is not None and isinstance(example, SIMPLE):
        return Value(frozenset({region}), frozenset({PLAIN, TENSOR}))
    words = (
        {node.id for node in ast.walk(parameter.annotation) if isinstance(node, ast.Name)}
        if (parameter.annotation is not None)
        else set()
    )
    if parameter.annotation is not None:
        words |= {node.attr for node in ast.walk(parameter.annotation) if isinstance(node, ast.Attribute)}
        for node in ast.walk(parameter.annotation):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                words |= set(
                    node.value.replace("|", " ").replace(".", " ").replace("[", " ").replace("]", " ").split()
                )
    if words and words <= TENSOR_WORDS and any(word.endswith("Tensor") for word in words):
        return tensor({region})
    if words and words <= PLAIN_WORDS:
        return Value(frozenset({region}), frozenset({PLAIN, TENSOR}))
    if isinstance(default, (bool, int, float, str)):
        return Value(frozenset({region}), frozenset({PLAIN, TENSOR}))
    deep = Region("given", name, name, deep=True)
    if has_default and default is None:  # what it is when it is given, and what its operators do, no one says
        return Value(frozenset({deep}), frozenset({PLAIN, TENSOR, CONTAINER}))
    return anything({deep})


__all__ = ["Effect", "Effects", "Stored", "effects_of", "touches"]
