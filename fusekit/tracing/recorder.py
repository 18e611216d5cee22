"""Recording a run on meta tensors as an `fx.Graph`.

A torch function mode sees every call of a torch function, method or operator that this thread
makes, with real (meta) tensors as arguments: sizes are numbers, unpacking and `len` work, views
share storage and version counters count. Nothing is patched; other threads see nothing.
"""

import contextlib
import operator
import os
import sys
from collections.abc import Callable, Iterator
from types import CodeType, FrameType
from typing import Any

import torch
import torch.nn as nn
from torch import fx
from torch.overrides import TorchFunctionMode

from fusekit.forward import Span
from fusekit.tracing.leaf import LeafCall, attention_result

TORCH = os.path.dirname(torch.__file__)
HERE = os.path.dirname(__file__)

OPERATORS: dict[str, Callable[..., Any]] = {
    "__getitem__": operator.getitem,
    "__setitem__": operator.setitem,
    **{f"__{name}__": getattr(operator, name) for name in ("eq", "ne", "lt", "le", "gt", "ge")},
}
# Names that tensor methods share with Python's operators: an operator when the bytecode says so.
ARITHMETIC: dict[str, Callable[..., Any]] = {
    "add": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
    "div": operator.truediv,
    "true_divide": operator.truediv,
    "floor_divide": operator.floordiv,
    "__floordiv__": operator.floordiv,
    "remainder": operator.mod,
    "matmul": operator.matmul,
    "pow": operator.pow,
    "neg": operator.neg,
    "add_": operator.iadd,
    "sub_": operator.isub,
    "mul_": operator.imul,
    "div_": operator.itruediv,
    "__and__": operator.and_,
    "__or__": operator.or_,
    "__xor__": operator.xor,
    "__invert__": operator.invert,
    "bitwise_not": operator.invert,
}
REFLECTED = {"__rsub__": operator.sub, "__rdiv__": operator.truediv, "__rpow__": operator.pow}


class Recorder(TorchFunctionMode):
    """One graph under construction; a torch function mode while the forward runs."""

    def __init__(self) -> None:
        super().__init__()
        self.graph = fx.Graph()
        self.code: CodeType | None = None  # of the forward being followed
        self.parameters: dict[int, str] = {}  # id of a stand-in's tensor -> path
        self._nodes: dict[int, fx.Node | tuple[fx.Node, int]] = {}  # id of a tensor -> who made it
        self._kept: list[Any] = []
        self._paused = 0
        self._spans: list[Span | None] = []

    # -- what made a tensor -------------------------------------------------------------------

    def node_of(self, tensor: torch.Tensor) -> fx.Node:
        """The node whose value `tensor` is; a constant node for one that came from nowhere."""
        found = self._nodes.get(id(tensor))
        if isinstance(found, tuple):
            parent, index = found
            found = self.graph.call_function(operator.getitem, (parent, index))
            found.meta.update(parent.meta, val=tensor)
            found.meta.pop("written", None)
        elif found is None:
            path = self.parameters.get(id(tensor), "<constant>")
            found = self.graph.get_attr(path)
            found.meta.update(val=tensor, span=None)
        self._set(tensor, found)
        return found

    def name_of(self, value: Any) -> str | None:
        """The name of the node whose value is `value`, None when no node made it."""
        if not isinstance(value, torch.Tensor) or id(value) not in self._nodes:
            return None
        return self.node_of(value).name

    def made(self, value: Any, node: fx.Node) -> None:
        """Say that `node` made `value`: a tensor, or a sequence or dict that holds some."""
        node.meta["val"] = value
        self._kept.append(value)
        if isinstance(value, torch.Tensor):
            self._set(value, node)
        else:
            items: Any = ()
            if isinstance(value, (tuple, list)):
                items = enumerate(value)
            elif isinstance(value, dict):
                items = value.items()
            for index, item in items:
                if isinstance(item, torch.Tensor):
                    self._nodes[id(item)] = (node, index)
                    self._kept.append(item)
                elif isinstance(item, (tuple, list, dict)) and tensors_in(item):
                    self.made(item, self._item(node, index))

    def _item(self, node: fx.Node, index: Any) -> fx.Node:
        made = self.graph.call_function(operator.getitem, (node, index))
        made.meta.update(node.meta)
        return made

    def _set(self, tensor: torch.Tensor, node: fx.Node) -> None:
        self._nodes[id(tensor)] = node
        self._kept.append(tensor)

    def argument(self, value: Any) -> Any:
        """`value` as an argument of a node: tensors become nodes, foreign objects None."""
        if isinstance(value, torch.Tensor):
            return self.node_of(value)
        if isinstance(value, torch.Size):
            return tuple(value)
        if isinstance(value, tuple):
            return tuple(self.argument(item) for item in value)
        if isinstance(value, list):
            return [self.argument(item) for item in value]
        if isinstance(value, dict):
            return {str(key): self.argument(item) for key, item in value.items()}
        if isinstance(value, slice):
            return slice(*(self.argument(part) for part in (value.start, value.stop, value.step)))
        simple = (int, float, complex, str, bool, type(None), type(...), torch.dtype, torch.device)
        return value if isinstance(value, simple) else None

    # -- recording ----------------------------------------------------------------------------

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Run without recording: inside of leaves."""
        self._paused += 1
        try:
            yield
        finally:
            self._paused -= 1

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if kwargs.get("device") is not None:
            kwargs["device"] = torch.device("meta")
        if self._paused:
            return func(*args, **kwargs)
        given = list(tensors_in((args, kwargs)))
        versions = [(tensor, tensor._version) for tensor in given]
        result = func(*args, **kwargs)
        written = [tensor for tensor, version in versions if tensor._version != version]
        if not written and not tensors_in(result):
            return result  # metadata: a number, a size, a dtype
        span, direct, opcode = self._place()
        op, target, reflected = _target(func, opcode)
        arguments = args[::-1] if reflected else args
        if op == "getattr":
            op, target, arguments = "call_function", getattr, (*args[:1], func.__self__.__name__)  # type: ignore[attr-defined]
        recorded = self.argument(arguments), self.argument(kwargs)
        names = [self.node_of(tensor).name for tensor in written]
        node = self.graph.create_node(op, target, *recorded)
        self._describe(node, span, direct)
        if names:
            node.meta["written"] = names
        if result is not None and not any(result is tensor for tensor in given if tensor not in written):
            self.made(result, node)
        elif result is not None:  # the very object that went in: x.contiguous(), x.to(same)
            node.meta["val"] = result
            self._set(result, node)
        for tensor in written:  # a later read of it sees what was written
            self._set(tensor, node)
            node.meta.setdefault("val", tensor)
        return result

    def call_module(self, module: nn.Module, path: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Record a call of a submodule as one node; its value comes from running it unrecorded."""
        if self._paused:
            return module.forward(*args, **kwargs)
        span, direct, _ = self._place()
        recorded = self.argument(args), self.argument(kwargs)
        given = list(tensors_in((args, kwargs)))
        versions = [(tensor, tensor._version) for tensor in given]
        with self.paused():
            result = module.forward(*args, **kwargs)
        names = [self.node_of(tensor).name for tensor, version in versions if tensor._version != version]
        node = self.graph.create_node("call_module", path, *recorded)
        node.meta["module_type"] = type(module)
        self._describe(node, span, direct)
        if names:
            node.meta["written"] = names
        self.made(result, node)
        return result

    def leaf(self, function: Callable[..., Any], attention: bool) -> Callable[..., Any]:
        """`function` recorded as one opaque node that only tensors enter."""
        target = LeafCall(function, attention)

        def call(*args: Any, **kwargs: Any) -> Any:
            if self._paused:
                return function(*args, **kwargs)
            span, direct, _ = self._place()
            tensors = tuple(self.argument(arg) for arg in args if tensors_in(arg))
            named = {name: self.argument(arg) for name, arg in kwargs.items() if tensors_in(arg)}
            with self.paused():
                try:
                    result = function(*args, **kwargs)
                except Exception:
                    if not attention:
                        raise
                    result = attention_result(args[1], args[3])
            node = self.graph.create_node("call_function", target, tensors, named)
            self._describe(node, span, direct)
            self.made(result, node)
            return result

        return call

    def _describe(self, node: fx.Node, span: Span | None, direct: bool) -> None:
        node.meta.update(span=span, direct=direct, context=context())

    def _place(self) -> tuple[Span | None, bool, str]:
        """The forward's expression being evaluated, whether it is itself the call, and its opcode."""
        frame: FrameType | None = sys._getframe(2)
        while frame is not None and _is_inside(frame.f_code.co_filename):
            frame = frame.f_back
        direct, opcode = True, ""
        if frame is not None:
            opcode = _opcode(frame)
        while frame is not None and frame.f_code is not self.code:
            frame, direct = frame.f_back, False
        if frame is None:
            return None, False, opcode
        return self._spans[frame.f_lasti // 2], direct, opcode

    def follow(self, code: CodeType) -> None:
        """Take `code` for the forward whose expressions are recorded as spans."""
        self.code = code
        self._spans = [
            Span(line, column, end_line, end_column)
            if line is not None and end_line is not None and column is not None and end_column is not None
            else None
            for line, end_line, column, end_column in code.co_positions()
        ]


def _is_inside(filename: str) -> bool:
    return filename.startswith((TORCH + os.sep, HERE + os.sep)) or filename == "<@beartype>"


def _opcode(frame: FrameType) -> str:
    import dis

    return dis.opname[frame.f_code.co_code[frame.f_lasti]]


def _target(func: Any, opcode: str) -> tuple[str, Any, bool]:
    """(op, target, operands reversed) of a torch function as an fx node spells it."""
    name = getattr(func, "__name__", type(func).__name__)
    if name in ("__get__", "__set__") and hasattr(func, "__self__"):
        return "getattr", None, False
    if name in OPERATORS:
        return "call_function", OPERATORS[name], False
    method = getattr(torch.Tensor, name, None) is func
    if method and name in REFLECTED:
        return "call_function", REFLECTED[name], True
    if method and name in ARITHMETIC and opcode.startswith(("BINARY", "UNARY", "INPLACE")):
        return "call_function", ARITHMETIC[name], False
    if method:
        return "call_method", name, False
    return "call_function", func, False


def tensors_in(value: Any) -> list[torch.Tensor]:
    """The tensors in nested tuples, lists, dicts and slices."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, (tuple, list)):
        return [tensor for item in value for tensor in tensors_in(item)]
    if isinstance(value, dict):
        return [tensor for item in value.values() for tensor in tensors_in(item)]
    if isinstance(value, slice):
        return tensors_in((value.start, value.stop, value.step))
    return []


def context() -> tuple[Any, ...]:
    """Grad mode and autocast state of this thread: calls merge only where they are equal."""
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        *((torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in ("cpu", "cuda")),
    )
