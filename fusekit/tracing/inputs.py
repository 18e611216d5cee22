"""Made-up inputs for a forward that is traced without any: meta tensors of likely shapes."""

import contextlib
import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch.nn as nn

from fusekit.tracing.skeleton import Skeleton

Inputs = tuple[tuple[Any, ...], dict[str, Any]]  # what a forward is called with: args, kwargs

BATCH, LENGTH = 2, 7  # unlike each other and unlike most widths, so that shapes tell them apart


def reference_weight(module: nn.Module) -> torch.Tensor | None:
    """A weight whose last size is the module's hidden size: it sizes a made-up input.

    That of the first linear in the tree, else the first parameter of one or two dimensions, else None.
    """
    for child in module.modules():
        weight = getattr(child, "weight", None) if isinstance(child, nn.Linear) else None
        if type(child).__name__ == "Conv1D" and isinstance(child.__dict__.get("nx"), int):
            weight = child.weight.T  # Transformers' linear with its weight laid out the other way
        if isinstance(weight, torch.Tensor):
            return weight
    for parameter in module.parameters():
        if parameter.dim() in (1, 2):
            return parameter
    return None


def inputs_of_modules(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Inputs]:
    """What each module of `model` is first called with, when `model` is called with these inputs.

    Found by running a meta skeleton, so values are lost: only shapes and dtypes count. Where the
    model cannot be run so to its end, modules that it did not reach are missing.
    """
    found: dict[str, Inputs] = {}

    def call(module: nn.Module, path: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        found.setdefault(path, (args, kwargs))
        return module.forward(*args, **kwargs)

    skeleton = Skeleton(model, call)
    given: Inputs = skeleton.value((args, kwargs))
    with torch.no_grad(), torch.device("meta"), contextlib.suppress(Exception):
        skeleton.module(*given[0], **given[1])
    return found


def made_up_inputs(
    module: nn.Module, function: Callable[..., Any], conventional: bool
) -> tuple[dict[str, Any], list[str]]:
    """Values for the parameters of `function` that need one, and a sentence about each.

    A required parameter (the first, if none is) gets a float tensor [batch, length, hidden], unless
    its name is one to which Transformers always gives another meaning. With `conventional`,
    optional ones that forwards need all the same are made up too.
    """
    weight = reference_weight(module)
    hidden = weight.shape[-1] if weight is not None else 16
    dtype = weight.dtype if weight is not None and weight.dtype.is_floating_point else torch.float32
    values: dict[str, Any] = {}
    said: list[str] = []
    parameters = [
        parameter
        for parameter in list(inspect.signature(function).parameters.values())[1:]
        if parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    ]
    needed = {parameter.name for parameter in parameters if parameter.default is parameter.empty}
    # A forward that declares every input optional still works on one: its first.
    needed = needed or {parameter.name for parameter in parameters[:1]}
    for parameter in parameters:
        required = parameter.name in needed
        if not required and not (conventional and parameter.name in OFTEN_NEEDED):
            said.append(f"{parameter.name} is left out: {parameter.default!r}")
            continue
        make = _ids if isinstance(module, nn.Embedding) else CONVENTIONS.get(parameter.name, _states)
        value = make(module, hidden, dtype)
        values[parameter.name] = value
        said.append(f"{parameter.name} is {_describe(value)}")
    return values, said


def _states(module: nn.Module, hidden: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(BATCH, LENGTH, hidden, dtype=dtype, device="meta")


def _ids(module: nn.Module, hidden: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(BATCH, LENGTH, dtype=torch.long, device="meta")


def _none(module: nn.Module, hidden: int, dtype: torch.dtype) -> None:
    return None


def _rotary(module: nn.Module, hidden: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    widths = (child.__dict__.get("head_dim") for child in module.modules())
    width = next((width for width in widths if isinstance(width, int)), hidden)
    cos, sin = (torch.empty(BATCH, LENGTH, width, dtype=dtype, device="meta") for _ in range(2))
    return cos, sin


CONVENTIONS: dict[str, Callable[[nn.Module, int, torch.dtype], Any]] = {
    "input_ids": _ids,
    "position_ids": _ids,
    "attention_mask": _none,
    "position_embeddings": _rotary,
}
OFTEN_NEEDED = {"position_embeddings"}  # declared optional by forwards that unpack them all the same


def _describe(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        dtype = str(value.dtype).removeprefix("torch.")
        return f"a made-up {dtype} tensor {list(value.shape)}"
    if isinstance(value, tuple):
        return f"{len(value)} of these: {_describe(value[0])}"
    return repr(value)
