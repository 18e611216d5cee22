"""`trace(module)`: the dataflow of one module's forward, found by running it on a meta skeleton."""

import contextlib
import inspect
import random
import sys
import traceback
from collections.abc import AsyncIterator, Awaitable, Iterator
from dataclasses import dataclass, field, replace
from types import CellType, FunctionType
from typing import Any

import torch
import torch.nn as nn

from fusekit.errors import FusekitError
from fusekit.forward import ForwardSource, NoSource, Span, forward_chain, source_of
from fusekit.forward.edits import text_at
from fusekit.forward.reads import SEES_NAMES, global_names
from fusekit.forward.source import short_path
from fusekit.tracing.inputs import Guess, Inputs, guesses, made_up_inputs
from fusekit.tracing.instrument import BIND, OPERAND, TEST, instrumented
from fusekit.tracing.leaf import AttentionTable, is_attention_function, is_attention_table
from fusekit.tracing.places import place_values
from fusekit.tracing.recorder import Recorder, parts_of, tensors_in
from fusekit.tracing.result import Assumption, Binding, Stopped, Trace
from fusekit.tracing.skeleton import Skeleton


def trace(module: nn.Module, *args: Any, **kwargs: Any) -> Trace:
    """The graph of `module`'s forward, every submodule one `call_module` node.

    `args` and `kwargs` are what the forward is called with; only shapes, dtypes and plain values
    count. Without any, required parameters get made-up tensors [batch, length, hidden], or what
    their name means in Transformers, and the others stay at their defaults; where the forward does not
    get to its end so, those follow that forwards often read all the same (rotary tables, states of
    an encoder, images). `assumptions` says which. Nothing is computed, no weight
    is read, nothing outside of the trace is changed, and other threads may run the model
    meanwhile.

    It never raises for what the module does: where the forward cannot be followed (a value
    decides a branch, an operator has no meta version) the trace ends, `stopped` says where and
    why, and the graph holds what was seen so far. Raises `FusekitError` when `module` is no module.

    >>> found = trace(nn.Sequential(nn.Linear(4, 4), nn.ReLU()))
    >>> [str(node) for node in found.graph.nodes], found.complete
    (['input_1', '_0', '_1', 'output'], True)
    """
    if not isinstance(module, nn.Module):
        raise FusekitError(f"trace() takes a module, not {type(module).__name__}: pass an nn.Module instance")
    return run_trace(module, args, kwargs)


def run_trace(
    module: nn.Module,
    args: tuple[Any, ...] = (),
    kwargs: dict[str, Any] | None = None,
    also: frozenset[str] = frozenset(),
) -> Trace:
    """`trace` of the forward that `module`'s original class has, inside of its fused one too.

    `also` names optional parameters that are made up as if they were required.
    """
    kwargs = kwargs or {}
    try:
        return _run_trace(module, args, kwargs, also)
    except Exception as error:  # what cannot even be set up: an object that forbids being looked at
        return _stopped_at_once(type(module).__name__, error)


def _run_trace(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], also: frozenset[str]
) -> Trace:
    chain = forward_chain(module, original=True)
    try:
        source: ForwardSource | None = source_of(chain)
    except NoSource:
        source = None
    if args or kwargs:
        return _Run(module, chain[-1], source, args, kwargs, []).trace()
    found: Trace | None = None
    for guess in guesses(chain[-1]):
        guess = replace(guess, optional=guess.optional | also)
        again = _Run(module, chain[-1], source, *_made_up(module, chain[-1], guess)).trace()
        if found is None or again.complete or len(again.graph.nodes) > len(found.graph.nodes):
            found = again
        if found.complete:
            break
    assert found is not None
    return found


def _made_up(
    module: nn.Module, function: FunctionType, guess: Guess
) -> tuple[tuple[Any, ...], dict[str, Any], list[str]]:
    """Positional-only and other arguments, and a sentence about each."""
    values, said = made_up_inputs(module, function, guess)
    positional = []
    for parameter in list(inspect.signature(function).parameters.values())[1:]:
        if parameter.kind is not parameter.POSITIONAL_ONLY or parameter.name not in values:
            break
        positional.append(values.pop(parameter.name))
    return tuple(positional), values, said


def run_again(module: nn.Module, function: FunctionType, before: Trace, attributes: dict[str, Any]) -> Trace:
    """The trace of another forward for `module`, on the inputs that `before` had.

    `attributes` are put on the stand-in for `self`; `training` is passed on to its submodules.
    """
    args, kwargs = before.inputs
    return _Run(module, function, None, args, kwargs, [], attributes).trace()


def trace_function(
    module: nn.Module, source: ForwardSource, inputs: Inputs, attributes: dict[str, Any]
) -> Trace:
    """The trace of `source`, the forward of `module` or another method of it, called with `inputs`.

    `attributes` are put on the stand-in for `self`.
    """
    try:
        return _Run(module, source.chain[-1], source, *inputs, [], attributes).trace()
    except Exception as error:
        return _stopped_at_once(type(module).__name__, error)


def _stopped_at_once(name: str, error: Exception) -> Trace:
    if isinstance(error, NoSource):
        stopped = Stopped(error.path or "", error.line or 0, str(error))
    else:
        stopped = Stopped("", 0, f"{name} cannot be traced: {type(error).__name__}: {_one_line(error)}")
    return Trace(torch.fx.Graph(), name, None, stopped, ())


@dataclass
class _Run:
    """One run of a forward under a recorder."""

    module: nn.Module
    function: FunctionType
    source: ForwardSource | None
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    said: list[str]
    attributes: dict[str, Any] = field(default_factory=dict)
    probed: bool = False
    branches: dict[Span, Any] = field(default_factory=dict)
    operands: dict[Span, set[type]] = field(default_factory=dict)
    bindings: list[Binding] = field(default_factory=list)

    def trace(self) -> Trace:
        recorder = self.recorder = Recorder()
        skeleton = self.skeleton = Skeleton(self.module, recorder.call_module)
        recorder.parameters, recorder.trained = skeleton.paths, skeleton.trained
        skeleton.module.__dict__.update(self.attributes)
        if "training" in self.attributes:
            for inner in skeleton.module.modules():
                inner.__dict__["training"] = self.attributes["training"]
        function, tree = self.function, None
        if self.source is not None and not _asks_for_its_names(self.source):
            function = instrumented(self.source, self._test, self._bind, self._operand)
            tree = self.source.tree
            self.probed = True
        recorder.follow(function.__code__, _Run._call.__code__, tree)
        function = self._cut_loose(function)
        stopped = None
        result: Any = None
        with contextlib.ExitStack() as stack:
            stack.enter_context(_random_state_kept(function))
            stack.enter_context(torch.inference_mode(False))
            # Stand-ins require no grad, so no graph is built; with grad mode on, a forward's own
            # `no_grad` shows in what runs under it.
            stack.enter_context(torch.enable_grad())
            stack.enter_context(torch.device("meta"))
            args, kwargs = self._placeholders()
            stack.enter_context(recorder)
            try:
                result = self._call(function, args, kwargs)
                if _runs_later(result):
                    raise TypeError(f"it returns a {type(result).__name__}, whose code runs later")
            except Exception as error:
                stopped = self._stopped(error)
        if stopped is None:
            recorder.graph.output(recorder.argument(result))
        graph = recorder.graph
        if self.source is not None:
            place_values(graph, self.source)
        for node in graph.nodes:
            node.meta.setdefault("span", None)
        return Trace(
            graph,
            type(self.module).__name__,
            self.source,
            stopped,
            tuple(self._assumptions()),
            tuple(self.bindings),
            self.operands,
            {span: value for span, value in self.branches.items() if value is not None},
            (self.args, self.kwargs),
        )

    def _call(self, function: FunctionType, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return function(self.skeleton.module, *args, **kwargs)  # the recorder knows this frame

    def _cut_loose(self, function: FunctionType) -> FunctionType:
        """The same code over globals, cells and defaults of its own, attention functions as leaves.

        Lists, modules and tensors among them are stand-ins: what the forward writes there stays here.
        """
        value = self.skeleton.value
        names = dict(function.__globals__)
        for name in global_names(function.__code__):
            if name in function.__globals__:
                names[name] = self._global(function.__globals__[name])
        copied = FunctionType(
            function.__code__,
            names,
            function.__name__,
            value(function.__defaults__),
            self._cells(function),
        )
        copied.__kwdefaults__ = value(function.__kwdefaults__)
        return copied

    def _global(self, value: Any) -> Any:
        if is_attention_table(value):
            return AttentionTable(value, lambda found: self.recorder.leaf(found, True))
        if is_attention_function(value):
            return self.recorder.leaf(value, True)
        # Other objects stay themselves: code elsewhere may ask whether they are.
        if isinstance(value, (list, dict, set, torch.Tensor, nn.Module)):
            return self.skeleton.value(value)
        return value

    def _cells(self, function: FunctionType) -> tuple[CellType, ...]:
        """Cells that a forward writes to (`nonlocal`) are its own; those of probes hold no stand-ins."""
        pairs = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
        return tuple(
            cell if name in (TEST, BIND, OPERAND) else self.skeleton.cells((cell,))[0] for name, cell in pairs
        )

    def _placeholders(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        args = tuple(self.skeleton.value(value) for value in self.args)
        kwargs = {name: self.skeleton.value(value) for name, value in self.kwargs.items()}
        try:
            bound = inspect.signature(self.function).bind(self.skeleton.module, *args, **kwargs)
            named = list(bound.arguments.items())[1:]
        except TypeError:  # the call itself will fail, and say so
            named = [(f"arg{i}", value) for i, value in enumerate(args)] + list(kwargs.items())
        for name, value in named:
            if tensors_in(value):
                node = self.recorder.graph.placeholder(name)
                node.meta["span"] = None
                self.recorder.made(value, node)
                if isinstance(value, torch.Tensor):
                    self.bindings.append(Binding(name, self.function.__code__.co_firstlineno, node.name))
        return args, kwargs

    # -- probes -------------------------------------------------------------------------------

    def _test(self, span: Span, value: Any) -> Any:
        truth = bool(value)
        # A test that went both ways (in a loop) is no assumption.
        self.branches[span] = truth if self.branches.get(span, truth) is truth else None
        return value

    def _bind(self, line: int, name: str, value: Any) -> Any:
        node = self.recorder.name_of(value)
        if node is not None:
            self.bindings.append(Binding(name, line, node))
        return value

    def _operand(self, span: Span, value: Any) -> Any:
        self.operands.setdefault(span, set()).add(type(value))
        return value

    # -- what is said about the run -----------------------------------------------------------

    def _assumptions(self) -> list[Assumption]:
        found = [Assumption("default" if " left out" in text else "input", text) for text in self.said]
        for node in self.recorder.graph.nodes:
            if any(enabled for enabled, _ in node.meta.get("context", ())[2:]):
                text = "autocast is not applied on meta: dtypes under it are those without"
                span = node.meta["span"]
                found.append(Assumption("input", text, span.line if span else None))
                break
        if self.source is None or not self.probed:
            why = "it asks for its own names" if self.source else "it has no source text"
            found.append(Assumption("branch", f"tests in the forward are not listed: {why}"))
            return found
        for span, truth in self.branches.items():
            if truth is not None:
                text = " ".join(text_at(self.source.file_text, span).split())
                found.append(Assumption("branch", f"{text} was {'true' if truth else 'false'}", span.line))
        return found

    def _stopped(self, error: Exception) -> Stopped:
        line = self.function.__code__.co_firstlineno
        for frame, number in traceback.walk_tb(error.__traceback__):
            if frame.f_code is self.recorder.code:
                line = number
        return Stopped(self.function.__code__.co_filename, line, _sentence(error, self.function, line))


def _sentence(error: Exception, function: FunctionType, line: int) -> str:
    text = _one_line(error)
    no_values = "meta" in text.lower() and "tensor" in text.lower()
    if no_values or (isinstance(error, NotImplementedError) and "forward" not in text):
        why = "it needs the values of a tensor, and a trace has none"
    elif "NoneType" in text:
        why = "an argument that was left out is needed here: pass inputs to trace()"
    else:
        why = "it failed there"
    where = f"{short_path(function.__code__.co_filename)}:{line}"
    # The cause comes first: tables cut long texts at their end.
    return f"the trace stops: {why} ({type(error).__name__}: {text}), at {where}"


def _one_line(error: Exception) -> str:
    try:
        return " ".join(str(error).split())[:200]
    except Exception:
        return "(its message cannot be shown)"


def _asks_for_its_names(source: ForwardSource) -> bool:
    """Whether the forward would see the probes: `locals()` holds them too."""
    return not SEES_NAMES.isdisjoint(global_names(source.chain[-1].__code__))


def _runs_later(value: Any) -> bool:
    """Whether a forward returned, alone or among others, code that has not run yet."""
    if isinstance(value, (Iterator, Awaitable, AsyncIterator)) and not isinstance(value, torch.Tensor):
        return True
    return any(_runs_later(item) for _, item in parts_of(value))


@contextlib.contextmanager
def _random_state_kept(function: FunctionType) -> Iterator[None]:
    """Give Python's and NumPy's generators back as they were, where the forward itself may draw from them.

    PyTorch's draw nothing on meta.
    """
    names = {id(function.__globals__.get(name)) for name in global_names(function.__code__)}
    numpy = sys.modules.get("numpy")
    python_state = random.getstate() if id(random) in names else None
    numpy_state = numpy.random.get_state() if numpy is not None and id(numpy) in names else None
    try:
        yield
    finally:
        if python_state is not None:
            random.setstate(python_state)
        if numpy is not None and numpy_state is not None:
            numpy.random.set_state(numpy_state)
