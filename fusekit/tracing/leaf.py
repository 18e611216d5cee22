"""Calls that a trace keeps whole: one opaque node, whatever happens inside."""

import inspect
from collections.abc import Callable, Iterator
from types import FunctionType
from typing import Any

import torch
from torch import fx

ATTENTION_PARAMETERS = ["module", "query", "key", "value"]


class LeafCall:
    """A function as the target of one opaque `call_function` node.

    `attention` says that it is an attention function in the sense of Transformers: called with
    (module, query, key, value, mask, ...), it returns (output, weights).
    """

    def __init__(self, function: Callable[..., Any], attention: bool = False):
        self.function, self.attention = function, attention
        self.__name__ = self.__qualname__ = getattr(function, "__name__", type(function).__name__)
        self.__module__ = getattr(function, "__module__", __name__)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)

    def __repr__(self) -> str:
        return self.__name__


def is_leaf_call(node: fx.Node) -> bool:
    """Whether `node` was recorded as one opaque call."""
    return node.op == "call_function" and isinstance(node.target, LeafCall)


def is_attention_function(value: Any) -> bool:
    """Whether a function has the signature of a Transformers attention function."""
    if not isinstance(value, FunctionType):
        return False
    try:
        return list(inspect.signature(value).parameters)[:4] == ATTENTION_PARAMETERS
    except (TypeError, ValueError):
        return False


def is_attention_table(value: Any) -> bool:
    """Whether `value` is Transformers' table of attention functions, told without importing it."""
    return any(
        cls.__name__ == "AttentionInterface" and cls.__module__.startswith("transformers.")
        for cls in type(value).__mro__
    )


class AttentionTable:
    """Transformers' attention table during a trace: what it yields is an opaque leaf."""

    def __init__(self, table: Any, leaf: Callable[[Callable[..., Any]], Callable[..., Any]]):
        self._table, self._leaf = table, leaf

    def __getitem__(self, name: str) -> Callable[..., Any]:
        return self._leaf(self._table[name])

    def __contains__(self, name: object) -> bool:
        return name in self._table

    def __iter__(self) -> Iterator[Any]:
        return iter(self._table)

    def __len__(self) -> int:
        return len(self._table)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._table, name)

    def get(self, name: str, default: Any = None) -> Any:
        found = self._table.get(name, default)
        return self._leaf(found) if callable(found) else found  # None is asked for by `is None`

    def get_interface(self, name: str, default: Any) -> Any:
        return self._leaf(self._table.get_interface(name, default))


def attention_result(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[torch.Tensor, None]:
    """What an attention function that does not run on meta returns: its output and no weights.

    The output is [batch, length, heads, width], from `query` and `value` in [batch, heads, length, width].
    """
    named = dict(zip(ATTENTION_PARAMETERS, args, strict=False)) | kwargs
    query, value = named["query"], named["value"]
    batch, heads, length, _ = query.shape
    return query.new_empty(batch, length, heads, value.shape[-1]), None
