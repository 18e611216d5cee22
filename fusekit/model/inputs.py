"""What `verify` calls a model with: keyword arguments that were checked, or random tokens."""

import inspect
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn as nn

from fusekit.errors import FusekitError
from fusekit.forward import original_class
from fusekit.model.runs import SEED, generates


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


def made_up_inputs(model: nn.Module, tokens: int) -> dict[str, Any] | None:
    """Random `input_ids` of shape [2, tokens] for a causal language model, None for any other."""
    size = _vocabulary(model)
    if size is None:
        return None
    ids = torch.randint(size, (2, tokens), generator=torch.Generator().manual_seed(SEED))
    return {"input_ids": ids, "use_cache": False}


def _vocabulary(model: Any) -> int | None:
    config = getattr(model, "config", None)
    if config is None or not generates(model) or not hasattr(model, "get_input_embeddings"):
        return None
    if getattr(config, "is_encoder_decoder", False):
        return None
    embedding = model.get_input_embeddings()
    return getattr(embedding, "num_embeddings", None)
