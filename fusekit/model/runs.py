"""Running one version of a model: what it gave, and what its modules were called with.

What fails is kept as a line of text and not raised: whose fault it is, the caller knows.
"""

import copy
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn as nn

from fusekit.model.choices import Choices, Choosing
from fusekit.tracing.recorder import tensors_in

SEED = 20
Gradients = dict[str, torch.Tensor]
Call = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass
class Run:
    """What one version of a model gave: floating outputs, gradients by parameter, layers by name, logits,
    and what it chose among.

    `failed` says why there is nothing of it, `no_gradients` why there are no gradients only.
    """

    outputs: list[torch.Tensor] = field(default_factory=list)
    gradients: Gradients = field(default_factory=dict)
    layers: dict[str, torch.Tensor] = field(default_factory=dict)
    logits: torch.Tensor | None = None
    choices: Choices = field(default_factory=Choices)
    failed: str = ""
    no_gradients: str = ""


@dataclass
class Text:
    """Prompt and generated tokens, shape [batch, length], or why there are none."""

    ids: torch.Tensor | None = None
    failed: str = ""


def said(error: Exception) -> str:
    """Type and first line of an error, for a report."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0].strip()}" if lines else type(error).__name__


def run(
    model: nn.Module,
    inputs: dict[str, Any],
    layers: list[str],
    gradients: bool,
    followed: Choices | None = None,
) -> Run:
    """One call of `model`, the outputs of `layers` kept, and backward where `gradients` are wanted.

    It chooses as `followed` did, where that is given.
    """
    no_gradients = ""
    if gradients:
        try:
            with torch.enable_grad():
                found, tensors = _forward(model, inputs, layers, followed)
        except Exception as error:  # a forward that writes into a parameter runs without gradients only
            no_gradients = said(error)
        else:
            try:
                found.gradients = _backward(model, tensors)
            except Exception as error:
                found.no_gradients = said(error)
            return found
    try:
        with torch.no_grad():
            found, _ = _forward(model, inputs, layers, followed)
    except Exception as error:
        return Run(failed=said(error))
    found.no_gradients = no_gradients
    return found


def _forward(
    model: nn.Module, inputs: dict[str, Any], layers: list[str], followed: Choices | None
) -> tuple[Run, list[torch.Tensor]]:
    """The run without its gradients, and the tensors to call backward on."""
    found = Run()
    hooks = [model.get_submodule(name).register_forward_hook(_keep(found.layers, name)) for name in layers]
    try:
        with Choosing(followed) as choosing:
            result = model(**copy.deepcopy(inputs))  # a cache among them would grow from run to run
    finally:
        for hook in hooks:
            hook.remove()
    found.choices = choosing.found
    tensors = floating(result)
    found.outputs = [tensor.detach().clone() for tensor in tensors]
    logits = getattr(result, "logits", None)
    found.logits = logits.detach() if isinstance(logits, torch.Tensor) else None
    return found, tensors


def _backward(model: nn.Module, tensors: list[torch.Tensor]) -> Gradients:
    """Gradients of a fixed random projection of the outputs."""
    generator = torch.Generator().manual_seed(SEED)
    total: Any = 0
    for tensor in tensors:
        if tensor.requires_grad:
            weights = torch.randn(tensor.shape, generator=generator, dtype=torch.float64)
            total = total + (tensor * weights.to(tensor)).sum()
    found: Gradients = {}
    try:
        if isinstance(total, torch.Tensor):
            total.backward()
        for name, parameter in model.named_parameters():
            if parameter.grad is not None:
                found[name] = parameter.grad.detach().clone()
    finally:
        model.zero_grad(set_to_none=True)
    return found


# -- generation -------------------------------------------------------------------------------


def generated(model: Any, inputs: dict[str, Any], tokens: int) -> Text:
    """`tokens` more tokens than the prompt has, greedy."""
    prompt = prompt_of(model, inputs)
    ids = prompt.get("input_ids")
    if ids is not None:
        prompt.setdefault("attention_mask", torch.ones_like(ids))
    try:
        with torch.no_grad():
            made = model.generate(**prompt, max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False)
    except Exception as error:
        return Text(failed=said(error))
    if not isinstance(made, torch.Tensor):
        return Text(failed=f"it gives a {type(made).__name__}")
    start = getattr(getattr(model, "generation_config", None), "decoder_start_token_id", None)
    if made.shape[1] == tokens and ids is None and isinstance(start, int):
        made = nn.functional.pad(made, (1, 0), value=start)  # one that leaves its start out
    return Text(made)


def prompt_of(model: nn.Module, inputs: dict[str, Any]) -> dict[str, Any]:
    """Those of `inputs` that text is generated from; empty where the main one is not among them.

    A model with an encoder starts its text with a token of its own, not with `decoder_input_ids`.
    """
    main = getattr(model, "main_input_name", "input_ids")
    if inputs.get(main) is None:
        return {}
    names = (main, "attention_mask", "pixel_values", "input_features")
    return {name: inputs[name] for name in names if inputs.get(name) is not None}


def next_logits(model: Any, inputs: dict[str, Any], row: int, before: torch.Tensor) -> torch.Tensor:
    """Logits of the token after `before`, the tokens of sequence `row` so far, shape [vocabulary]."""
    given = {
        name: value[row : row + 1] if isinstance(value, torch.Tensor) else value
        for name, value in prompt_of(model, inputs).items()
    }
    mask = given.get("attention_mask")
    if getattr(model.config, "is_encoder_decoder", False):
        given["decoder_input_ids"] = before[None]
    else:
        given["input_ids"] = before[None]
        if mask is not None:
            more = before.shape[0] - mask.shape[1]
            given["attention_mask"] = nn.functional.pad(mask, (0, more), value=1)
    with torch.no_grad():
        return model(**given).logits[0, -1]


def generates(model: nn.Module) -> bool:
    """Whether Transformers' `generate` works on the model."""
    ask = getattr(model, "can_generate", None)
    return callable(ask) and bool(ask()) and hasattr(model, "generate")


# -- calls of modules -------------------------------------------------------------------------


def captured(model: nn.Module, names: Collection[str], inputs: dict[str, Any]) -> dict[str, Call]:
    """(args, kwargs) that each module of `names` is called with first, when `model` is called."""
    found: dict[str, Call] = {}

    def keep(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, kwargs: Any) -> None:
            if name not in found:
                found[name] = copy.deepcopy((args, kwargs))

        return hook

    hooks = [
        model.get_submodule(name).register_forward_pre_hook(keep(name), with_kwargs=True) for name in names
    ]
    try:
        with torch.no_grad():
            model(**copy.deepcopy(inputs))
    finally:
        for hook in hooks:
            hook.remove()
    return found


def first_output(
    module: nn.Module, call: Call, followed: Choices | None = None
) -> tuple[torch.Tensor | None, Choices]:
    """The first floating tensor that a module returns, None where there is none, and what it chose."""
    args, kwargs = copy.deepcopy(call)
    with torch.no_grad(), Choosing(followed) as choosing:
        return next(iter(floating(module(*args, **kwargs))), None), choosing.found


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


def as_double(value: Any) -> Any:
    """The same inputs in float64."""
    return with_tensors(value, lambda tensor: tensor.double() if tensor.is_floating_point() else tensor)
