"""Which rounding order of a norm's kernel is the module's own: found by running both, bit for bit."""

import itertools
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch

from fusekit.fusions.match import Refused
from fusekit.fusions.norm_graph import Norm, no_norm
from fusekit.fusions.view import ForwardView
from fusekit.kernels import (
    NORM_PROBES,
    GatedNormForm,
    NormForm,
    gated_norm_forms,
    gated_rms_norm,
    norm_forms,
    rms_norm,
)
from fusekit.tracing.skeleton import Skeleton

Form = TypeVar("Form")
NUMBERS = 3072  # of the probe: enough for a rounding that differs to show
WIDTH = 16  # of its rows, where the weight says none: one of one element takes any
NARROW = 64  # of rows and weight, where the module has more and takes less
DTYPES = (torch.bfloat16, torch.float32, torch.float64, torch.float16)
LEADING = ((-1,), (2, -1), (2, 2, -1))  # dimensions of its rows, in the last confirmation
SWAPPED = (2, 3, -1)  # the same for rows whose first two dimensions lie in memory in another order


@dataclass(frozen=True)
class _Sample:
    """What a module is tried on: an input, its weight and gate, and what its own forward makes of them."""

    x: torch.Tensor
    weight: torch.Tensor
    gate: torch.Tensor | None
    wanted: torch.Tensor


def probe(view: ForwardView, norm: Norm, checks_width: bool) -> NormForm:
    """The first form of `kernels.rms_norm` that equals the module bit for bit, or `Refused`.

    The module's own forward runs on a stand-in with random weights, over rows of several scales
    (so that eps counts) in several pairs of dtypes; inputs must be left as they were. The form found
    must then hold for every pair of floating dtypes, and for inputs of other ranks.
    """
    weighted = norm.weight is not None
    listed = norm_forms(weight=weighted, inverse=norm.inverse)  # type: ignore[arg-type]
    forms = (replace(form, offset=norm.offset) for form in listed if bool(form.offset) == bool(norm.offset))
    if norm.inverse is None:  # torch's own
        forms = (form for form in forms if (form.compute_dtype, form.inverse) == ("opmath", "rsqrt"))

    def run(form: NormForm, sample: _Sample) -> torch.Tensor:
        weight = sample.weight if weighted else None
        return rms_norm(sample.x, weight, norm.eps, **form.keywords())  # type: ignore[arg-type]

    return _first(view, norm, forms, run, checks_width)


def probe_gated(view: ForwardView, norm: Norm, act: str, checks_width: bool) -> GatedNormForm:
    """The first form of `kernels.gated_rms_norm` that equals the module bit for bit, or `Refused`."""
    weighted = norm.weight is not None
    listed = gated_norm_forms(
        gate_first=norm.gate_first,
        weight=weighted,
        inverse=norm.inverse,  # type: ignore[arg-type]
    )
    forms = (
        replace(form, norm=replace(form.norm, offset=norm.offset))
        for form in listed
        if bool(form.norm.offset) == bool(norm.offset)
    )
    eps = norm.eps
    assert eps is not None

    def run(form: GatedNormForm, sample: _Sample) -> torch.Tensor:
        weight, gate = sample.weight if weighted else None, sample.gate
        assert gate is not None
        size = norm.group_size or None
        return gated_rms_norm(sample.x, gate, weight, eps, act=act, group_size=size, **form.keywords())  # type: ignore[arg-type]

    return _first(view, norm, forms, run, checks_width)


def _first(
    view: ForwardView,
    norm: Norm,
    forms: Iterator[Form],
    run: Callable[[Form, _Sample], torch.Tensor],
    checks_width: bool,
) -> Form:
    samples = list(_samples(view, norm, NORM_PROBES, (-1,), checks_width))
    more: list[_Sample] = []
    unlike = "no order of rounding gives its bits"
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch's own warns of two dtypes
        for form in forms:
            if all(_equal(run(form, sample), sample.wanted) for sample in samples):
                more = more or list(_more_samples(view, norm, checks_width))
                found = next(
                    (why for sample in more if (why := _unlike(run(form, sample), sample)) is not None), None
                )
                if found is None:
                    return form
                unlike = found
    raise Refused("not-this-function", f"it looks like an RMSNorm, but {unlike}", view.source.tree.lineno)


def _more_samples(view: ForwardView, norm: Norm, checks_width: bool) -> Iterator[_Sample]:
    """Every pair of dtypes, other ranks, and rows that are not contiguous."""
    every = tuple(itertools.product(DTYPES, DTYPES))
    yield from _samples(view, norm, every, LEADING[0], checks_width)
    for leading in LEADING[1:]:
        yield from _samples(view, norm, every[:1], leading, checks_width)
    yield from _samples(view, norm, NORM_PROBES, SWAPPED, checks_width)


def _unlike(got: torch.Tensor, sample: _Sample) -> str | None:
    """What tells the result of a form from the module's own, None where nothing does."""
    if not _equal(got, sample.wanted):
        what = f"{sample.x.dtype} {list(sample.x.shape)} and a weight of {sample.weight.dtype}"
        return f"no order of rounding gives its bits for every dtype: not for an input of {what}"
    if got.stride() != sample.wanted.stride():
        return "for an input that is not contiguous it lays its result out otherwise"
    return None


def _samples(
    view: ForwardView,
    norm: Norm,
    dtypes: tuple[tuple[torch.dtype, torch.dtype], ...],
    shape: tuple[int, ...],
    checks_width: bool,
) -> Iterator[_Sample]:
    generator = torch.Generator().manual_seed(20)
    given = norm.weight.meta["val"].shape[0] if norm.weight is not None else norm.input.meta["val"].shape[-1]
    width = given if given > 1 else WIDTH
    if norm.inverse is not None and not checks_width:
        size = norm.group_size or 1
        width = min(width, size * max(2, NARROW // size))
    count = 12 * max(1, NUMBERS // width // 12)
    rows = torch.randn(count, width, generator=generator, dtype=torch.float64)
    rows *= torch.logspace(-5, 2, count, dtype=torch.float64)[:, None]
    weight = torch.randn(min(given, width), generator=generator, dtype=torch.float64) + 0.3
    gates = torch.randn(count, width, generator=generator, dtype=torch.float64) * 2
    tried = set()
    for x_dtype, weight_dtype in dtypes:
        for gate_dtype in (x_dtype, torch.float32, torch.float64) if norm.gate is not None else (x_dtype,):
            key = x_dtype, weight_dtype if norm.weight is not None else None, gate_dtype
            if key in tried:
                continue
            tried.add(key)
            x = rows.to(x_dtype).reshape(*shape, width)
            gate = gates.to(gate_dtype).reshape(*shape, width) if norm.gate is not None else None
            if shape is SWAPPED:
                x = x.transpose(0, 1)
                gate = gate.transpose(0, 1) if gate is not None else None
            w = weight.to(weight_dtype)
            yield _Sample(x, w, gate, _run(view, norm, x, w, gate))


def _run(
    view: ForwardView, norm: Norm, x: torch.Tensor, weight: torch.Tensor, gate: torch.Tensor | None
) -> torch.Tensor:
    """What the module's own forward makes of `x` with this weight and gate."""

    def call(module: torch.nn.Module, path: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return module.forward(*args, **kwargs)

    stand_in = Skeleton(view.module, call).module
    if norm.weight is not None:
        parameters = stand_in.__dict__["_parameters"]
        kind = parameters if norm.weight.target in parameters else stand_in.__dict__["_buffers"]
        if norm.weight.target not in kind:
            raise no_norm(f"its weight {norm.weight.target} is no parameter of its own", norm.weight)
        kind[str(norm.weight.target)] = weight
    given = {str(norm.input.target): x.clone()}
    if norm.gate is not None and gate is not None:
        given[str(norm.gate.target)] = gate.clone()
    kept = {name: value.clone() for name, value in given.items()}
    args, kwargs = _arguments(view, given)
    try:
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            result = view.source.function(stand_in, *args, **kwargs)
    except Exception as error:
        raise no_norm(f"it fails on plain numbers ({type(error).__name__}: {error})", None) from None
    if not all(torch.equal(given[name], value) for name, value in kept.items()):
        raise Refused("input-written", "it writes into its input", view.source.tree.lineno)
    return result


def _arguments(view: ForwardView, given: dict[str, torch.Tensor]) -> tuple[list[Any], dict[str, Any]]:
    """`given` as the forward takes it; what else it requires is never read, and None."""
    arguments = view.source.tree.args
    args = [given.get(argument.arg) for argument in arguments.posonlyargs[1:]]
    named = arguments.args[0 if arguments.posonlyargs else 1 :]
    required = named[: len(named) - len(arguments.defaults)] if arguments.defaults else named
    required += [
        argument
        for argument, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
        if default is None
    ]
    kwargs: dict[str, Any] = {argument.arg: None for argument in required}
    kwargs.update({name: value for name, value in given.items() if name in {a.arg for a in _named(view)}})
    return args, kwargs


def _named(view: ForwardView) -> list[Any]:
    arguments = view.source.tree.args
    return [*arguments.args, *arguments.kwonlyargs]


def _equal(got: torch.Tensor, wanted: torch.Tensor) -> bool:
    """Whether two tensors have the same dtype, shape and bits, NaN where the other has."""
    if got.dtype != wanted.dtype or got.shape != wanted.shape:
        return False
    return torch.equal(got, wanted) or bool(((got == wanted) | (got.isnan() & wanted.isnan())).all())
