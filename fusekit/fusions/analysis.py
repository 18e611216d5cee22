"""What the fusions find in a module's forward, remembered for every instance that is alike."""

import ast
import inspect
import weakref
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field, replace
from types import FunctionType
from typing import Any

import torch
import torch.nn as nn

from fusekit import kernels
from fusekit.errors import FusekitError
from fusekit.forward import (
    ForwardSource,
    NoSource,
    Span,
    compile_edited,
    forward_chain,
    original_class,
    source_of,
)
from fusekit.forward.reads import Read, Uncachable, describe, global_names, key, reads, resolve
from fusekit.fusions.glu import find_glus
from fusekit.fusions.match import Match, Objection
from fusekit.fusions.merge import find_merges, is_linear_like, sibling_groups
from fusekit.fusions.rms_norm import find_norms
from fusekit.fusions.roles import role
from fusekit.fusions.view import ForwardView
from fusekit.tracing import Trace
from fusekit.tracing.inputs import Inputs
from fusekit.tracing.schema import operator_name
from fusekit.tracing.trace import run_again, run_trace

FUSIONS = ("qkv", "kv", "columns", "glu", "rms_norm")


@dataclass(frozen=True)
class Analysis:
    """Matches and objections of one forward, the same for all instances that read equal values."""

    source: ForwardSource | None
    trace: Trace | None
    matches: tuple[Match, ...] = ()
    objections: tuple[Objection, ...] = ()
    kernels: str = "kernels"  # the name under which the rewritten text calls fusekit.kernels


NOTHING = Analysis(None, None)
ROOTS = frozenset({"rsqrt", "sqrt", "pow", "reciprocal"})


@dataclass
class _Remembered:
    """Of one function: what its reads count by type, and its analyses by key."""

    by_type: frozenset[tuple[str, ...]] | None = None
    analyses: dict[Hashable, Analysis] = field(default_factory=dict)

    def add(self, by_type: frozenset[tuple[str, ...]]) -> None:
        """Learn what one more trace says may count by type: only what every trace says does."""
        narrowed = by_type if self.by_type is None else self.by_type & by_type
        if narrowed != self.by_type or len(self.analyses) >= LIMIT:
            self.analyses.clear()  # their keys left out what counts now
        self.by_type = narrowed


_remembered: "weakref.WeakKeyDictionary[Any, _Remembered]" = weakref.WeakKeyDictionary()
LIMIT = 256  # analyses kept for one function


def analyse(module: nn.Module, inputs: Inputs | None = None) -> Analysis:
    """Matches and objections in the forward that `module` has when it is not fused.

    `inputs` are (args, kwargs) that it is called with; without any they are made up.
    """
    if type(module).__module__.startswith("torch."):
        return NOTHING  # PyTorch's own layers: nothing in them is written in Python to be rewritten
    try:
        source = source_of(forward_chain(module, original=True))
    except NoSource as error:
        return _without_source(module, error)
    remembered = _remembered.setdefault(source.function, _Remembered())
    if not remembered.analyses and not _is_worth_tracing(module, source):
        return NOTHING
    try:
        known = remembered.analyses.get(_key(module, source, remembered.by_type, inputs))
        if known is not None:
            return known
        found = _analyse(module, source, inputs)
        remembered.add(_counted_by_type(source, found.trace))
        remembered.analyses[_key(module, source, remembered.by_type, inputs)] = found
        return found
    except Uncachable:
        return _analyse(module, source, inputs)


def _key(
    module: nn.Module,
    source: ForwardSource,
    by_type: frozenset[tuple[str, ...]] | None,
    inputs: Inputs | None,
) -> Hashable:
    own = (*module.__dict__, *module._modules, *module._parameters, *module._buffers)
    # Attributes that a storage must not be called like; those of sites applied here are storages.
    taken = frozenset(
        name
        for name in own
        if name.startswith("merged_") and not getattr(module.__dict__.get(name), "is_merged_storage", False)
    )
    read = key(module, source, by_type or frozenset())
    return original_class(module).__mro__, bool(module.training), taken, read, describe(inputs, module)


def _without_source(module: nn.Module, error: NoSource) -> Analysis:
    """An objection where there would have been something to look for."""
    linears = [name for name, child in module.named_children() if is_linear_like(child)]
    if len(linears) < 2 and not _has_norm_shape(module):
        return NOTHING
    fusion = "columns" if len(linears) >= 2 else "rms_norm"
    return Analysis(
        None, None, (), (Objection(fusion, error.reason, str(error), error.line, tuple(linears)),)
    )


def _is_worth_tracing(module: nn.Module, source: ForwardSource) -> bool:
    """Whether the forward itself calls two linears, or is that of a norm."""
    linears = set()
    for read in reads(source)[0]:
        value = resolve(module, read.chain)
        if isinstance(value, nn.Module) and is_linear_like(value):
            linears.add(id(value))
    return len(linears) >= 2 or (_has_norm_shape(module) and _names_of_norms(module, source))


def _names_of_norms(module: nn.Module, source: ForwardSource) -> bool:
    """Whether the forward, or a method of the module that it names, takes a root or a power of something."""
    names = set(global_names(source.function.__code__))
    for name in tuple(names):
        method = inspect.getattr_static(type(module), name, None)
        if isinstance(method, FunctionType):
            names.update(global_names(method.__code__))
            names.update("pow" for const in method.__code__.co_consts if const == -0.5)
    names.update("pow" for const in source.function.__code__.co_consts if const == -0.5)
    return any(name in ROOTS or "norm" in name.lower() for name in names)


def _has_norm_shape(module: nn.Module) -> bool:
    """No submodules (but a parametrization's), at most one parameter, and that a vector."""
    children = [name for name in module._modules if name != "parametrizations"]
    own = [parameter for parameter in module._parameters.values() if parameter is not None]
    return not children and len(own) <= 1 and all(parameter.dim() == 1 for parameter in own)


def _counted_by_type(source: ForwardSource, trace: Trace | None) -> frozenset[tuple[str, ...]]:
    """Chains whose every read is an argument of a call that the trace did not make.

    Their values (`layer_idx`, for one) cannot have changed its course.
    """
    if trace is None:
        return frozenset()
    skipped = _skipped(source, trace)
    passed: dict[ast.expr, ast.Call] = {}
    for call in ast.walk(source.tree):
        if isinstance(call, ast.Call):
            for argument in (*call.args, *(keyword.value for keyword in call.keywords)):
                passed[argument] = call

    def is_opaque(read: Read) -> bool:
        call = passed.get(read.node)
        return call is not None and call in skipped

    found: dict[tuple[str, ...], bool] = {}
    for read in reads(source)[0]:
        found[read.chain] = found.get(read.chain, True) and is_opaque(read)
    return frozenset(chain for chain, opaque in found.items() if opaque)


def _skipped(source: ForwardSource, trace: Trace) -> set[ast.AST]:
    """Everything under the arms of `if` statements that the trace did not take."""
    found: set[ast.AST] = set()
    for statement in ast.walk(source.tree):
        if isinstance(statement, ast.If):
            truth = trace.branches.get(Span.of(statement.test))
            if truth is not None:
                for skipped in statement.orelse if truth else statement.body:
                    found.update(ast.walk(skipped))
    return found


# -- one forward ------------------------------------------------------------------------------


def _analyse(module: nn.Module, source: ForwardSource, inputs: Inputs | None) -> Analysis:
    trace = run_trace(module, *(inputs or ()))
    view = ForwardView(module, source, trace)
    name = view.new_name("kernels")
    if not trace.complete:
        return Analysis(source, trace, (), tuple(_objections_of_partial(view)), name)
    matches: list[Match] = []
    objections: list[Objection] = []
    taken: set[str] = set()
    for found in (*find_norms(view, name), *find_glus(view, name)):
        (matches if isinstance(found, Match) else objections).append(found)  # type: ignore[arg-type]
        taken.update(found.parts)
    for found in find_merges(view, taken):
        (matches if isinstance(found, Match) else objections).append(found)  # type: ignore[arg-type]
    checked: list[Match] = []
    for match in matches:
        tried = _try_out(view, match, name)
        (checked if isinstance(tried, Match) else objections).append(tried)  # type: ignore[arg-type]
    return Analysis(source, trace, tuple(checked), tuple(objections), name)


def _objections_of_partial(view: ForwardView) -> list[Objection]:
    """What was seen before the trace stopped might have been fused: say why it is not."""
    stopped = view.trace.stopped
    assert stopped is not None
    found = []
    for group in sibling_groups(view):
        fusion, ordered = role(view.trace, group)
        parts = tuple(str(node.target) for node in ordered)
        found.append(Objection(fusion, "trace-stopped", stopped.message, stopped.line, parts))
    if not found:
        seen = {id(resolve(view.module, read.chain)) for read in reads(view.source)[0]}
        linears = [
            n for n, child in view.module.named_children() if is_linear_like(child) and id(child) in seen
        ]
        if len(linears) > 1:
            found.append(Objection("columns", "trace-stopped", stopped.message, stopped.line, tuple(linears)))
    return found


def _try_out(view: ForwardView, match: Match, kernels_name: str) -> Match | Objection:
    """Run the rewritten forward on meta: nobody may be able to tell its results from the original's.

    Slices of a merged output have other strides than an output of its own, and share memory.
    Where that shows (a view that they cannot give, an output that is handed out as it is, a
    reshape that copies and is then written), the slices are copied out: the match is `copied`.
    """
    try:
        function = compile_edited(view.source, match.edits, {kernels_name: kernels})[-1]
    except NoSource as error:
        return Objection(match.fusion, error.reason, str(error), error.line, match.parts)
    except (SyntaxError, FusekitError) as error:
        why = f"no line can be put where the rewrite needs one ({error})"
        return Objection(match.fusion, "different-branches", why, match.line, match.parts)
    wanted = _observed(view.trace)
    tries = [match]
    if match.storage:
        copy = replace(match, copied=True)
        tries = [copy] if _depends_on_layout(view) else [match, copy]
    for tried in tries:
        extra = {match.storage: _stand_in(view, tried)} if match.storage else {}
        after = run_again(view.module, function, view.trace, extra)
        if after.complete and _observed(after) == wanted:
            return tried
    if after.stopped is not None:
        why = f"the rewritten forward does not go through: {after.stopped.message}"
        return Objection(match.fusion, "layout", why, after.stopped.line, match.parts)
    why = "the rewritten forward gives another shape, dtype or layout"
    return Objection(match.fusion, "layout", why, match.line, match.parts)


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
    | {"untyped_storage", "_typed_storage", "_base", "_is_view", "__array__", "__dlpack__"}
)


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
