"""One storage for the weights of merged linears; the original parameters stay, as views of their rows."""

import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.autograd import forward_ad
from torch.nn.modules import module as torch_module

from fusekit.model.gradients import Rows, Slices

GONE = torch.empty(0)  # stands for a parameter that nobody has any more
LINEAR_FORWARD = nn.Linear.forward  # some tools replace it for the whole process


class MergedLinear:
    """Multiplies once for several sibling linears and hands out each one's slice.

    The weights of the parts are consecutive rows of `weight`, and each part's own
    `nn.Parameter`, the same object under the same name, is a view of its rows; so are biases (a
    missing one is a row of zeros). Whatever changes a parameter in place changes the rows.

    In eager mode every call checks that the parts are the modules and parameters that were
    merged, without hooks, and that each parameter still lies in its rows. Where that is not so
    the call runs the parts as they are now, in the `order` in which the forward called them; one that
    the forward calls only on some way is not in it, and None stands for its output: the forward runs
    it where it stands.
    Compiled code checks modules, parameters and hooks; where the parameters lie is checked when
    it is compiled, so after that `parameter.data = tensor` needs a new apply.

    `settings` (path, attribute) of submodules that run between the parts must stay what they were at first;
    where one changed, the parts run apart.

    `copied` says that the outputs are copied out of the product: a forward that hands them
    out as they are, or views them as a slice cannot be viewed, needs that.
    """

    is_merged_storage = True

    def __init__(
        self,
        owner: nn.Module,
        paths: tuple[str, ...],
        order: tuple[str, ...] | None = None,
        copied: bool = False,
        settings: tuple[tuple[str, str], ...] = (),
    ):
        self.paths, self.order, self.copied = paths, paths if order is None else order, copied
        self.settings = tuple((path, name, _setting(owner, path, name)) for path, name in settings)
        self._blank()
        self.adopt(owner)

    def _blank(self) -> None:
        self.weight: torch.Tensor | None = None
        self.bias: torch.Tensor | None = None
        self.pending = False  # the parameters were replaced by a loader: lay them out at the next call
        self.sizes: tuple[int, ...] = ()
        self._rows: tuple[Any, ...] = ()
        self._slots: tuple[Any, ...] = ()  # (modules, name, module) of each part and of what it is inside
        self._root: dict[str, Any] = {}
        self._owner: Callable[[], nn.Module | None] = lambda: None
        self._is_tied_for_real = _real_check(self)

    def adopt(self, owner: nn.Module) -> None:
        """Take the parts of `owner` for the parts; nothing is laid out yet."""
        self._root = owner._modules  # not the owner: that would be a cycle, and its memory freed late
        self._owner = weakref.ref(owner)

    # -- calling ------------------------------------------------------------------------------

    def __call__(self, x: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        if torch.compiler.is_compiling():
            if not self._is_tied_for_real() or not self._is_same():
                return self._apart(x)
            frozen = self._frozen(x)
            pieces = self._slices(F.linear(x, *self._whole(None)))
            return tuple([p.detach() if i in frozen else p for i, p in enumerate(pieces)])
        if self.pending:
            self.settle()
        if not isinstance(x, torch.Tensor) or _is_transformed():
            return self._apart(x)
        if not self.is_tied():
            self._let_go()
            return self._apart(x)
        used: set[int] = set()
        out = F.linear(x, *self._whole(used))
        if torch.is_grad_enabled() and out.requires_grad:
            weights = [row[1] for row in self._rows]
            checked = weights if x.requires_grad else []  # a plain linear, too, saves its weight only then
            return Slices.apply(out, self._slices, self.sizes, checked, self._frozen(x), used)
        return tuple(piece.data for piece in self._slices(out))

    def _frozen(self, x: torch.Tensor) -> list[int]:
        """Numbers of the parts whose output asks for no gradient: nothing that it is made of does."""
        if x.requires_grad:
            return []
        trained = [w.requires_grad or (b is not None and b.requires_grad) for _, w, b, *_ in self._rows]
        return [number for number, one in enumerate(trained) if not one]

    def _apart(self, x: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        made = {path: self._part(path)(x) for path in self.order}
        return tuple([made.get(path) for path in self.paths])

    def _part(self, path: str) -> Any:
        first, *others = path.split(".")
        if first not in self._root:
            raise AttributeError(f"{first} was merged with other linears, and is gone")
        module = self._root[first]
        for name in others:
            module = getattr(module, name)
        return module

    def _present(self) -> list[Any]:
        """The parts as they are now, None for one that is gone."""
        found = []
        for path in self.paths:
            try:
                found.append(self._part(path))
            except AttributeError:
                found.append(None)
        return found

    def _slices(self, out: torch.Tensor) -> list[torch.Tensor]:
        pieces, start = [], 0
        for size in self.sizes:
            piece = out.narrow(-1, start, size)
            pieces.append(piece.clone(memory_format=torch.contiguous_format) if self.copied else piece)
            start += size
        return pieces

    def _whole(self, used: set[int] | None) -> tuple[torch.Tensor, torch.Tensor | None]:
        """(weight, bias), each tied to the parts' parameters where one of them wants a gradient."""
        assert self.weight is not None
        whole = self._with_grad(self.weight, [row[1] for row in self._rows], used)
        bias = self.bias
        if bias is None:
            return whole, None
        return whole, self._with_grad(bias, [row[2] for row in self._rows], used)

    def _with_grad(
        self, whole: torch.Tensor, parameters: list[torch.Tensor | None], used: set[int] | None
    ) -> torch.Tensor:
        if not torch.is_grad_enabled():
            return whole
        if not any(parameter is not None and parameter.requires_grad for parameter in parameters):
            return whole
        return Rows.apply(whole, self.sizes, used, *parameters)

    # -- checking -----------------------------------------------------------------------------

    def is_tied(self) -> bool:
        """Whether the parts are the ones merged, plain, unhooked, and their parameters lie in their rows."""
        if self.weight is None or not self._rows or torch_module._has_any_global_hook():
            return False
        if self.weight.is_meta:
            return self._is_tied_on_meta()
        return self._is_same() and self._is_laid_out()

    def _is_same(self) -> bool:
        """Whether the parts and their parameters are the objects that were merged, and plain; compiles."""
        if nn.Linear.forward is not LINEAR_FORWARD:
            return False
        for modules, name, module in self._slots:
            if modules.get(name) is not module:
                return False
        for path, name, value in self.settings:
            found = getattr(self._part(path) if path else self._owner(), name, None)
            if type(found) is not type(value) or found != value:
                return False
        for part, weight, bias, *_ in self._rows:
            if not is_plain(part):
                return False
            parameters = part._parameters
            if parameters.get("weight") is not weight or parameters.get("bias") is not bias:
                return False
        return True

    def _is_laid_out(self) -> bool:
        """Whether each parameter that was merged still lies in its rows."""
        if self.weight is None or self.weight.is_meta:
            return False
        weights = self.weight.data_ptr()
        biases = self.bias.data_ptr() if self.bias is not None else 0
        for _, weight, bias, shape, weight_offset, bias_offset in self._rows:
            if weight.data_ptr() != weights + weight_offset or weight.shape != shape:
                return False
            if weight.dtype is not self.weight.dtype or not weight.is_contiguous():
                return False
            if bias is not None and (
                bias.data_ptr() != biases + bias_offset
                or bias.shape != shape[:1]
                or bias.dtype is not weight.dtype
            ):
                return False
        return True

    def _is_tied_on_meta(self) -> bool:
        """Before weights are loaded: laid out in form only. Laid out for real at the first call after."""
        on_meta = [is_plain(part) and part.weight.is_meta for part in self._present()]
        if all(on_meta):
            return self._is_same()
        return not any(on_meta) and self.tie()

    # -- laying out ---------------------------------------------------------------------------

    def tie(self) -> bool:
        """Lay the parts' weights out as rows of one new tensor.

        False where they do not fit into one (their kinds, dtypes, devices or widths differ, a part
        is no plain linear, hooked or sharded); then each has a storage of its own. At its peak it holds
        the parts once more than before.
        """
        parts = self._present()
        if not all(is_plain(part) and not is_sharded(part) for part in parts):
            self.untie()
            return False
        weights = [part._parameters.get("weight") for part in parts]
        biases = [part._parameters.get("bias") for part in parts]
        if not _fit(weights, biases):
            self.untie()
            return False
        self.weight = self.bias = None
        self._rows = ()
        sizes = tuple(weight.shape[0] for weight in weights)
        rows: list[Any] = []
        start = 0
        # Tensors of inference mode could not be trained later.
        with torch.inference_mode(False), torch.no_grad():
            like = {"dtype": weights[0].dtype, "device": weights[0].device}
            whole = torch.empty(sum(sizes), weights[0].shape[1], **like)
            bias = torch.zeros(sum(sizes), **like) if any(own is not None for own in biases) else None
            self.weight, self.bias = whole, bias  # known from here on, so that `untie` can undo half of it
            for part, own_weight, own_bias, size in zip(parts, weights, biases, sizes, strict=True):
                _move(own_weight, whole[start : start + size])
                if own_bias is not None and bias is not None:
                    _move(own_bias, bias[start : start + size])
                width = whole.element_size()
                offsets = start * whole.shape[1] * width, start * width
                rows.append((part, own_weight, own_bias, own_weight.shape, *offsets))
                start += size
        self.sizes, self._rows, self._slots = sizes, tuple(rows), self._find_slots()
        return True

    def _find_slots(self) -> tuple[Any, ...]:
        found: dict[tuple[str, ...], Any] = {}
        for path in self.paths:
            modules, names = self._root, path.split(".")
            for depth, name in enumerate(names, 1):
                module = modules[name]
                found[tuple(names[:depth])] = (modules, name, module)
                modules = module._modules
        return tuple(found.values())

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether `tensor` lies in the merged storage."""
        shared = {_storage(whole) for whole in (self.weight, self.bias) if whole is not None}
        return _storage(tensor) in shared - {None}

    def untie(self) -> None:
        """Give each part's parameters a storage of their own again, with their present values."""
        # A part that was replaced or wrapped meanwhile lives on elsewhere, with its rows: both count.
        parameters = [parameter for row in self._rows for parameter in row[1:3]]
        for part in self._present():
            if isinstance(part, nn.Module):
                parameters += part._parameters.values()
        with torch.inference_mode(False), torch.no_grad():
            for parameter in parameters:
                if parameter is not None and self.holds(parameter):
                    parameter.data = parameter.data.clone(memory_format=torch.contiguous_format)
        self.weight = self.bias = None
        self._rows = ()

    def settle(self) -> None:
        """After the parameters were moved or replaced: lay them out anew, unless they lie in their rows."""
        self.pending = False
        owns = [(row[1], row[2]) for row in self._rows]
        parts = self._present()
        present = [(p._parameters.get("weight"), p._parameters.get("bias")) for p in parts if is_plain(p)]
        same = len(owns) == len(present) and all(
            mine is now for mine, now in zip(sum(owns, ()), sum(present, ()), strict=True)
        )
        if not same or not self._is_laid_out():
            self.tie()

    def _let_go(self) -> None:
        """Drop the merged tensor where none of its parameters is left: no weight is held beside others.

        Quantizing replaces every parameter, as sharding does.
        """
        weak = [(row[0], _weakly(row[1]), _weakly(row[2]), *row[3:]) for row in self._rows]
        self._rows = ()
        rows = tuple((row[0], row[1](), row[2](), *row[3:]) for row in weak)
        if all(own is None or own is GONE for row in rows for own in row[1:3]):
            self.weight = self.bias = None
            self._slots = ()
        else:
            self._rows = rows

    # A copy never holds the merged tensor: the class of a fused module lays its own parts out again.
    def __deepcopy__(self, memo: dict[int, Any]) -> "MergedLinear":
        made = object.__new__(type(self))
        memo[id(self)] = made
        made.paths, made.order = self.paths, self.order
        made.copied, made.settings = self.copied, self.settings
        made._blank()
        return made

    def __repr__(self) -> str:
        return f"MergedLinear({', '.join(self.paths)})"


def is_plain(part: Any) -> bool:
    """Whether a module is exactly a linear: no subclass, hook, or forward of its own."""
    return type(part) is nn.Linear and is_untouched(part)


def _setting(owner: nn.Module, path: str, name: str) -> Any:
    return getattr(owner.get_submodule(path), name, None)


def is_untouched(module: nn.Module) -> bool:
    """Whether no hook and no forward of the instance's own comes between a call and its class's forward."""
    return not (
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
        or "forward" in module.__dict__
    )


def is_sharded(module: nn.Module) -> bool:
    """Whether each process holds a share of its parameters: as DTensors, or whole for now, lent by FSDP."""
    for own in module._parameters.values():
        if type(own).__module__.startswith("torch.distributed") or hasattr(own, "_fsdp_flattened"):
            return True
    hooks = (getattr(hook, "__module__", None) or "" for hook in module._state_dict_pre_hooks.values())
    return any(home.startswith("torch.distributed.fsdp") for home in hooks)


def _weakly(tensor: torch.Tensor | None) -> Callable[[], torch.Tensor | None]:
    """What gives `tensor` while somebody has it, then `GONE`; None for None, as a bias may be."""
    if tensor is None:
        return lambda: None
    found = weakref.ref(tensor)

    def again() -> torch.Tensor:
        left = found()
        return GONE if left is None else left

    return again


def _is_transformed() -> bool:
    """Inside of `torch.func` transforms, forward-mode AD and `torch.jit.trace`.

    There the functions below have no rules, or go unseen.
    """
    return (
        torch._C._are_functorch_transforms_active()
        or forward_ad._current_level >= 0
        or torch._C._is_tracing()
    )


def _real_check(storage: MergedLinear) -> Callable[[], bool]:
    """`storage.is_tied()`, evaluated for real while `torch.compile` traces: addresses cannot be traced."""
    found = weakref.ref(storage)

    def check() -> bool:
        storage = found()
        if storage is None:
            return False
        if storage.pending:
            storage.settle()
        return storage.is_tied()

    # What torch.compiler.assume_constant_result does, which would import all of Dynamo here.
    check._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return check


def alone(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as a storage of its own; `tensor` itself where that cannot be (on meta, say)."""
    try:
        return torch.from_dlpack(tensor)
    except (BufferError, RuntimeError, TypeError):
        return tensor


def _storage(tensor: torch.Tensor) -> int | None:
    try:
        return tensor.untyped_storage()._cdata
    except Exception:  # a subclass without one storage
        return None


def _fit(weights: list[Any], biases: list[Any]) -> bool:
    """Plain floating parameters of one dtype, device and input width."""
    tensors = [*weights, *(bias for bias in biases if bias is not None)]
    return (
        all(type(tensor) is nn.Parameter and tensor.layout is torch.strided for tensor in tensors)
        and not any(tensor.is_inference() for tensor in tensors)
        and len({(tensor.dtype, tensor.device) for tensor in tensors}) == 1
        and tensors[0].dtype.is_floating_point
        and all(weight.dim() == 2 for weight in weights)
        and len({weight.shape[1] for weight in weights}) == 1
        and all(b is None or b.shape == w.shape[:1] for w, b in zip(weights, biases, strict=True))
    )


def _move(parameter: nn.Parameter, rows: torch.Tensor) -> None:
    rows.copy_(parameter)
    parameter.data = rows
