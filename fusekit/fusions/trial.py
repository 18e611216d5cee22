"""Trying a rewrite out on meta before it is offered: can anybody tell its results from the original's?"""

import ast
from collections.abc import Callable, Iterable
from dataclasses import replace
from types import FunctionType
from typing import Any

import torch

from fusekit import kernels
from fusekit.errors import FusekitError
from fusekit.forward import NoSource, compile_edited
from fusekit.forward.reads import attribute_chain, global_names
from fusekit.fusions.match import Match, Objection
from fusekit.fusions.view import ForwardView
from fusekit.tracing import Trace
from fusekit.tracing.instrument import names_in
from fusekit.tracing.schema import operator_name
from fusekit.tracing.trace import run_again


def try_out(view: ForwardView, match: Match, kernels_name: str) -> Match | Objection:
    """Run the rewritten forward on meta: nobody may be able to tell its results from the original's.

    Slices of a merged output have other strides than an output of its own, and share memory.
    Where that shows (a view that they cannot give, an output that is handed out as it is, a
    reshape that copies and is then written), the slices are copied out: the match is `copied`.
    """
    names = {kernels_name: kernels, **dict(match.functions)}
    try:
        function = compile_edited(view.source, match.edits, names)[-1]
    except NoSource as error:
        return Objection(match.fusion, error.reason, str(error), error.line, match.parts)
    except (SyntaxError, FusekitError) as error:
        why = f"no line can be put where the rewrite needs one ({error})"
        return Objection(match.fusion, "different-branches", why, match.line, match.parts)
    tries = [match]
    if match.storage:
        copy = replace(match, copied=True)
        tries = [copy] if _depends_on_layout(view) or _is_unsure(view, match) else [match, copy]
    asked = _asked_for(view) if match.storage else None
    if asked:
        why = f"the forward asks {asked}, which tells a slice from an output of its own"
        return Objection(match.fusion, "layout", why, match.line, match.parts)
    befores: list[tuple[Trace, dict[str, Any]]] = [(view.trace, {})]
    if match.storage:
        befores += [(trace, {}) for trace in _other_ranks(view)]
        befores += _other_mode(view)
    for tried in tries:
        extra = {match.storage: _stand_in(view, tried)} if match.storage else {}
        failed = _first_failure(view, function, befores, extra)
        if failed is None:
            return tried
    stopped = failed.stopped if failed is not None else None
    if stopped is not None:
        why = f"the rewritten forward does not go through: {stopped.message}"
        return Objection(match.fusion, "layout", why, stopped.line, match.parts)
    why = "the rewritten forward gives another shape, dtype or layout"
    return Objection(match.fusion, "layout", why, match.line, match.parts)


def _first_failure(
    view: ForwardView,
    function: FunctionType,
    befores: list[tuple[Trace, dict[str, Any]]],
    extra: dict[str, Any],
) -> Trace | None:
    """The trace of the rewritten forward that does not give what the original gave on the same inputs."""
    for before, attributes in befores:
        after = run_again(view.module, function, before, {**attributes, **extra})
        if not after.complete or _observed(after) != _observed(before):
            return after
    return None


# May be refused to a slice where an output of its own could give them.
VIEWS = frozenset({"view", "view_as", "view_as_complex"})
CHOICES = (ast.IfExp, ast.BoolOp, ast.NamedExpr)


def _is_unsure(view: ForwardView, match: Match) -> bool:
    """Whether slices may meet, on a way that the trace did not go, what only an output of its own can give.

    That is a view, a call of the module's own that is not followed, or a return of it as it is.
    """
    outputs = _Outputs(view, match)
    for node in ast.walk(view.source.tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            seen = bool(view.nodes_at.get(node))
            receivers = [node.func.value, *node.args[:1]]
            if node.func.attr in VIEWS and (not seen or any(map(outputs.is_shaky, receivers))):
                return True
            own = attribute_chain(node.func, view.source.self_name)
            if own and not seen and any(map(outputs.holds, node.args)):
                return True
    return outputs.are_handed_out()


class _Outputs:
    """What may hold an output of a merged part, or a view of one, on some way through the forward."""

    def __init__(self, view: ForwardView, match: Match):
        self.view, self.tree = view, view.source.tree
        self._calls = {f"{view.source.self_name}.{part}" for part in match.parts}
        self.names: set[str] = set()
        # Those that hold something else on another way, and from which line on.
        self.shaky: dict[str, int] = {}
        self._repeats = any(isinstance(node, (ast.For, ast.While)) for node in ast.walk(self.tree))
        arms = {
            (name.id, name.lineno)
            for node in ast.walk(self.tree)
            if isinstance(node, (ast.If, ast.Match))
            for name in ast.walk(node)
            if isinstance(name, ast.Name) and isinstance(name.ctx, ast.Store)
        }
        stored = [node for node in ast.walk(self.tree) if isinstance(node, ast.Assign)]
        known = -1
        while known < len(self.names) + len(self.shaky):  # names of names
            known = len(self.names) + len(self.shaky)
            for node in stored:
                parts = node.value.elts if isinstance(node.value, (ast.Tuple, ast.List)) else [node.value]
                targets = {name for target in node.targets for name in names_in(target)}
                if any(map(self.holds, parts)):
                    self.names |= targets
                if any(map(self.is_shaky, parts)):
                    self._shake((name, node.lineno) for name in targets)
            self._shake((name, line) for name, line in arms if name in self.names)

    def _shake(self, stores: Iterable[tuple[str, int]]) -> None:
        for name, line in stores:
            self.shaky[name] = min(line, self.shaky.get(name, line))

    def holds(self, value: ast.expr) -> bool:
        if isinstance(value, CHOICES):
            return any(self.holds(part) for part in _choices(value))
        base = self._base(value)
        return (
            base is None
            or (isinstance(base, ast.Name) and base.id in self.names)
            or (isinstance(base, CHOICES) and self.holds(base))
        )

    def is_shaky(self, value: ast.expr) -> bool:
        base = self._base(value)
        if isinstance(base, CHOICES):
            return self.holds(base)
        if not isinstance(base, ast.Name) or base.id not in self.shaky:
            return False
        return self._repeats or base.lineno > self.shaky[base.id]

    def _base(self, value: ast.expr) -> ast.expr | None:
        """What the methods, attributes and items of `value` are of; None for the call of a part."""
        while not (isinstance(value, ast.Call) and ast.unparse(value.func) in self._calls):
            if isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute):
                value = value.func.value
            elif isinstance(value, (ast.Attribute, ast.Subscript)):
                value = value.value
            else:
                return value
        return None

    def are_handed_out(self) -> bool:
        """Whether a return that the trace may not have come by gives one as it is."""
        returns = [node.value for node in ast.walk(self.tree) if isinstance(node, ast.Return) and node.value]
        for whole in returns:
            chosen = any(isinstance(node, CHOICES) for node in ast.walk(whole))
            is_one = self.holds if len(returns) > 1 or chosen else self.is_shaky
            for part in ast.walk(whole):
                if isinstance(part, (ast.Name, ast.Call)) and not _is_operand(part, whole) and is_one(part):
                    return True
        return False


def _choices(value: ast.expr) -> list[ast.expr]:
    """What a conditional expression, `and`, `or` or `:=` may give."""
    if isinstance(value, ast.IfExp):
        return [value.body, value.orelse]
    return value.values if isinstance(value, ast.BoolOp) else [value.value]  # type: ignore[attr-defined]


def _is_operand(part: ast.expr, whole: ast.expr) -> bool:
    """Whether `part` is only computed with in `whole`: what arithmetic gives is fresh."""
    return any(
        isinstance(node, (ast.BinOp, ast.Compare)) and any(inner is part for inner in ast.walk(node))
        for node in ast.walk(whole)
    )


def _other_ranks(view: ForwardView) -> list[Trace]:
    """The original forward on inputs of one dimension less and more, where it views and goes through.

    `q.view(b, t, -1)` splits nothing of [b, t, d], and joins dimensions of [b, t, h, d].
    """
    if not any(operator_name(node) in VIEWS for node in view.trace.graph.nodes):
        return []
    original: FunctionType = view.source.chain[-1]
    found = []
    for change in (lambda x: x.flatten(0, 1), lambda x: x.new_empty(3, *x.shape)):
        args, kwargs = _with_ranks(view.trace.inputs, change)
        other = run_again(view.module, original, replace(view.trace, inputs=(args, kwargs)), {})
        if other.complete:
            found.append(other)
    return found


def _other_mode(view: ForwardView) -> list[tuple[Trace, dict[str, Any]]]:
    """The original forward in training where it was traced in evaluation, and the other way round.

    A dropout that is off hands out what it was given.
    """
    codes = [view.source.function.__code__]
    for node in view.trace.graph.nodes:
        module = view.submodule(str(node.target)) if node.op == "call_module" else None
        forwards = [type(inner).forward for inner in module.modules()] if module is not None else []
        codes += [forward.__code__ for forward in forwards if isinstance(forward, FunctionType)]
    if not any("training" in global_names(code) for code in codes):
        return []
    attributes = {"training": not view.module.training}
    original: FunctionType = view.source.chain[-1]
    other = run_again(view.module, original, view.trace, attributes)
    return [(other, attributes)] if other.complete else []


def _with_ranks(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Nested inputs with every floating tensor of three dimensions changed."""
    if isinstance(value, torch.Tensor):
        return change(value) if value.dim() == 3 and value.is_floating_point() else value
    if type(value) in (tuple, list):
        return type(value)(_with_ranks(item, change) for item in value)
    if type(value) is dict:
        return {name: _with_ranks(item, change) for name, item in value.items()}
    return value


def _stand_in(view: ForwardView, match: Match) -> Callable[[torch.Tensor], tuple[torch.Tensor, ...]]:
    """What the merged storage of `match` gives, on meta."""
    made = {node.target: node.meta["val"] for node in view.trace.graph.nodes if node.op == "call_module"}
    outputs = [made[part] for part in match.parts]
    widths: list[int] = [output.shape[-1] for output in outputs]

    def merged(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        shape = x.shape[:-1]
        if match.copied or len({output.dtype for output in outputs}) > 1:  # the latter no instance passes
            return tuple(x.new_empty(*shape, o.shape[-1], dtype=o.dtype) for o in outputs)
        return x.new_empty(*shape, sum(widths), dtype=outputs[0].dtype).split(widths, -1)

    return merged


def _observed(trace: Trace) -> Any:
    """What a caller can see of a forward's results: structure, shapes, strides, dtypes, shared storage."""
    output = next(node for node in trace.graph.nodes if node.op == "output")
    inputs = [node for node in trace.graph.nodes if node.op == "placeholder"]
    storages: dict[int, int] = {}

    def describe(node: torch.fx.Node) -> Any:
        value = node.meta["val"]
        if not isinstance(value, torch.Tensor):
            return str(type(value))
        place = storages.setdefault(value.untyped_storage()._cdata, len(storages))
        return tuple(value.shape), value.stride(), value.dtype, place

    torch.fx.node.map_arg(tuple(inputs), describe)
    return torch.fx.node.map_arg(output.args[0], describe)


# What tells a slice from a tensor of its own, though both hold the same values.
LAYOUT = frozenset(
    {"as_strided", "data_ptr", "is_contiguous", "numpy", "set_", "storage", "storage_offset", "stride"}
    | {"untyped_storage", "_typed_storage", "__array__", "__dlpack__"}
)


# What tells it even from a copy of a slice.
VIEW_OR_NOT = frozenset({"_base", "_is_view"})


def _asked_for(view: ForwardView) -> str | None:
    asked = {
        node.attr for node in ast.walk(view.source.tree) if isinstance(node, ast.Attribute)
    } & VIEW_OR_NOT
    return min(asked, default=None)


def _depends_on_layout(view: ForwardView) -> bool:
    """Whether a forward may write into a tensor, store one, or ask how one lies in memory.

    Then what is a view of an output must stay one: a reshape of a slice is a copy.
    """
    if any(node.meta.get("written") or operator_name(node) in LAYOUT for node in view.trace.graph.nodes):
        return True
    for node in ast.walk(view.source.tree):
        if isinstance(node, ast.Attribute) and node.attr in LAYOUT:
            return True
        if isinstance(node, ast.AugAssign):
            return True
        if isinstance(node, (ast.Attribute, ast.Subscript)) and isinstance(node.ctx, ast.Store):
            return True
        if isinstance(node, ast.Call):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else ""
            if name.endswith("_") and not name.endswith("__"):
                return True
            if any(keyword.arg in ("out", "inplace") for keyword in node.keywords):
                return True
    return False
