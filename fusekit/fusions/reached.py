"""The linears that a forward can reach: whether there is something to look for in it at all.

It reads the text and never runs it, and may say too much: that costs a trace, while too little would
be silence about a forward that calls its linears in an unusual way.
"""

import ast
import functools
import inspect
import types
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch.nn as nn

from fusekit.forward import ForwardSource, NoSource, source_of
from fusekit.forward.reads import DYNAMIC, attribute_chain, reads, resolve
from fusekit.fusions.merge import is_linear_like

DEPTH = 2  # how far the methods that a forward names are read themselves
LISTS_CHILDREN = frozenset({"children", "named_children", "modules", "named_modules", "get_submodule"})


def linears_reached(module: nn.Module, source: ForwardSource, depth: int = 0) -> set[int]:
    """The ids of the linear-like modules that the forward, or a method that it names, can call.

    Items of a ModuleList or ModuleDict (or of a plain list, tuple or dict) that it reads count, and all
    children of the module where `self` itself goes somewhere or attributes have computed names.
    """
    mentioned = _mentions(source.tree, source.self_name)
    found: set[int] = set()
    if mentioned.whole or not reads(source)[1]:
        found.update(map(id, linears_in(module)))
    for chain in mentioned.chains:
        value = resolve(module, chain)
        found.update(map(id, _linears_of(value)))
        function = _own_function(module, chain, value)
        if function is None:
            continue
        name = function.__name__
        if getattr(nn.Module, name, None) is function:
            if name in LISTS_CHILDREN:
                found.update(map(id, linears_in(module)))
        elif depth < DEPTH:
            try:
                found |= linears_reached(module, source_of((function,)), depth + 1)
            except NoSource:
                found.update(map(id, linears_in(module)))
    return found


def linears_in(module: nn.Module) -> Iterator[nn.Module]:
    """The linear-like children of a module, those in its ModuleLists and ModuleDicts too."""
    for child in module._modules.values():
        yield from _linears_of(child)


def _linears_of(value: Any) -> Iterator[nn.Module]:
    if isinstance(value, nn.Module):
        if is_linear_like(value):
            yield value
        elif isinstance(value, (nn.ModuleList, nn.ModuleDict)):
            yield from linears_in(value)
    elif isinstance(value, (list, tuple, dict)):
        for item in value.values() if isinstance(value, dict) else value:
            if isinstance(item, nn.Module) and is_linear_like(item):
                yield item


def _own_function(module: nn.Module, chain: tuple[str, ...], value: Any) -> types.FunctionType | None:
    """The function behind a method or property of the module itself."""
    function: Any = None
    if isinstance(value, types.MethodType) and value.__self__ is module:
        function = value.__func__
    elif value is DYNAMIC and len(chain) == 1:
        function = getattr(inspect.getattr_static(type(module), chain[0], None), "fget", None)
    return function if isinstance(function, types.FunctionType) else None


@dataclass(frozen=True)
class _Mentions:
    chains: tuple[tuple[str, ...], ...]  # what is read of the module, also on the way to a longer chain
    whole: bool  # `self` itself goes somewhere: a call, a name, `super()`


@functools.lru_cache(maxsize=4096)
def _mentions(tree: ast.FunctionDef, own: str) -> _Mentions:
    roots: dict[str, tuple[str, ...]] = {own: ()}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign):
            chain = attribute_chain(node.value, own)
            roots.update((name.id, chain) for name in node.targets if isinstance(name, ast.Name) and chain)
    chains: dict[tuple[str, ...], None] = {}
    whole = False

    def visit(node: ast.AST) -> None:
        nonlocal whole
        for root, prefix in roots.items():
            read = attribute_chain(node, root)
            if read:
                chain = prefix + read
                chains.update((chain[:length], None) for length in range(1, len(chain) + 1))
                return
        if isinstance(node, ast.Name):
            whole |= node.id in (own, "super")
        for child in ast.iter_child_nodes(node):
            visit(child)

    for statement in tree.body:
        visit(statement)
    return _Mentions(tuple(chains), whole)
