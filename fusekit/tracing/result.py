"""What a trace is: plain data around an `fx.Graph`."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch.fx

from fusekit.forward import ForwardSource, Span
from fusekit.shown import Shown


@dataclass(frozen=True)
class Assumption:
    """Something a trace took for granted, since no input was there to tell.

    `kind` is `input` (a made-up value: its shape and dtype), `default` (an argument left at its
    default) or `branch` (a test in the source and the way it went).
    """

    kind: str
    text: str
    line: int | None = None


@dataclass(frozen=True)
class Stopped:
    """Where a trace could not go on, and why, in one sentence."""

    path: str
    line: int
    message: str


@dataclass(frozen=True, repr=False, eq=False)
class Trace(Shown):
    """The dataflow of one module's forward, every submodule one `call_module` node.

    Every node carries in `meta` its `span`, a `Span` of the source or None where there is no such
    place: for a call the expression of the forward that made it; for a placeholder its parameter in
    the signature; for a `get_attr` the first `self.<path>` that reads it; for the output what is
    returned, where there is exactly one `return`. `direct` says that the expression at `span` is
    itself the call (and not one of a helper that made it).

    Each node that made a tensor also carries
    `val` (its value on the meta device: shape and dtype; a tuple where there are several) and, where
    it is a call,
    `context` (grad mode and autocast state it ran under), and
    `written` (names of the nodes whose storage it wrote; absent where it wrote none).

    `complete` is False when the forward could not be followed to its end; then `stopped` says
    where and why and the graph has no `output` node.
    """

    graph: torch.fx.Graph
    name: str  # of the module's class
    source: ForwardSource | None
    stopped: Stopped | None
    assumptions: tuple[Assumption, ...]
    bindings: tuple["Binding", ...] = ()
    operands: Mapping[Span, set[type]] = field(default_factory=dict)  # what operators were applied to
    branches: Mapping[Span, bool] = field(default_factory=dict)  # tests and the one way each went
    inputs: tuple[tuple[Any, ...], dict[str, Any]] = ((), {})  # what the forward was called with

    @property
    def complete(self) -> bool:
        return self.stopped is None


@dataclass(frozen=True)
class Binding:
    """A local name that held a tensor after a statement: `name` at `line` was `node`."""

    name: str
    line: int
    node: str
