"""Calls that a trace keeps whole: one opaque node, whatever happens inside."""

import contextlib
import functools
import inspect
import threading
from collections.abc import Callable, Iterator
from types import FunctionType
from typing import Any

import torch
from torch import fx

from fusekit.errors import FusekitError

ATTENTION_PARAMETERS = ["module", "query", "key", "value"]


class _Recording(threading.local):
    """What records a call of a leaf in this thread: the innermost of fusekit's traces that runs, or None."""

    innermost: Callable[["LeafCall", tuple[Any, ...], dict[str, Any]], Any] | None = None


recording = _Recording()


class LeafCall:
    """A function as the target of one opaque `call_function` node.

    `attention` says that it is an attention function in the sense of Transformers: called with
    (module, query, key, value, mask, ...), it returns (output, weights). Called with proxies of a
    `torch.fx.Tracer` it records such a node; `length` is then how many values it returns.
    """

    def __init__(self, function: Callable[..., Any], attention: bool = False, length: int | None = None):
        self.function, self.attention, self.length = function, attention, length
        name = getattr(function, "__name__", type(function).__name__)
        self.__name__ = self.__qualname__ = name if name.isidentifier() else "leaf"  # a lambda
        module = getattr(function, "__module__", None) or __name__
        # As a function of torch's own, fx would write the function into its code, not the leaf.
        self.__module__ = __name__ if module.split(".")[0] == "torch" else module

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        proxies = proxies_in((args, kwargs))
        if proxies:
            return self._record(proxies[0].tracer, args, kwargs)
        record = recording.innermost
        return record(self, args, kwargs) if record else self.function(*args, **kwargs)

    def _record(self, tracer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        kept = _only_proxies(args), _only_proxies(kwargs)
        result = tracer.create_proxy("call_function", self, *kept)
        return result if self.length is None else tuple(result[index] for index in range(self.length))

    def __repr__(self) -> str:
        return self.__name__


def as_leaf_call(fn: Callable[..., Any], length: int | None = None) -> LeafCall:
    """`fn` such that a trace records a call of it as one opaque `call_function` node.

    Teaching-only: the library makes leaves of its own. The result is called in the place of `fn`,
    under `torch.fx.Tracer`, `torch.fx.symbolic_trace` or `fusekit.tracing.trace`. Only proxy arguments
    (tensors, in fusekit's trace), positional and keyword, alone or in a list, tuple or dict, enter the
    dataflow; everything else is dropped, so the graph is there to be read and not to be run.
    `length` is the number of values that `fn` returns: the call then gives a tuple of that many, which
    unpacks. Called without proxies, outside of a trace, it simply calls `fn`.

    Raises `FusekitError` when `fn` cannot be called or `length` is no positive number.

    >>> import torch
    >>> top2 = as_leaf_call(lambda x, k: torch.topk(x, k), length=2)
    >>> class Best(torch.nn.Module):
    ...     def forward(self, x):
    ...         values, indices = top2(x, 2)
    ...         return values
    >>> graph = torch.fx.symbolic_trace(Best()).graph
    >>> [node.name for node in graph.nodes if is_leaf_call(node)]
    ['leaf']
    >>> top2(torch.tensor([1.0, 3.0, 2.0]), 2).values
    tensor([3., 2.])
    """
    if not callable(fn):
        raise FusekitError(f"as_leaf_call() takes a function, not {type(fn).__name__}: pass what is called")
    if length is not None and (isinstance(length, bool) or not isinstance(length, int) or length < 1):
        raise FusekitError(f"length={length!r}: give the number of values that {fn} returns, or None")
    return LeafCall(fn, length=length)


def is_leaf_call(node: fx.Node) -> bool:
    """Whether `node` was recorded as one opaque call, by fusekit's trace or through `as_leaf_call`.

    >>> import torch
    >>> leaf = as_leaf_call(torch.sin)
    >>> graph = torch.fx.symbolic_trace(lambda x: torch.cos(leaf(x))).graph
    >>> [(node.name, is_leaf_call(node)) for node in graph.nodes]
    [('x', False), ('sin', True), ('cos', False), ('output', False)]
    """
    return node.op == "call_function" and isinstance(node.target, LeafCall)


def proxies_in(value: Any) -> list[fx.Proxy]:
    """The proxies in nested tuples, lists and dicts."""
    if isinstance(value, fx.Proxy):
        return [value]
    items = value.values() if isinstance(value, dict) else value if isinstance(value, (tuple, list)) else ()
    return [proxy for item in items for proxy in proxies_in(item)]


def _only_proxies(value: Any) -> Any:
    """A tuple, list or dict without all that neither is nor holds a proxy."""
    if isinstance(value, dict):
        return {name: _only_proxies(item) for name, item in value.items() if proxies_in(item)}
    if isinstance(value, (tuple, list)):
        kept = [_only_proxies(item) for item in value if proxies_in(item)]
        return kept if isinstance(value, list) else tuple(kept)
    return value


# -- attention functions ----------------------------------------------------------------------

_patch = threading.RLock()
_patched: list[tuple[type, str, Any]] = []  # (class, method, what stood in the class's own dict)
_inside = 0  # contexts that are open, in all threads
_ABSENT = object()


@contextlib.contextmanager
def leaf_attention_interfaces() -> Iterator[None]:
    """While it is open, every attention function that Transformers looks up is a leaf of two values.

    Teaching-only: fusekit's own trace never enters it. It is for users' own `torch.fx` tracers, which
    would run into the values that attention functions ask for. The table of attention functions
    (`AttentionInterface`) is patched for the whole process; when the last open context ends, also by an
    exception, exactly what was there is put back. Needs Transformers, and imports it when it is entered.

    >>> from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
    >>> with leaf_attention_interfaces():
    ...     sdpa = ALL_ATTENTION_FUNCTIONS["sdpa"]
    >>> sdpa.length, ALL_ATTENTION_FUNCTIONS["sdpa"] is sdpa.function
    (2, True)
    """
    global _inside
    with _patch:
        if not _inside:
            _patch_interface()
        _inside += 1
    try:
        yield
    finally:
        with _patch:
            _inside -= 1
            if not _inside:
                _restore_interface()


def _patch_interface() -> None:
    from transformers.modeling_utils import AttentionInterface

    found = {
        name: getattr(AttentionInterface, name)
        for name in ("__getitem__", "get", "get_interface")
        if hasattr(AttentionInterface, name)
    }
    for name, method in found.items():
        _patched.append((AttentionInterface, name, AttentionInterface.__dict__.get(name, _ABSENT)))
        setattr(AttentionInterface, name, _yielding_leaves(method))


def _restore_interface() -> None:
    while _patched:
        cls, name, before = _patched.pop()
        if before is _ABSENT:
            delattr(cls, name)
        else:
            setattr(cls, name, before)


def _yielding_leaves(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def look_up(*args: Any, **kwargs: Any) -> Any:
        found = method(*args, **kwargs)
        # One look-up may go through another; a default that was asked for may be anything.
        if not callable(found) or isinstance(found, LeafCall):
            return found
        return LeafCall(found, attention=True, length=2)

    return look_up


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
