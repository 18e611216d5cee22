"""`trace(module)`: the dataflow of one module's forward, found by running it on a meta skeleton."""

import contextlib
import inspect
import traceback
from dataclasses import dataclass, field
from types import FunctionType
from typing import Any

import torch
import torch.nn as nn

from fusekit.forward import ForwardSource, NoSource, Span, forward_chain, source_of
from fusekit.forward.edits import text_at
from fusekit.forward.source import short_path
from fusekit.tracing.inputs import made_up_inputs
from fusekit.tracing.instrument import instrumented
from fusekit.tracing.leaf import AttentionTable, is_attention_function, is_attention_table
from fusekit.tracing.recorder import Recorder, tensors_in
from fusekit.tracing.result import Assumption, Binding, Stopped, Trace
from fusekit.tracing.skeleton import Skeleton, on_meta


def trace(module: nn.Module, *args: Any, **kwargs: Any) -> Trace:
    """The graph of `module`'s forward, every submodule one `call_module` node.

    `args` and `kwargs` are what the forward is called with; only shapes, dtypes and plain values
    count. Without any, required parameters get made-up tensors [batch, length, hidden] and
    the others stay at their defaults; `assumptions` says which. Nothing is computed, no weight
    is read, nothing outside of the trace is changed, and other threads may run the model
    meanwhile.

    It never raises for what the module does: where the forward cannot be followed (a value
    decides a branch, an operator has no meta version) the trace ends, `stopped` says where and
    why, and the graph holds what was seen so far. Raises `TypeError` when `module` is no module.
    """
    if not isinstance(module, nn.Module):
        raise TypeError(f"trace() takes a module, not {type(module).__name__}")
    return run_trace(module, args, kwargs)


def run_trace(module: nn.Module, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Trace:
    """`trace` of the forward that `module`'s original class has, inside of its fused one too."""
    kwargs = kwargs or {}
    name = type(module).__name__
    try:
        chain = forward_chain(module, original=True)
    except NoSource as error:
        return _stopped_at_once(name, error)
    try:
        source: ForwardSource | None = source_of(chain)
    except NoSource:
        source = None
    if args or kwargs:
        return _Run(module, chain[-1], source, args, kwargs, []).trace()
    try:
        values, said = made_up_inputs(module, chain[-1], conventional=False)
    except (TypeError, ValueError) as error:
        return _stopped_at_once(name, NoSource("no-source", f"its signature cannot be read: {error}"))
    found = _Run(module, chain[-1], source, (), values, said).trace()
    if found.complete:
        return found
    values, said = made_up_inputs(module, chain[-1], conventional=True)
    again = _Run(module, chain[-1], source, (), values, said).trace()
    return again if again.complete or len(again.graph.nodes) > len(found.graph.nodes) else found


def run_again(module: nn.Module, function: FunctionType, before: Trace, attributes: dict[str, Any]) -> Trace:
    """The trace of another forward for `module`, on the inputs that `before` had.

    `attributes` are put on the stand-in for `self`.
    """
    args, kwargs = before.inputs
    return _Run(module, function, None, args, kwargs, [], attributes).trace()


def _stopped_at_once(name: str, error: NoSource) -> Trace:
    stopped = Stopped(error.path or "", error.line or 0, str(error))
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
    branches: dict[Span, Any] = field(default_factory=dict)
    operands: dict[Span, set[type]] = field(default_factory=dict)
    bindings: list[Binding] = field(default_factory=list)

    def trace(self) -> Trace:
        recorder = self.recorder = Recorder()
        skeleton = Skeleton(self.module, recorder.call_module)
        recorder.parameters = skeleton.paths
        skeleton.module.__dict__.update(self.attributes)
        if self.source is not None:
            function = instrumented(self.source, self._test, self._bind, self._operand)
        else:
            function = self.function
        recorder.follow(function.__code__)
        function = self._over_copied_globals(function)
        stopped = None
        result: Any = None
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.no_grad())
            stack.enter_context(torch.device("meta"))
            args, kwargs = self._placeholders(skeleton)
            stack.enter_context(recorder)
            try:
                result = function(skeleton.module, *args, **kwargs)
            except Exception as error:
                stopped = self._stopped(error)
        if stopped is None:
            recorder.graph.output(recorder.argument(_outputs(result)))
        graph = recorder.graph
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

    def _over_copied_globals(self, function: FunctionType) -> FunctionType:
        """The same code and cells over globals of its own, attention functions as leaves."""
        names = dict(function.__globals__)
        for name in function.__code__.co_names:
            value = names.get(name)
            if value is None:
                continue
            if is_attention_table(value):
                names[name] = AttentionTable(value, lambda found: self.recorder.leaf(found, True))
            elif is_attention_function(value):
                names[name] = self.recorder.leaf(value, True)
        copied = FunctionType(
            function.__code__, names, function.__name__, function.__defaults__, function.__closure__
        )
        copied.__kwdefaults__ = function.__kwdefaults__
        return copied

    def _placeholders(self, skeleton: Skeleton) -> tuple[tuple[Any, ...], dict[str, Any]]:
        args = tuple(_meta(value) for value in self.args)
        kwargs = {name: _meta(value) for name, value in self.kwargs.items()}
        try:
            bound = inspect.signature(self.function).bind(skeleton.module, *args, **kwargs)
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

    def _bind(self, line: int, name: str, value: Any) -> None:
        node = self.recorder.name_of(value)
        if node is not None:
            self.bindings.append(Binding(name, line, node))

    def _operand(self, span: Span, value: Any) -> Any:
        self.operands.setdefault(span, set()).add(type(value))
        return value

    # -- what is said about the run -----------------------------------------------------------

    def _assumptions(self) -> list[Assumption]:
        found = [Assumption("default" if " left out" in text else "input", text) for text in self.said]
        if self.source is None:
            found.append(Assumption("branch", "tests in the forward are not listed: it has no source text"))
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
    text = " ".join(str(error).split())
    if "meta tensor" in text or "on meta" in text or isinstance(error, NotImplementedError):
        why = "it needs the values of a tensor, and a trace has none"
    elif "has no attribute" in text and "NoneType" in text or "NoneType object" in text:
        why = "an argument that was left out is needed here: pass inputs to trace()"
    else:
        why = "it failed there"
    where = f"{short_path(function.__code__.co_filename)}:{line}"
    return f"the forward cannot be followed past {where}: {why} ({type(error).__name__}: {text[:200]})"


def _meta(value: Any) -> Any:
    """An input as a meta value: a tensor of the same shape, other values as they are."""
    if isinstance(value, torch.Tensor):
        return on_meta(value).requires_grad_(False)
    if type(value) in (tuple, list):
        return type(value)(_meta(item) for item in value)
    if type(value) is dict:
        return {key: _meta(item) for key, item in value.items()}
    return value


def _outputs(value: Any) -> Any:
    """What a forward returned, dataclass-like outputs as plain dicts."""
    if isinstance(value, dict) and type(value) is not dict:
        return dict(value.items())
    return value
