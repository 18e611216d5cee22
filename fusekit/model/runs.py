"""Running one version of a model: what it gave, and what its modules were called with."""

from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn as nn

from fusekit.tracing.recorder import tensors_in

SEED = 20
Gradients = dict[str, torch.Tensor]


@dataclass
class Run:
    """What one version of a model gave: floating outputs, gradients by parameter, layers by name, logits."""

    outputs: list[torch.Tensor] = field(default_factory=list)
    gradients: Gradients = field(default_factory=dict)
    layers: dict[str, torch.Tensor] = field(default_factory=dict)
    logits: torch.Tensor | None = None


def run(model: nn.Module, inputs: dict[str, Any], layers: list[str], gradients: bool) -> Run:
    """One call of `model`, the outputs of `layers` kept, and backward where `gradients` are wanted."""
    found = Run()
    hooks = [model.get_submodule(name).register_forward_hook(_keep(found.layers, name)) for name in layers]
    try:
        with torch.set_grad_enabled(gradients):
            result = model(**inputs)
    finally:
        for hook in hooks:
            hook.remove()
    tensors = floating(result)
    found.outputs = [tensor.detach().clone() for tensor in tensors]
    logits = getattr(result, "logits", None)
    found.logits = logits.detach() if isinstance(logits, torch.Tensor) else None
    if gradients:
        found.gradients = _backward(model, tensors)
    return found


def _backward(model: nn.Module, tensors: list[torch.Tensor]) -> Gradients:
    """Gradients of a fixed random projection of the outputs."""
    generator = torch.Generator().manual_seed(SEED)
    total: Any = 0
    for tensor in tensors:
        if tensor.requires_grad:
            weights = torch.randn(tensor.shape, generator=generator, dtype=torch.float64)
            total = total + (tensor * weights.to(tensor)).sum()
    if isinstance(total, torch.Tensor):
        total.backward()
    found: Gradients = {}
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            found[name] = parameter.grad.detach().clone()
        parameter.grad = None
    return found


def generated(model: Any, inputs: dict[str, Any], tokens: int) -> torch.Tensor | None:
    """`tokens` more tokens, greedy, shape [batch, length + tokens]; None for a model that generates none."""
    if not generates(model) or "input_ids" not in inputs:
        return None
    ids = inputs["input_ids"]
    mask = inputs.get("attention_mask", torch.ones_like(ids))
    with torch.no_grad():
        return model.generate(
            input_ids=ids, attention_mask=mask, max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False
        )


def generates(model: nn.Module) -> bool:
    """Whether Transformers' `generate` works on the model."""
    ask = getattr(model, "can_generate", None)
    return callable(ask) and bool(ask()) and hasattr(model, "generate")


def captured(
    model: nn.Module, names: Collection[str], inputs: dict[str, Any]
) -> dict[str, tuple[tuple[Any, ...], dict[str, Any]]]:
    """(args, kwargs) that each module of `names` is called with first, when `model` is called."""
    found: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {}

    def keep(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, kwargs: Any) -> None:
            if name not in found:
                found[name] = (_detached(args), _detached(kwargs))

        return hook

    hooks = [
        model.get_submodule(name).register_forward_pre_hook(keep(name), with_kwargs=True) for name in names
    ]
    try:
        with torch.no_grad():
            model(**inputs)
    finally:
        for hook in hooks:
            hook.remove()
    return found


def _keep(kept: dict[str, torch.Tensor], name: str) -> Callable[..., None]:
    def hook(module: nn.Module, args: Any, result: Any) -> None:
        tensors = floating(result)
        if tensors:
            kept.setdefault(name, tensors[0].detach().clone())

    return hook


def floating(value: Any) -> list[torch.Tensor]:
    """The floating tensors in what a module returned."""
    return [tensor for tensor in tensors_in(value) if tensor.is_floating_point()]


def with_tensors(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """`value` with `change` made to every tensor in its tuples, lists and dicts."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if type(value) in (tuple, list):
        return type(value)(with_tensors(item, change) for item in value)
    if type(value) is dict:
        return {name: with_tensors(item, change) for name, item in value.items()}
    return value


def _detached(value: Any) -> Any:
    return with_tensors(value, lambda tensor: tensor.detach().clone())


def as_double(value: Any) -> Any:
    """The same inputs in float64."""
    return with_tensors(value, lambda tensor: tensor.double() if tensor.is_floating_point() else tensor)
