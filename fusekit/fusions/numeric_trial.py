"""The original forward and a rewritten one side by side on random numbers."""

import contextlib
from collections.abc import Iterator
from types import FunctionType
from typing import Any

import torch
import torch.nn as nn

from fusekit.forward import compile_edited
from fusekit.fusions.match import Match, Refused
from fusekit.fusions.view import ForwardView
from fusekit.tracing.recorder import tensors_in
from fusekit.tracing.skeleton import Skeleton

TOLERANCE = 1e-6  # of the largest magnitude of the result
LARGEST = 2**28  # elements of all parameters together: 2 GB in float64
BLOCK = 1_000_003  # random numbers that larger tensors repeat; prime, so that no two rows are equal


def same_numbers(view: ForwardView, match: Match, tolerance: float) -> None:
    """Raises `Refused` unless the rewritten forward gives the original's numbers, within `tolerance`.

    Both run in float64 on a stand-in with random weights, biases and inputs of the trace's shapes; the
    model's own weights are not read, so a model on meta will do.
    """
    size = sum(parameter.numel() for parameter in view.module.parameters())
    if size > LARGEST:
        raise _untried(
            view, f"it has {size / 1e6:.0f} million parameters, too many to try it on random numbers"
        )
    original: FunctionType = view.source.chain[-1]
    rewritten = compile_edited(view.source, match.edits, dict(match.functions))[-1]
    wanted = _run(view, original)
    if isinstance(wanted, Exception):
        raise _untried(view, f"it does not run on random numbers ({type(wanted).__name__}: {wanted})")
    found = _run(view, rewritten)
    name = match.functions[0][0]
    if isinstance(found, Exception):
        raise Refused(
            "not-this-function", f"{name} fails on real numbers ({type(found).__name__}: {found})", match.line
        )
    for one, other in zip(wanted, found, strict=True):
        scale, error = _difference(one, other)
        if not error <= tolerance * scale:
            raise Refused(
                "not-this-function",
                f"{name} gives other numbers than what it replaces: on random ones the result is off by "
                f"{error:.2g} of {scale:.2g}, and {tolerance * scale:.1g} is allowed",
                match.line,
            )


def _untried(view: ForwardView, why: str) -> Refused:
    way_out = "plan a smaller one first, then register the fusion with tolerance=None and check with verify()"
    return Refused("not-this-function", f"{why}: {way_out}", view.source.tree.lineno)


def _difference(wanted: torch.Tensor, found: torch.Tensor) -> tuple[float, float]:
    """(largest magnitude of what is wanted, largest difference), NaN where only one of both has one."""
    wanted, found = wanted.double(), found.double()
    if not wanted.numel() or torch.equal(wanted, found):
        return 0.0, 0.0
    return wanted.abs().max().item(), (wanted - found).abs().max().item()


def _run(view: ForwardView, function: FunctionType) -> Any:
    """The tensors that `function` returns and leaves in its inputs, or the error that it raised."""
    with _own_random_numbers():
        stand_in = _stand_in(view.module)
        args, kwargs = _real(view.trace.inputs)
        try:
            with torch.no_grad():
                result = function(stand_in, *args, **kwargs)
        except Exception as error:
            return error
        return tensors_in((result, args, kwargs))


@contextlib.contextmanager
def _own_random_numbers() -> Iterator[None]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(20)
        yield


def _stand_in(module: nn.Module) -> nn.Module:
    """A copy of the module tree with random numbers for parameters."""

    def call(module: nn.Module, path: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return module.forward(*args, **kwargs)

    made = Skeleton(module, call).module
    for (_, original), (_, copy) in zip(module.named_modules(), made.named_modules(), strict=True):
        for kind in ("_parameters", "_buffers"):
            tensors = copy.__dict__[kind]
            for name, own in original.__dict__[kind].items():
                if own is None:
                    continue
                kept = kind == "_buffers" and not own.is_meta
                value = own.detach().clone() if kept else random_like(own, spread=own.dim() > 1)
                tensors[name] = value.double() if value.is_floating_point() else value
                if kind == "_parameters":
                    tensors[name] = nn.Parameter(tensors[name], requires_grad=False)
    return made


def random_like(tensor: torch.Tensor, spread: bool = False) -> torch.Tensor:
    """Random numbers of the shape of `tensor`: normal ones in float64, 0 and 1 for integers, True for bools.

    `spread`: divided by the root of the last size, so that a product with it keeps its magnitude.
    """
    shape, size = tuple(tensor.shape), tensor.numel()
    if tensor.dtype == torch.bool:
        return torch.ones(shape, dtype=torch.bool)
    if not tensor.dtype.is_floating_point:
        return torch.randint(0, 2, shape, dtype=tensor.dtype)
    block = torch.randn(min(size, BLOCK), dtype=torch.float64)
    values = block.repeat(-(-size // BLOCK))[:size].reshape(shape) if size else torch.empty(shape).double()
    return values / shape[-1] ** 0.5 if spread else values


def _real(value: Any) -> Any:
    """Nested inputs with random numbers for every tensor."""
    if isinstance(value, torch.Tensor):
        return random_like(value)
    if type(value) in (tuple, list):
        return type(value)(_real(item) for item in value)
    if type(value) is dict:
        return {name: _real(item) for name, item in value.items()}
    return value
