"""Fusions of the user's own: `@fusekit.fusion` and what such a function is given."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch.nn as nn
from torch import fx

from fusekit.errors import FusekitError
from fusekit.fusions.match import FUSIONS, Match, Objection, Refused
from fusekit.fusions.numeric_trial import TOLERANCE, same_numbers
from fusekit.fusions.rewrite import Attribute, rewrite
from fusekit.fusions.trial import try_out
from fusekit.fusions.view import ForwardView, line_of
from fusekit.tracing import Trace


class Forward:
    """One traced forward, as a user's own fusion sees it.

    `graph` is its `fx.Graph`, every submodule one `call_module` node, and `module` the module that it
    is the forward of: the tools of `fusekit.tracing` (`is_linear`, `is_op`, ...) work on both.
    """

    def __init__(self, view: ForwardView, fusion: "OwnFusion"):
        self._view, self._fusion = view, fusion

    @property
    def module(self) -> nn.Module:
        """The module, to be looked at only: many instances may share what is found here."""
        return self._view.module

    @property
    def trace(self) -> Trace:
        return self._view.trace

    @property
    def graph(self) -> fx.Graph:
        return self._view.trace.graph

    def submodule(self, node: fx.Node) -> nn.Module:
        """The submodule that a `call_module` node calls."""
        return self._view.module.get_submodule(str(node.target))

    def attribute(self, path: Any) -> Attribute:
        """What lies on the module at `path` ("down", "down.weight", "eps"), as an argument of `rewrite`.

        The target of a `call_module` node is such a path. Raises `FusekitError` where nothing is there.
        """
        value: Any = self.module
        text = ""
        for name in str(path).split("."):
            if not hasattr(value, name) or not (name.isidentifier() or name.isdigit()):
                kind = type(self.module).__name__
                raise FusekitError(f"{self._fusion.name}: attribute({path!r}) is nothing that {kind} has")
            value = getattr(value, name)
            text += f"[{name}]" if name.isdigit() else f".{name}"
        return Attribute(text)

    def rewrite(
        self, nodes: Sequence[fx.Node], function: Callable[..., Any], *arguments: Any
    ) -> Match | Objection:
        """`function(*arguments)` in the place of `nodes`; yield what this gives.

        `nodes` are the calls that are replaced; the last of them in the graph is the one whose value
        the call gives. `function` is any function of tensors; it gets `arguments`: nodes of the graph
        that the replaced ones read, `attribute(path)`, numbers, strings, None. In the rewritten forward
        it is called in the place of the last node, under its own name; statements that held the other
        nodes are taken out.

        It is a refusal, with the line that decides, where

        - another node, or another line of the source, uses a value that would be gone;
        - something between the first and the last node may write what they read, store one of the names
          again, or is evaluated only sometimes;
        - a replaced call writes in place, draws random numbers or does something else in training, or they
          run under different grad modes;
        - the rewritten forward gives another shape, dtype or layout, or other numbers: it is run beside
          the original, in float64, with random weights and inputs.

        Hooks, adapters and quantised weights of a replaced submodule are refused for each instance when
        it is planned. They are not looked for again when the module runs: revert before you put a hook on
        a submodule that your function took the place of, or put another in its place.
        Raises `FusekitError` for arguments that are none.
        """
        if not nodes or not all(isinstance(node, fx.Node) and node.graph is self.graph for node in nodes):
            raise FusekitError(f"{self._fusion.name}: rewrite() takes nodes of forward.graph, at least one")
        parts = tuple(dict.fromkeys(str(node.target) for node in nodes if node.op == "call_module"))
        try:
            return rewrite(self._view, self._fusion.name, nodes, function, arguments)
        except Refused as refused:
            return refused.objection(self._fusion.name, parts)

    def refuse(self, node: fx.Node, message: str) -> Objection:
        """A near miss that you saw yourself, as a refusal with the reason `not-this-function`; yield it."""
        parts = (str(node.target),) if node.op == "call_module" else ()
        return Objection(self._fusion.name, "not-this-function", message, line_of(node), parts)


Finder = Callable[[Forward], Iterable[Match | Objection]]


@dataclass(frozen=True)
class OwnFusion:
    """A registered fusion: its name, the function that finds it, and how near its numbers must be."""

    name: str
    find: Finder
    tolerance: float | None

    def remove(self) -> None:
        """Take it out of later plans. What it fused stays so until it is reverted."""
        if _registered.get(self.name) is self:
            del _registered[self.name]


_registered: dict[str, OwnFusion] = {}
own_fusions = MappingProxyType(_registered)


def fusion(name: str, *, tolerance: float | None = TOLERANCE) -> Callable[[Finder], OwnFusion]:
    """Register a fusion of your own: `@fusekit.fusion("name")` above a generator of rewrites.

    The function gets a `Forward` and yields what its `rewrite` and `refuse` give. From then on the fusion
    is part of every plan, under its name, also in `only` and `exclude`; registering the name again (a
    cell that is run again) replaces it, and `.remove()` of what the decorator gives takes it out.

    `tolerance` is the largest difference, relative to the largest magnitude of the result, that the
    rewritten forward may show from the original in the trial on random numbers (float64): 1e-6 unless
    said otherwise. None leaves that trial out: the numbers are then for you to check (`plan.verify()`).

        def double(x, linear):
            return 2 * torch.nn.functional.linear(x, linear.weight, linear.bias)

        @fusekit.fusion("double_linear")
        def double_linear(forward):
            for node in forward.graph.nodes:
                if is_op(node, "mul") and node.args[1] == 2 and is_linear(node.args[0], forward.module):
                    linear = node.args[0]
                    yield forward.rewrite(
                        [linear, node], double, linear.args[0], forward.attribute(linear.target)
                    )

    Raises `FusekitError` for a name that is no identifier or is one of fusekit's own.
    """
    if not isinstance(name, str) or not name.isidentifier():
        raise FusekitError(f'a fusion is named by an identifier, @fusekit.fusion("linear_add"), not {name!r}')
    if name in FUSIONS:
        raise FusekitError(f"{name!r} is a fusion of fusekit's own; choose another name")
    if tolerance is not None and not tolerance > 0:
        raise FusekitError(f"tolerance={tolerance!r}: it must be more than 0, or None to leave the trial out")

    def register(find: Finder) -> OwnFusion:
        made = _registered[name] = OwnFusion(name, find, tolerance)
        return made

    return register


def find_own(view: ForwardView, kernels: str) -> list[Match | Objection]:
    """What the registered fusions find in a forward, each match tried out."""
    found: list[Match | Objection] = []
    for own in own_fusions.values():
        seen: set[Any] = set()
        for one in _asked(own, Forward(view, own)):
            place = tuple(edit.span for edit in one.edits) if isinstance(one, Match) else one
            if place not in seen:  # the same place again, in another round of a loop
                seen.add(place)
                found.append(_tried(view, one, kernels, own.tolerance))
    return found


def _asked(own: OwnFusion, forward: Forward) -> Iterable[Match | Objection]:
    try:
        found = list(own.find(forward) or ())
    except FusekitError:
        raise
    except Exception as error:
        raise FusekitError(
            f"the fusion {own.name!r} failed on {type(forward.module).__name__} "
            f"({type(error).__name__}: {error}); mend it, or take it out with {own.name}.remove()"
        ) from error
    for one in found:
        if not isinstance(one, (Match, Objection)):
            raise FusekitError(
                f"the fusion {own.name!r} yields a {type(one).__name__}; yield what forward.rewrite() or "
                "forward.refuse() gives"
            )
    return found


def _tried(
    view: ForwardView, found: Match | Objection, kernels: str, tolerance: float | None
) -> Match | Objection:
    if isinstance(found, Objection):
        return found
    if not view.trace.complete:
        stopped = view.trace.stopped
        assert stopped is not None
        return Objection(found.fusion, "trace-stopped", stopped.message, stopped.line, found.parts)
    tried = try_out(view, found, kernels)
    if isinstance(tried, Match) and tolerance is not None:
        try:
            same_numbers(view, tried, tolerance)
        except Refused as refused:
            return refused.objection(found.fusion, found.parts)
    return tried
