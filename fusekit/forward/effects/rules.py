"""The rules of the analysis by name, and switching one off to show that it is needed."""

import contextlib
from collections.abc import Iterator

# What each rule says. With a rule switched off the analysis is unsound: tests and `benchmarks/soundness.py`
# use that to show what it is good for.
RULES: dict[str, str] = {
    "aliases": "two names may share storage; off: a write counts for the name it is spelled with alone",
    "views": "an operator whose schema says so returns a view of its argument",
    "maybe-views": "a composite operator that says nothing may return a view",
    "same-inputs": "the caller may pass one tensor for two inputs, or one that lies on the module",
    "containers": "an item of a list, tuple or dict is what was put into it",
    "attributes": "an attribute of the module or of another object is what was stored in it",
    "writes": "an operator whose schema says so writes its argument",
    "augmented": "`x += 1` writes into the tensor that x holds",
    "items": "`x[i] = y` writes into x",
    "tensor-attributes": "`x.data = y` and the like change the tensor itself",
    "out": "`out=` is written, and is the result",
    "callees": "methods, functions and submodules do what their own text says",
    "unknown-calls": "what cannot be read may write all that it can reach",
    "closures": "a nested function or lambda may run when it is called or handed on",
    "generators": "the body of a generator runs while it is consumed",
    "properties": "reading an attribute that a property computes is a call",
    "escapes": "what was stored outside may be written by code that reaches there",
    "loops": "what one round of a loop leaves, the next one finds",
    "branches": "both arms of an if count",
    "handlers": "a handler may run after any statement of its try",
    "weights": "the weights of the parts may be written, or the parts replaced, between their calls",
    "rebinding": "the name of the input may hold another value later",
    "values": "two names hold one value only where that is so on every way",
    "context": "grad mode and autocast may be changed by a call",
}

_off: set[str] = set()


def on(rule: str) -> bool:
    """Whether a rule holds."""
    return rule not in _off


def all_off() -> frozenset[str]:
    """The rules that are switched off."""
    return frozenset(_off)


@contextlib.contextmanager
def switched_off(*rules: str) -> Iterator[None]:
    """An analysis without these rules, for the block: what it then allows may be wrong.

    For tests of the analysis itself. What was planned before is not forgotten.
    """
    unknown = [rule for rule in rules if rule not in RULES]
    if unknown:
        raise ValueError(f"{unknown[0]!r} is no rule of the analysis: use one of {sorted(RULES)}")
    new = set(rules) - _off
    _off.update(new)
    try:
        yield
    finally:
        _off.difference_update(new)
