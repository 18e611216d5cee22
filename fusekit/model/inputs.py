"""What `verify` calls a model with: keyword arguments that were checked, or random ones."""

import inspect
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn as nn

from fusekit.errors import FusekitError
from fusekit.forward import original_class
from fusekit.model.runs import SEED
from fusekit.tracing.inputs import CONVENTIONS, LEFT_OUT, OFTEN_NEEDED, Guess, Sizes, Wanted


def checked_inputs(model: nn.Module, inputs: Any) -> dict[str, Any]:
    """The keyword arguments as a dict; raises `FusekitError` for what the forward cannot be called with."""
    cls = original_class(model)
    signature = _signature(cls)
    if not isinstance(inputs, Mapping) or not all(isinstance(name, str) for name in inputs):
        first = next(iter(signature.parameters), "x") if signature else "x"
        raise FusekitError(
            f"verify() takes a dict of the forward's keyword arguments, not a {type(inputs).__name__}: "
            f"pass verify(inputs={{{first!r}: ...}})"
        )
    given = dict(inputs)
    if signature is None or any(p.kind is p.VAR_KEYWORD for p in signature.parameters.values()):
        return given
    taken = ", ".join(signature.parameters)
    for name in given:
        if name not in signature.parameters:
            raise FusekitError(f"inputs: {cls.__name__}.forward takes no {name!r}; it takes {taken}")
    try:
        signature.bind(**given)
    except TypeError as error:
        raise FusekitError(f"inputs: {cls.__name__}.forward: {error}; it takes {taken}") from None
    return given


def _signature(cls: type) -> inspect.Signature | None:
    """Of the forward, without self; None where it does not say."""
    try:
        found = inspect.signature(cls.forward)  # type: ignore[attr-defined]
    except (AttributeError, TypeError, ValueError):
        return None
    return found.replace(parameters=list(found.parameters.values())[1:])


BATCH = 2
OF_A_KIND = frozenset({"input_ids", "pixel_values", "input_features", "input_values"})


def made_up_inputs(model: nn.Module, tokens: int) -> list[dict[str, Any]]:
    """Random keyword arguments, `tokens` long, by the meaning that Transformers gives to names.

    The first take everything that the forward declares of text, images and sound, the last only
    what it cannot do without: some models want both, others either. None where a required
    argument has a name that says nothing.
    """
    parameters = _parameters(model)
    required = {name for name, parameter in parameters.items() if parameter.default is parameter.empty}
    if not required <= CONVENTIONS.keys() | LEFT_OUT:
        return []
    main = getattr(model, "main_input_name", None)
    least = required | {name for name in parameters if name == main and name in CONVENTIONS}
    if not least:
        return []
    if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        least |= {"decoder_input_ids"} & parameters.keys()
    most = least | ((OF_A_KIND | OFTEN_NEEDED - {"decoder_input_ids"}) & parameters.keys())
    return [
        _random(model, parameters, names, tokens) for names in ([most, least] if most > least else [least])
    ]


def missing_inputs(model: nn.Module) -> str:
    """How to pass the inputs that cannot be made up: `verify(inputs={"x": ...})`."""
    parameters = _parameters(model)
    names = [name for name, parameter in parameters.items() if parameter.default is parameter.empty]
    names = names or list(parameters)[:1]
    return "verify(inputs={" + (", ".join(f'"{name}": ...' for name in names) or "...") + "})"


def describe(inputs: Mapping[str, Any]) -> str:
    """`input_ids [2, 16], pixel_values [2, 3, 8, 8]`."""
    found = []
    for name, value in inputs.items():
        first = value[0] if isinstance(value, tuple) else value
        if isinstance(first, torch.Tensor):
            found.append(f"{name} {list(first.shape)}")
    return ", ".join(found)


def _parameters(model: nn.Module) -> dict[str, inspect.Parameter]:
    """Of the forward, without self, `*args` and `**kwargs`."""
    signature = _signature(original_class(model))
    if signature is None:
        return {}
    star = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return {name: one for name, one in signature.parameters.items() if one.kind not in star}


def _random(
    model: nn.Module, parameters: Mapping[str, inspect.Parameter], names: set[str], tokens: int
) -> dict[str, Any]:
    """Random values for `names`, in the order in which the forward declares them."""
    sizes = Sizes(model, BATCH, tokens, Guess())
    generator = torch.Generator().manual_seed(SEED)
    given = {
        name: None if name in LEFT_OUT else _values(CONVENTIONS[name](sizes), sizes.dtype, generator)
        for name in parameters
        if name in names
    }
    if "use_cache" in parameters:
        given["use_cache"] = False
    return given


def _values(wanted: Wanted, dtype: torch.dtype, generator: torch.Generator) -> Any:
    made = [_value(wanted, dtype, generator) for _ in range(wanted.number)]
    return tuple(made) if wanted.count else made[0]


def _value(wanted: Wanted, dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    if wanted.dtype is None:
        return torch.randn(wanted.shape, generator=generator).to(dtype)
    if wanted.below is None:
        return torch.arange(wanted.shape[-1], dtype=wanted.dtype).expand(wanted.shape).clone()
    return torch.randint(wanted.below, wanted.shape, generator=generator, dtype=wanted.dtype)
