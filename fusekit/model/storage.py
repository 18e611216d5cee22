"""One storage for the weights of merged linears; the original parameters stay, as views of their rows."""

from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.modules import module as torch_module


class MergedLinear:
    """Multiplies once for several sibling linears and hands out each one's slice.

    The weights of the parts are consecutive rows of `weight`, and each part's own
    `nn.Parameter`, the same object under the same name, is a view of its rows; so are biases (a
    missing one is a row of zeros). Whatever changes a parameter in place changes the rows.

    In eager mode every call checks that the parts are the modules and parameters that were
    merged, without hooks, and that each parameter still lies in its rows. Where that is not so
    the call runs the parts as they are now. Compiled code cannot check: after compiling,
    `parameter.data = tensor` needs a new apply.
    """

    is_merged_storage = True

    def __init__(self, owner: nn.Module, paths: tuple[str, ...]):
        self.paths = paths
        self.weight: torch.Tensor | None = None
        self.bias: torch.Tensor | None = None
        self.pending = False  # the parameters were replaced by a loader: lay them out at the next call
        self.adopt(owner)

    def adopt(self, owner: nn.Module) -> None:
        """Take the parts of `owner` for the parts; nothing is laid out yet."""
        self._slots = tuple(_slot(owner, path) for path in self.paths)
        self._rows: tuple[Any, ...] = ()
        self.sizes: tuple[int, ...] = ()

    # -- calling ------------------------------------------------------------------------------

    def __call__(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        if torch.compiler.is_compiling():
            usable = self.weight is not None and not self.pending
        else:
            if self.pending:
                self.settle()
            usable = self.is_tied()
        if not usable:
            return tuple([modules[name](x) for modules, name in self._slots])
        out = F.linear(x, self._whole("weight"), self._whole("bias"))
        slices, start = [], 0
        for size in self.sizes:  # slices, not split: writing into an output in place stays legal
            slices.append(out.narrow(-1, start, size))
            start += size
        return tuple(slices)

    def _whole(self, name: str) -> torch.Tensor | None:
        """The merged tensor, tied to the parts' parameters where one of them wants a gradient."""
        whole = self.weight if name == "weight" else self.bias
        if whole is None or not torch.is_grad_enabled():
            return whole
        parameters = [row[3] if name == "weight" else row[4] for row in self._rows]
        if not any(parameter is not None and parameter.requires_grad for parameter in parameters):
            return whole
        return Rows.apply(whole, self.sizes, *parameters)

    def is_tied(self) -> bool:
        """Whether the parts are the ones merged, plain, unhooked, and their parameters lie in their rows."""
        whole = self.weight
        if whole is None or not self._rows or torch_module._has_any_global_hook():
            return False
        if whole.is_meta:
            return self._is_tied_on_meta()
        weights = whole.data_ptr()
        biases = self.bias.data_ptr() if self.bias is not None else 0
        for modules, name, part, weight, bias, weight_offset, bias_offset in self._rows:
            if modules.get(name) is not part or not is_plain(part):
                return False
            parameters = part._parameters
            if parameters["weight"] is not weight or parameters["bias"] is not bias:
                return False
            if weight.data_ptr() != weights + weight_offset or not weight.is_contiguous():
                return False
            if bias is not None and bias.data_ptr() != biases + bias_offset:
                return False
        return True

    def _is_tied_on_meta(self) -> bool:
        """Before weights are loaded: laid out in form only. Laid out for real at the first call after."""
        parts = [modules.get(name) for modules, name in self._slots]
        if all(is_plain(part) and part.weight.is_meta for part in parts):
            return all(
                part._parameters["weight"] is row[3] for part, row in zip(parts, self._rows, strict=True)
            )
        return not any(is_plain(part) and part.weight.is_meta for part in parts) and self.tie()

    # -- laying out ---------------------------------------------------------------------------

    def tie(self) -> bool:
        """Lay the parts' weights out as rows of one new tensor; False (and nothing done) if they do not fit.

        At its peak it holds the parts once more than before.
        """
        parts = [modules.get(name) for modules, name in self._slots]
        self.weight = self.bias = None
        self._rows = ()
        if not all(is_plain(part) for part in parts):
            return False
        weights = [part._parameters["weight"] for part in parts]
        biases = [part._parameters["bias"] for part in parts]
        if not _fit(weights, 2) or not _fit(
            [bias for bias in biases if bias is not None] or weights[:1], None
        ):
            return False
        if len({weight.shape[1] for weight in weights}) > 1:
            return False
        sizes = tuple(weight.shape[0] for weight in weights)
        whole = torch.empty(sum(sizes), weights[0].shape[1], dtype=weights[0].dtype, device=weights[0].device)
        bias = None
        if any(own is not None for own in biases):
            bias = torch.zeros(sum(sizes), dtype=whole.dtype, device=whole.device)
        self.weight, self.bias = whole, bias  # known from here on, so that `untie` can undo half of it
        rows: list[Any] = []
        start = 0
        with torch.no_grad():
            for (modules, name), part, size in zip(self._slots, parts, sizes, strict=True):
                own_weight, own_bias = part._parameters["weight"], part._parameters["bias"]
                _move(own_weight, whole[start : start + size])
                if own_bias is not None and bias is not None:
                    _move(own_bias, bias[start : start + size])
                width = whole.element_size()
                offsets = start * whole.shape[1] * width, start * width
                rows.append((modules, name, part, own_weight, own_bias, *offsets))
                start += size
        self.sizes, self._rows = sizes, tuple(rows)
        return True

    def untie(self) -> None:
        """Give each part's parameters a storage of their own again, with their present values."""
        shared = {_storage(tensor) for tensor in (self.weight, self.bias) if tensor is not None}
        # A part that was replaced or wrapped meanwhile lives on elsewhere, with its rows: both count.
        parts = [modules.get(name) for modules, name in self._slots]
        parameters = [p for part in parts if isinstance(part, nn.Module) for p in part._parameters.values()]
        parameters += [parameter for row in self._rows for parameter in row[3:5]]
        with torch.no_grad():
            for parameter in parameters:
                if parameter is not None and _storage(parameter) in shared:
                    parameter.data = parameter.data.clone(memory_format=torch.contiguous_format)
        self.weight = self.bias = None
        self._rows = ()

    def settle(self) -> None:
        """After the parameters were moved or replaced: lay them out anew, unless they still lie in their rows."""
        self.pending = False
        if not self._rows or not self.is_tied():
            self.tie()

    # A copy never holds the merged tensor: the class of a fused module lays its own parts out again.
    def __deepcopy__(self, memo: dict[int, Any]) -> "MergedLinear":
        made = object.__new__(type(self))
        memo[id(self)] = made
        made.paths, made.weight, made.bias, made.pending = self.paths, None, None, True
        made._slots, made._rows, made.sizes = (), (), ()
        return made

    def __repr__(self) -> str:
        return f"MergedLinear({', '.join(self.paths)})"


class Rows(torch.autograd.Function):
    """The merged tensor as a function of the parameters whose rows it holds."""

    @staticmethod
    def forward(
        ctx: Any, whole: torch.Tensor, sizes: tuple[int, ...], *parts: torch.Tensor | None
    ) -> torch.Tensor:
        ctx.sizes = sizes
        ctx.save_for_backward(*parts)
        return whole.view_as(whole)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        _ = ctx.saved_tensors  # raises, as a plain linear would, when a parameter was written since
        rows = grad.split(ctx.sizes)
        wanted = ctx.needs_input_grad[2:]
        return None, None, *(row if want else None for row, want in zip(rows, wanted, strict=True))


def is_plain(part: Any) -> bool:
    """Whether a module is exactly a linear: no subclass, hook, or forward of its own."""
    if type(part) is not nn.Linear:
        return False
    state = part.__dict__
    return not (
        state["_forward_hooks"]
        or state["_forward_pre_hooks"]
        or state["_backward_hooks"]
        or state["_backward_pre_hooks"]
        or "forward" in state
    )


def _slot(owner: nn.Module, path: str) -> tuple[dict[str, Any], str]:
    parent, _, name = path.rpartition(".")
    return owner.get_submodule(parent)._modules, name


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _fit(tensors: list[Any], dims: int | None) -> bool:
    """Plain parameters of one dtype and device."""
    return (
        all(type(tensor) is nn.Parameter for tensor in tensors)
        and len({(tensor.dtype, tensor.device) for tensor in tensors}) == 1
        and (dims is None or all(tensor.dim() == dims for tensor in tensors))
        and tensors[0].dtype.is_floating_point
    )


def _move(parameter: nn.Parameter, rows: torch.Tensor) -> None:
    rows.copy_(parameter)
    parameter.data = rows
