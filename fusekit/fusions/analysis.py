"""What the fusions find in a module's forward, remembered for every instance that is alike."""

import ast
import functools
import inspect
import weakref
from collections.abc import Hashable
from dataclasses import dataclass, field, replace
from types import FunctionType
from typing import Any

import torch.nn as nn

from fusekit.forward import (
    ForwardSource,
    NoSource,
    Span,
    forward_chain,
    original_class,
    source_of,
)
from fusekit.forward.effects import all_off
from fusekit.forward.reads import Uncachable, bare_uses, describe, global_names, key, reads
from fusekit.fusions.gated_rms_norm import find_gated_norms, trace_with_gate
from fusekit.fusions.glu import find_glus
from fusekit.fusions.match import Match, Objection
from fusekit.fusions.merge import find_merges, sibling_groups
from fusekit.fusions.norm_graph import LENGTHS, MEANS, ROOTS
from fusekit.fusions.own import find_own, own_fusions
from fusekit.fusions.reached import linears_in, linears_reached
from fusekit.fusions.rms_norm import find_norms
from fusekit.fusions.roles import role
from fusekit.fusions.trial import try_out
from fusekit.fusions.view import ForwardView
from fusekit.tracing import Trace, is_leaf_call
from fusekit.tracing.inputs import Inputs
from fusekit.tracing.trace import run_trace


@dataclass(frozen=True)
class Analysis:
    """Matches and objections of one forward, the same for all instances that read equal values."""

    source: ForwardSource | None
    trace: Trace | None
    matches: tuple[Match, ...] = ()
    objections: tuple[Objection, ...] = ()
    kernels: str = "kernels"  # the name under which the rewritten text calls fusekit.kernels
    inputs: Inputs | None = None  # what the forward was traced with, None where that was made up


NOTHING = Analysis(None, None)
CUTS = frozenset({"chunk", "glu", "narrow", "split", "tensor_split", "unbind"})
OTHER_NORMS = (nn.GroupNorm, nn.LayerNorm, nn.modules.batchnorm._NormBase)


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
# What bounds the time that one forward may take: far more than forwards of Transformers have.
LONGEST = 60_000  # characters of a forward's text
MOST_NODES = 2_000  # of its trace
MOST_RUN = 20_000  # nodes run to try its rewrites out, each in a run of the whole forward


def analyse(module: nn.Module, inputs: Inputs | None = None) -> Analysis:
    """Matches and objections in the forward that `module` has when it is not fused.

    `inputs` are (args, kwargs) that it is called with; without any they are made up.
    """
    if type(module).__module__.startswith("torch."):
        return NOTHING  # PyTorch's own layers: nothing in them is written in Python to be rewritten
    try:
        source = source_of(forward_chain(module, original=True))
        if len(source.text) > LONGEST:
            raise NoSource("too-long", _too_long(source, f"of {len(source.text)} characters, {LONGEST}"))
    except NoSource as error:
        return _without_source(module, error)
    except RecursionError:
        return _without_source(module, NoSource("too-long", _too_deep(type(module).__name__)))
    try:
        return _analysed(module, source, inputs)
    except RecursionError:
        return _without_source(module, NoSource("too-long", _too_deep(source.name), source.path, source.line))


def _too_long(source: ForwardSource, what: str) -> str:
    return f"{source.name} is {what} are looked through: move parts of it into methods or submodules"


def _too_deep(name: str) -> str:
    return f"{name} is nested too deeply to be looked through: give parts of its expressions names"


def _analysed(module: nn.Module, source: ForwardSource, inputs: Inputs | None) -> Analysis:
    remembered = _remembered.setdefault(source.function, _Remembered())
    # A user's own fusion may be about anything.
    if not (remembered.analyses or own_fusions or _is_worth_tracing(module, source)):
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
    users, given = tuple(own_fusions.values()), describe(inputs, module)
    return original_class(module).__mro__, bool(module.training), taken, read, given, users, all_off()


def _without_source(module: nn.Module, error: NoSource) -> Analysis:
    """An objection where there would have been something to look for."""
    known = {id(linear) for linear in linears_in(module)}
    linears = [name for name, child in module.named_modules() if id(child) in known]
    alone = not set(module._modules) - {"parametrizations"}
    if len(linears) < 2 and not (alone and _has_norm_shape(module)):
        return NOTHING
    fusion = "columns" if len(linears) >= 2 else "rms_norm"
    return Analysis(
        None, None, (), (Objection(fusion, error.reason, str(error), error.line, tuple(linears)),)
    )


def _is_worth_tracing(module: nn.Module, source: ForwardSource) -> bool:
    """Whether the forward can call two linears (or one by two names), cut one, or be or hold a norm."""
    reached = linears_reached(module, source)
    names = sum(id(child) in reached for child in module._modules.values())
    if max(len(reached), names) >= 2 or (reached and _cuts(source)):
        return True
    if "rsqrt" in global_names(source.function.__code__):
        return True
    # What PyTorch wrote for a layer of its own is its own in a subclass of that, too.
    own = not str(source.chain[-1].__module__).startswith("torch.")
    return own and _has_norm_shape(module) and _speaks_of_norms(original_class(module), source)


def _cuts(source: ForwardSource) -> bool:
    """Whether the forward names what cuts a tensor in two, or slices one as `x[..., :n]`."""
    code = source.function.__code__
    sliced = any(const is ... or (isinstance(const, tuple) and ... in const) for const in code.co_consts)
    return sliced or not CUTS.isdisjoint(global_names(code))


def _speaks_of_norms(cls: type, source: ForwardSource) -> bool:
    """Whether a forward takes a root or a power of something, or says norm."""
    return any(name in ROOTS or "norm" in name.lower() for name in _names_reached(cls, source))


@functools.lru_cache(maxsize=4096)
def _names_reached(cls: type, source: ForwardSource) -> frozenset[str]:
    """The names in a forward and in the methods of the class that it reaches; "pow" for an exponent."""
    names: set[str] = set()
    todo, done = {source.function.__code__}, set()
    while todo:
        code = todo.pop()
        done.add(code)
        new = set(global_names(code)) - names
        names |= new
        names.update("pow" for const in code.co_consts if const in (-0.5, 0.5))
        methods = (inspect.getattr_static(cls, name, None) for name in new)
        todo |= {method.__code__ for method in methods if isinstance(method, FunctionType)} - done
    return frozenset(names)


def _has_norm_shape(module: nn.Module) -> bool:
    """No linears, and at most two parameters (a weight and a bias), each a vector in some shape."""
    own = [parameter for parameter in module._parameters.values() if parameter is not None]
    if len(own) > 2 or any(sum(size != 1 for size in parameter.shape) > 1 for parameter in own):
        return False
    children = [child for name, child in module._modules.items() if name != "parametrizations"]
    return all(child is None or next(child.parameters(), None) is None for child in children)


def _counted_by_type(source: ForwardSource, trace: Trace | None) -> frozenset[tuple[str, ...]]:
    """Chains whose every read is an argument of a call that the trace did not make, or did not open.

    Their values (`layer_idx`, for one) cannot have changed its course. The empty chain is `self`.
    """
    if trace is None:
        return frozenset()
    opaque = _skipped(source, trace)
    # Of an attention function it is known that its other arguments change no shape.
    known = [node for node in trace.graph.nodes if is_leaf_call(node) and node.target.attention]
    leaves = {node.meta["span"] for node in known if node.meta["direct"]}
    passed: dict[ast.expr, ast.Call] = {}
    for call in ast.walk(source.tree):
        if isinstance(call, ast.Call):
            if Span.of(call) in leaves:
                opaque.add(call)
            for argument in (*call.args, *(keyword.value for keyword in call.keywords)):
                passed[argument] = call

    uses: list[tuple[tuple[str, ...], ast.expr]] = [(read.chain, read.node) for read in reads(source)[0]]
    uses += [((), name) for name in bare_uses(source)]
    found: dict[tuple[str, ...], bool] = {}
    for chain, node in uses:
        found[chain] = found.get(chain, True) and passed.get(node) in opaque
    return frozenset(chain for chain, is_opaque in found.items() if is_opaque)


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
    gated = trace_with_gate(module, source) if _has_norm_shape(module) else None
    of_gated = _analyse_gated(module, source, gated, inputs)
    if of_gated is not None:
        return of_gated
    trace = run_trace(module, *(inputs or ()))
    if not trace.complete and gated is not None and gated.complete:
        trace = gated  # an input that may be left out is needed all the same
    view = ForwardView(module, source, trace)
    name = view.new_name("kernels")
    size = len(trace.graph.nodes)
    if size > MOST_NODES:
        why = _too_long(source, f"one of {size} operations, {MOST_NODES}")
        return replace(_without_source(module, NoSource("too-long", why)), source=source, trace=trace)
    own = find_own(view, name)
    checked = [found for found in own if isinstance(found, Match)]
    objections = [found for found in own if isinstance(found, Objection)]
    if not trace.complete:
        objections += _objections_of_partial(view)
        return Analysis(source, trace, (), tuple(objections), name, inputs)
    matches: list[Match] = []
    taken: set[str] = set()
    for found in (*find_norms(view, name), *find_glus(view, name)):
        (matches if isinstance(found, Match) else objections).append(found)  # type: ignore[arg-type]
        taken.update(found.parts)
    for found in find_merges(view, taken):
        (matches if isinstance(found, Match) else objections).append(found)  # type: ignore[arg-type]
    for number, match in enumerate(matches, 1):
        if number * size > MOST_RUN:
            why = _too_long(
                source, f"one of {len(matches)} places in {size} operations, {number - 1} of them"
            )
            objections.append(Objection(match.fusion, "too-long", why, match.line, match.parts))
            continue
        tried = try_out(view, match, name)
        (checked if isinstance(tried, Match) else objections).append(tried)  # type: ignore[arg-type]
    return Analysis(source, trace, tuple(checked), tuple(objections), name, inputs)


def _analyse_gated(
    module: nn.Module, source: ForwardSource, trace: Trace | None, inputs: Inputs | None
) -> Analysis | None:
    """The analysis of a forward that is, or all but is, a gated norm: `trace` is one with its gate given."""
    if trace is None or not trace.complete:
        return None
    view = ForwardView(module, source, trace)
    name = view.new_name("kernels")
    found = [
        try_out(view, one, name) if isinstance(one, Match) else one for one in find_gated_norms(view, name)
    ]
    if not found:
        return None
    found = [*find_own(view, name), *found]
    matches = tuple(one for one in found if isinstance(one, Match))
    objections = tuple(one for one in found if isinstance(one, Objection))
    return Analysis(source, trace, matches, objections, name, inputs)


def _is_called_norm(view: ForwardView) -> bool:
    """Whether a forward that could not be followed is meant for a norm, and for none of PyTorch's kinds."""
    cls = original_class(view.module)
    names = _names_reached(cls, view.source)
    is_called = "norm" in cls.__name__.lower() and not issubclass(cls, OTHER_NORMS)
    return ("rsqrt" in names or is_called) and not names.isdisjoint(MEANS | LENGTHS | {"rms_norm"})


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
        reached = linears_reached(view.module, view.source)
        linears = tuple(name for name, child in view.module.named_modules() if id(child) in reached)
        if len(linears) > 1:
            found.append(Objection("columns", "trace-stopped", stopped.message, stopped.line, linears))
        elif _has_norm_shape(view.module) and _is_called_norm(view):
            found.append(Objection("rms_norm", "trace-stopped", stopped.message, stopped.line))
    return found
