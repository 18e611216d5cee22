"""Which rounding order of `kernels.rms_norm` is the module's own: found by running both, bit for bit."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from fusekit.fusions.match import Refused
from fusekit.fusions.view import ForwardView
from fusekit.kernels import NORM_PROBES, NormForm, norm_forms, rms_norm
from fusekit.tracing.skeleton import Skeleton

ROWS = 48  # of the probe: enough for a rounding that differs to show
WIDTH = 16  # of its rows, where the weight says none: one of one element takes any


@dataclass(frozen=True)
class Norm:
    """What the graph of an RMSNorm says: where its parts stand, and the kind of inverse root."""

    input: fx.Node
    weight: fx.Node | None
    eps: float
    eps_node: fx.Node
    inverse: str
    offset: float


def no_norm(why: str, node: fx.Node | None) -> Refused:
    """The refusal of what looks like an RMSNorm and is none, because of `node`."""
    span = node.meta.get("span") if node is not None else None
    return Refused("not-this-function", f"it looks like an RMSNorm, but {why}", span.line if span else None)


def probe(view: ForwardView, norm: Norm) -> NormForm:
    """The first form of `kernels.rms_norm` that equals the module bit for bit, or `Refused`.

    The module's own forward runs on a stand-in with random weights, over rows of several scales
    (so that eps counts) in several pairs of dtypes; inputs must be left as they were.
    """
    generator = torch.Generator().manual_seed(20)
    given = norm.weight.meta["val"].shape[0] if norm.weight is not None else norm.input.meta["val"].shape[-1]
    width = given if given > 1 else WIDTH
    rows = torch.randn(ROWS, width, generator=generator, dtype=torch.float64)
    rows *= torch.logspace(-5, 2, ROWS, dtype=torch.float64)[:, None]
    weight = torch.randn(given, generator=generator, dtype=torch.float64) + 0.3
    samples = []
    for x_dtype, weight_dtype in NORM_PROBES:
        x, w = rows.to(x_dtype), weight.to(weight_dtype)
        samples.append((x, w, _run(view, norm, x, w)))
    for form in norm_forms(weight=norm.weight is not None, inverse=norm.inverse):  # type: ignore[arg-type]
        if form.offset == norm.offset and all(_equals(form, norm, *sample) for sample in samples):
            return form
    raise Refused(
        "not-this-function",
        "it looks like an RMSNorm, but no order of rounding gives its bits",
        view.source.tree.lineno,
    )


def _run(view: ForwardView, norm: Norm, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """What the module's own forward makes of `x` with this weight."""

    def call(module: torch.nn.Module, path: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return module.forward(*args, **kwargs)

    stand_in = Skeleton(view.module, call).module
    if norm.weight is not None:
        parameters = stand_in.__dict__["_parameters"]
        kind = parameters if norm.weight.target in parameters else stand_in.__dict__["_buffers"]
        if norm.weight.target not in kind:
            raise no_norm(f"its weight {norm.weight.target} is no parameter of its own", norm.weight)
        kind[str(norm.weight.target)] = weight
    given = x.clone()
    try:
        with torch.no_grad():
            result = view.source.function(stand_in, given)
    except Exception as error:
        raise no_norm(f"it fails on plain numbers ({type(error).__name__}: {error})", None) from None
    if not torch.equal(given, x):
        raise Refused("input-written", "it writes into its input", view.source.tree.lineno)
    return result


def _equals(form: NormForm, norm: Norm, x: torch.Tensor, weight: torch.Tensor, wanted: torch.Tensor) -> bool:
    own = weight if norm.weight is not None else None
    with torch.no_grad():
        result = rms_norm(x, own, norm.eps, **form.keywords())  # type: ignore[arg-type]
    return result.dtype == wanted.dtype and torch.equal(result, wanted)
