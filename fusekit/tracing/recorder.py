"""Recording a run on meta tensors as an `fx.Graph`.

A torch function mode sees every call of a torch function, method or operator that this thread
makes, with real (meta) tensors as arguments: sizes are numbers, unpacking and `len` work, views
share storage and version counters count. Nothing is patched; other threads see nothing.
"""

import ast
import contextlib
import dataclasses
import dis
import operator
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Set
from types import CodeType, FrameType
from typing import Any

import torch
import torch.nn as nn
from torch import fx
from torch.overrides import TorchFunctionMode

from fusekit.forward import Span
from fusekit.tracing.leaf import LeafCall, attention_result, recording

TORCH = os.path.dirname(torch.__file__)
HERE = os.path.dirname(__file__)

OPERATORS: dict[str, Callable[..., Any]] = {
    "__getitem__": operator.getitem,
    "__setitem__": operator.setitem,
    **{f"__{name}__": getattr(operator, name) for name in ("eq", "ne", "lt", "le", "gt", "ge")},
}
SIMPLE = (
    int,
    float,
    complex,
    str,
    bool,
    type(None),
    type(...),
    torch.dtype,
    torch.device,
    torch.memory_format,
    torch.layout,
)
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
MOST_CALLS = 10_000  # recorded in one trace: a loop without an end is not followed for ever
REFLECTED = {"__rsub__": operator.sub, "__rdiv__": operator.truediv, "__rpow__": operator.pow}


class TooManyCalls(RuntimeError):
    """A forward does more than a trace records."""


class Recorder(TorchFunctionMode):
    """One graph under construction; a torch function mode while the forward runs."""

    def __init__(self) -> None:
        super().__init__()
        self.graph = fx.Graph()
        self.code: CodeType | None = None  # of the forward being followed
        self.parameters: Mapping[int, str] = {}  # id of a stand-in's tensor -> path
        self.trained: Set[int] = frozenset()  # ids of stand-ins of tensors that require grad
        self._nodes: dict[int, fx.Node | tuple[fx.Node, int]] = {}  # id of a tensor -> who made it
        self._kept: list[Any] = []
        self._leaves: list[Callable[..., Any]] = []
        self._paused = 0
        self._calls = 0
        self._caller: CodeType | None = None
        self._spans: list[Span | None] = []

    def __enter__(self) -> "Recorder":
        super().__enter__()
        self._outer, recording.innermost = recording.innermost, self._own_leaf
        return self

    def __exit__(self, *error: Any) -> None:
        recording.innermost = self._outer
        super().__exit__(*error)

    # -- what made a tensor -------------------------------------------------------------------

    def node_of(self, tensor: torch.Tensor) -> fx.Node:
        """The node whose value `tensor` is; a constant node for one that came from nowhere."""
        found = self._nodes.get(id(tensor))
        if isinstance(found, tuple):
            parent, index = found
            found = self._part(parent, index)
            found.meta["val"] = tensor
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
            for index, item in parts_of(value):
                if isinstance(item, torch.Tensor):
                    self._nodes[id(item)] = (node, index)
                    self._kept.append(item)
                elif tensors_in(item):
                    made = self._part(node, index)
                    self.made(item, made)

    def _part(self, node: fx.Node, index: Any) -> fx.Node:
        """A node for what lies in the value of `node`."""
        how = getattr if dataclasses.is_dataclass(node.meta.get("val")) and isinstance(index, str) else None
        if isinstance(node.meta.get("val"), dict):
            how = None  # Transformers' outputs are both
        made = self.graph.call_function(how or operator.getitem, (node, index))
        made.meta.update(node.meta)
        made.meta.pop("written", None)
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
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            return {name: self.argument(item) for name, item in parts_of(value)}
        return value if isinstance(value, SIMPLE) else None

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
        args, kwargs = _to_meta(func, args, dict(kwargs or {}))
        if func == REQUIRES_GRAD and id(args[0]) in self.trained:
            return True  # the stand-in does not, its original does
        if self._paused:
            return _evaluate(func, args, kwargs)
        self._count()
        given = tensors_in((args, kwargs))
        versions = [_version(tensor) for tensor in given]
        result = _evaluate(func, args, kwargs)
        written = _written(given, versions)
        if not written and None in versions and _writes_by_name(func):
            written = given[:1]
        if func == SET_DATA:  # x.data = y counts no version
            written = [args[0]]
        if not written and not tensors_in(result):
            return result  # metadata: a number, a size, a dtype
        span, direct, opcode = self._place()
        op, target, reflected = _target(func, opcode)
        arguments = args[::-1] if reflected else args
        if target in (getattr, setattr):
            arguments = (args[0], func.__self__.__name__, *args[1:])  # type: ignore[attr-defined]
        recorded = self.argument(arguments), self.argument(kwargs)
        names = [self.node_of(tensor).name for tensor in written]
        node = self.graph.create_node(op, target, *recorded)
        self._describe(node, span, direct, names)
        if result is not None:  # perhaps the very object that went in: x.contiguous(), x.to(same)
            self.made(result, node)
        for tensor in written:  # a later read of it sees what was written
            self._set(tensor, node)
            node.meta.setdefault("val", tensor)
        return result

    def call_module(self, module: nn.Module, path: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Record a call of a submodule as one node; its value comes from running it unrecorded."""
        if self._paused:
            return module.forward(*args, **kwargs)
        self._count()
        place = self._place()
        recorded = self.argument(args), self.argument(kwargs)
        result, written = self._run(module.forward, args, kwargs)
        node = self.graph.create_node("call_module", path, *recorded)
        node.meta["module_type"] = type(module)
        return self._opaque(node, place, result, written)

    def leaf(self, function: Callable[..., Any], attention: bool) -> Callable[..., Any]:
        """`function` recorded as one opaque node that only tensors enter."""
        if function in self._leaves:
            return function  # the default of a table's lookup is one already
        target = LeafCall(function, attention)

        def run(*args: Any, **kwargs: Any) -> Any:
            try:
                return function(*args, **kwargs)
            except Exception:
                if not attention:
                    raise
                return attention_result(args, kwargs)

        def call(*args: Any, **kwargs: Any) -> Any:
            return self._leaf_call(target, function if self._paused else run, args, kwargs)

        self._leaves.append(call)
        return call

    def _count(self) -> None:
        self._calls += 1
        if self._calls > MOST_CALLS:
            raise TooManyCalls(f"more than {MOST_CALLS} operations: a trace is not followed further")

    def _own_leaf(self, target: LeafCall, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A call of what the user made a leaf with `as_leaf_call`."""
        return self._leaf_call(target, target.function, args, kwargs)

    def _leaf_call(
        self, target: LeafCall, run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if self._paused:
            return run(*args, **kwargs)
        place = self._place()
        tensors = tuple(self.argument(arg) for arg in args if tensors_in(arg))
        named = {name: self.argument(arg) for name, arg in kwargs.items() if tensors_in(arg)}
        result, written = self._run(run, args, kwargs)
        node = self.graph.create_node("call_function", target, tensors, named)
        return self._opaque(node, place, result, written)

    def _run(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, list[torch.Tensor]]:
        """What an unrecorded call gives, and the tensors among its arguments that it wrote."""
        given = tensors_in((args, kwargs))
        versions = [_version(tensor) for tensor in given]
        with self.paused():
            result = function(*args, **kwargs)
        return result, _written(given, versions)

    def _opaque(
        self, node: fx.Node, place: tuple[Span | None, bool, str], result: Any, written: list[torch.Tensor]
    ) -> Any:
        self._describe(node, place[0], place[1], [self.node_of(tensor).name for tensor in written])
        for tensor in written:
            self._set(tensor, node)
        self.made(result, node)
        return result

    def _describe(self, node: fx.Node, span: Span | None, direct: bool, written: list[str]) -> None:
        node.meta.update(span=span, direct=direct, context=context())
        if written:
            node.meta["written"] = list(dict.fromkeys(written))

    def _place(self) -> tuple[Span | None, bool, str]:
        """The forward's expression being evaluated, whether it is itself the call, and its opcode."""
        frame: FrameType | None = sys._getframe(2)
        while frame is not None and frame.f_code is not self.code and _is_inside(frame.f_code.co_filename):
            frame = frame.f_back
        opcode = _opcode(frame) if frame is not None else ""
        direct = True
        while frame is not None and not self._is_forward(frame):
            frame, direct = frame.f_back, False
        if frame is None:
            return None, False, opcode
        return self._spans[frame.f_lasti // 2], direct, opcode

    def _is_forward(self, frame: FrameType) -> bool:
        """Whether this is the frame of the forward being followed, not one of a call of itself."""
        above = frame.f_back
        return frame.f_code is self.code and above is not None and above.f_code is self._caller

    def follow(self, code: CodeType, caller: CodeType, tree: ast.AST | None = None) -> None:
        """Take `code`, as called by `caller`, for the forward whose expressions are recorded as spans.

        `tree` is its source, if there is one.
        """
        self.code, self._caller = code, caller
        whole = spans_of_chains(tree) if tree is not None else {}
        self._spans = []
        for line, end_line, column, end_column in code.co_positions():
            if line is None or end_line is None or column is None or end_column is None:
                self._spans.append(None)
            else:
                span = Span(line, column, end_line, end_column)
                self._spans.append(whole.get(span, span))


def spans_of_chains(tree: ast.AST) -> dict[Span, Span]:
    """Where the bytecode says that an attribute or a method call stands -> where it does.

    Python lets the code of `x.name` and `x.name(...)` start at `name` when that is on another
    line than the start of `x`.
    """
    found: dict[Span, Span] = {}
    for node in ast.walk(tree):
        attribute = node.func if isinstance(node, ast.Call) else node
        if not isinstance(attribute, ast.Attribute):
            continue
        assert isinstance(node, ast.expr)
        line, end = attribute.end_lineno, attribute.end_col_offset
        assert line is not None and end is not None
        span = Span.of(node)
        if line != span.line:
            start = end - len(attribute.attr.encode())
            found[Span(line, start, span.end_line, span.end_column)] = span
    return found


def _version(tensor: torch.Tensor) -> int | None:
    """The count of writes into the tensor's storage, None under inference mode, which keeps none."""
    return None if tensor.is_inference() else tensor._version


def _written(tensors: list[torch.Tensor], versions: list[int | None]) -> list[torch.Tensor]:
    pairs = zip(tensors, versions, strict=True)
    found = [tensor for tensor, version in pairs if _version(tensor) != version]
    return list({id(tensor): tensor for tensor in found}.values())


REQUIRES_GRAD: Any = torch.Tensor.requires_grad.__get__  # type: ignore[attr-defined]
SET_DATA: Any = torch.Tensor.data.__set__  # type: ignore[attr-defined]


def _to_meta(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a call with every device among them replaced: all of a trace is on meta."""
    if kwargs.get("device") is not None:
        kwargs["device"] = torch.device("meta")
    if getattr(func, "__name__", "") == "to":
        args = tuple(torch.device("meta") if _is_device(value) else value for value in args)
    return args, kwargs


def _evaluate(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    # Nothing leaves the meta device; elsewhere these return what is there already, too.
    return args[0] if func in (torch.Tensor.cpu, torch.Tensor.cuda) else func(*args, **kwargs)


def _writes_by_name(func: Callable[..., Any]) -> bool:
    name = getattr(func, "__name__", "")
    return name == "__setitem__" or name.startswith("__i") or (name.endswith("_") and not name.endswith("__"))


def _is_device(value: Any) -> bool:
    if isinstance(value, str):
        try:
            torch.device(value)
        except RuntimeError:
            return False
        return True
    return isinstance(value, torch.device)


def _is_inside(filename: str) -> bool:
    return filename.startswith((TORCH + os.sep, HERE + os.sep)) or filename == "<@beartype>"


def _opcode(frame: FrameType) -> str:
    return dis.opname[frame.f_code.co_code[frame.f_lasti]]


def _target(func: Any, opcode: str) -> tuple[str, Any, bool]:
    """(op, target, operands reversed) of a torch function as an fx node spells it."""
    name = getattr(func, "__name__", type(func).__name__)
    if name in ("__get__", "__set__") and hasattr(func, "__self__"):
        return "call_function", getattr if name == "__get__" else setattr, False
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


def parts_of(value: Any) -> list[tuple[Any, Any]]:
    """(index, key or field name, item) of a tuple, list, dict or dataclass, nothing of anything else."""
    if isinstance(value, (tuple, list)):
        return list(enumerate(value))
    if isinstance(value, dict):
        return list(dict.items(value))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in dataclasses.fields(value)]
        return [(name, getattr(value, name)) for name in names if hasattr(value, name)]
    return []


def tensors_in(value: Any) -> list[torch.Tensor]:
    """The tensors in nested tuples, lists, dicts, dataclasses and slices."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, slice):
        return tensors_in((value.start, value.stop, value.step))
    return [tensor for _, item in parts_of(value) for tensor in tensors_in(item)]


def context() -> tuple[Any, ...]:
    """Grad mode and autocast state of this thread: calls merge only where they are equal."""
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        *((torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in ("cpu", "cuda")),
    )
