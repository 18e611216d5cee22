"""Working something out once, while nothing runs that could change it."""

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any, TypeVar

T = TypeVar("T")

# (id of an object, what was asked of it) -> the object, so that its id stays its own, and the answer.
_known: ContextVar[dict[tuple[int, str], tuple[Any, Any]] | None] = ContextVar("known", default=None)


@contextlib.contextmanager
def nothing_changes() -> Iterator[None]:
    """Within the block no module, class or configuration changes: each is asked once."""
    token = _known.set({})
    try:
        yield
    finally:
        _known.reset(token)


def once(value: object, what: str, compute: Callable[[], T]) -> T:
    """`compute()`, or what it gave for the same `value` earlier in a `nothing_changes` block."""
    known = _known.get()
    if known is None:
        return compute()
    found = known.get((id(value), what))
    if found is None:
        found = known[id(value), what] = (value, compute())
    return found[1]
