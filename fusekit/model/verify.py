"""Fused against unfused, both against float64: outputs, gradients, state dict, generation, each site."""

import contextlib
import copy
import math
import warnings
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn as nn

from fusekit.errors import FusekitError
from fusekit.model.apply import apply, revert
from fusekit.model.binding import is_fused
from fusekit.model.lifted import Lifted
from fusekit.model.plan import Plan
from fusekit.model.plan import plan as make_plan
from fusekit.model.report import Check, LayerError, NotRun, VerifyReport

CHECKS = ("outputs", "gradients", "state dict", "top-1", "generation", "site")
RATIO = 1.5  # fused may be this much further from float64 than unfused is
EPS = 8  # ... or this many eps of the dtype, relative to the largest magnitude
SEED = 20


def verify(
    plan: Plan,
    inputs: dict[str, Any] | None = None,
    *,
    tokens: int = 16,
    generate: int = 16,
    skip: Collection[str] = (),
) -> VerifyReport:
    """Check what `plan` fuses, and what it found applied, against a float64 run of the same model.

    Runs on one deep copy, in eval mode, in the model's own dtype and on its device; the model is
    not changed. `inputs` are keyword arguments of its forward; without any, a causal language
    model gets random `input_ids` of shape [2, tokens]. `generate` is the number of tokens to
    compare (greedy). `skip` names checks to leave out: of `outputs`, `gradients`, `state dict`,
    `top-1`, `generation`, `site`.

    The float64 run has its casts lifted too (`Lifted`). A value passes when its largest and its
    root-mean-square error are at most 1.5 times the unfused ones, or at most 8 eps of the dtype
    times the largest magnitude of the reference: an unfused error of zero proves nothing. A
    parameter's gradient may also be as far off, relative to its largest magnitude, as 1.5 times the
    worst of the unfused ones: rounding noise that came down the whole depth hits each parameter by
    luck. What could not be run is in `.not_run`, and makes `.ok` False unless `skip` asked for it.
    """
    for name in skip:
        if name not in CHECKS:
            raise FusekitError(f"skip={name!r}: there is no such check; there are {', '.join(CHECKS)}")
    return _Verification(plan, inputs, tokens, generate, frozenset(skip)).report()


_Gradients = dict[str, torch.Tensor]


@dataclass
class _Run:
    """What one version of the model gave."""

    outputs: list[torch.Tensor] = field(default_factory=list)
    gradients: _Gradients = field(default_factory=dict)
    layers: dict[str, torch.Tensor] = field(default_factory=dict)
    logits: torch.Tensor | None = None


class _Verification:
    def __init__(
        self, plan: Plan, inputs: dict[str, Any] | None, tokens: int, generate: int, skip: frozenset[str]
    ):
        self.plan, self.given, self.tokens, self.generate, self.skip = plan, inputs, tokens, generate, skip
        self.checks: list[Check] = []
        self.layers: list[LayerError] = []
        self.not_run: list[NotRun] = [
            NotRun(name, "left out by skip=", True) for name in CHECKS if name in skip
        ]
        tensors = [*plan.model.parameters(), *plan.model.buffers()]
        floats = [tensor for tensor in tensors if tensor.is_floating_point()]
        self.dtype = floats[0].dtype if floats else torch.float32
        self.device = floats[0].device if floats else torch.device("cpu")
        self.sites = len(plan.sites) + len(plan.applied)

    def report(self) -> VerifyReport:
        said = self._run_all()
        return VerifyReport(
            self.plan.model_name,
            str(self.dtype).removeprefix("torch."),
            str(self.device),
            self.sites,
            tuple(self.checks),
            tuple(self.layers),
            tuple(self.not_run),
            said,
        )

    def _leave_out(self, names: Collection[str], reason: str) -> None:
        self.not_run += [NotRun(name, reason, False) for name in names if name not in self.skip]

    def _run_all(self) -> str:
        model = self.plan.model
        if not self.sites:
            self._leave_out(CHECKS, "the plan fuses nothing, so there is nothing to compare")
            return "nothing was run"
        if any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers())):
            self._leave_out(CHECKS, "the model is on the meta device: load its weights first")
            return "nothing was run"
        inputs, said = self._inputs()
        if inputs is None:
            self._leave_out(CHECKS, said)
            return "nothing was run"
        try:
            self.copy = copy.deepcopy(model).eval()
        except Exception as error:
            self._leave_out(CHECKS, f"the model cannot be copied ({type(error).__name__}: {error})")
            return "nothing was run"
        if any(is_fused(module) for module in self.copy.modules()):
            revert(self.copy)
        for parameter in self.copy.parameters():
            parameter.requires_grad_(parameter.is_floating_point())
        with _quiet(), torch.random.fork_rng(devices=_devices(self.device)):
            self._compare(inputs)
        return said

    def _inputs(self) -> tuple[dict[str, Any] | None, str]:
        if self.given is not None:
            return _moved(self.given, self.device), f"the given inputs ({', '.join(self.given)})"
        size = _vocabulary(self.plan.model)
        if size is None:
            return None, f"no inputs are known for a {self.plan.model_name}: pass verify(inputs={{...}})"
        generator = torch.Generator().manual_seed(SEED)
        ids = torch.randint(size, (2, self.tokens), generator=generator).to(self.device)
        return {"input_ids": ids, "use_cache": False}, f"random input_ids {list(ids.shape)}"

    # -- the three versions -------------------------------------------------------------------

    def _compare(self, inputs: dict[str, Any]) -> None:
        names = _layer_names(self.copy)
        state = self.plan.model.state_dict()
        unfused = self._run(self.copy, inputs, names)
        texts = [self._generated(inputs)]
        captured = self._captured(inputs)
        fused_plan = self._plan_of(self.copy)
        fused = apply(fused_plan)
        run = self._run(self.copy, inputs, names)
        texts.append(self._generated(inputs))
        after = self.copy.state_dict()
        if "state dict" not in self.skip:
            self.checks.append(_state_check(state, after))
        fused.revert()
        self.copy.double()
        with Lifted():
            reference = self._run(self.copy, _as_double(inputs), names)
        self._judge(unfused, run, reference, names)
        self._judge_text(texts, _noise(unfused, run, reference))
        if "site" not in self.skip:
            self.copy.to(self.dtype)
            self.copy.load_state_dict(state)
            self._judge_sites(fused_plan, captured)

    def _plan_of(self, model: nn.Module) -> Plan:
        """The same sites on a copy of the model."""
        wanted = {(site.name, site.match) for site in (*self.plan.sites, *self.plan.applied)}
        found = make_plan(model)
        sites = tuple(site for site in found.sites if (site.name, site.match) in wanted)
        if len(sites) < len(wanted):
            missing = len(wanted) - len(sites)
            raise FusekitError(
                f"{missing} sites of the plan do not fit a copy of the model any more; plan again"
            )
        return Plan(model, sites, (), ())

    def _run(self, model: nn.Module, inputs: dict[str, Any], names: list[str]) -> _Run:
        run = _Run()
        hooks = [model.get_submodule(name).register_forward_hook(_keep(run.layers, name)) for name in names]
        wants_gradients = "gradients" not in self.skip
        try:
            with torch.set_grad_enabled(wants_gradients):
                result = model(**inputs)
        finally:
            for hook in hooks:
                hook.remove()
        tensors = [tensor for tensor in _tensors(result) if tensor.is_floating_point()]
        run.outputs = [tensor.detach().clone() for tensor in tensors]
        logits = getattr(result, "logits", None)
        run.logits = logits.detach() if isinstance(logits, torch.Tensor) else None
        if wants_gradients:
            self._backward(model, tensors, run)
        return run

    def _backward(self, model: nn.Module, tensors: list[torch.Tensor], run: _Run) -> None:
        """Gradients of a fixed random projection of the outputs."""
        generator = torch.Generator().manual_seed(SEED)
        total: Any = 0
        for tensor in tensors:
            if tensor.requires_grad:
                weights = torch.randn(tensor.shape, generator=generator, dtype=torch.float64)
                total = total + (tensor * weights.to(tensor)).sum()
        if isinstance(total, torch.Tensor):
            total.backward()
        for name, parameter in model.named_parameters():
            if parameter.grad is not None:
                run.gradients[name] = parameter.grad.detach().clone()
            parameter.grad = None

    def _generated(self, inputs: dict[str, Any]) -> torch.Tensor | None:
        if "generation" in self.skip or not _generates(self.copy) or "input_ids" not in inputs:
            return None
        ids = inputs["input_ids"]
        prompt = {"input_ids": ids, "attention_mask": inputs.get("attention_mask", torch.ones_like(ids))}
        with torch.no_grad():
            return self.copy.generate(  # type: ignore[operator]
                **prompt, max_new_tokens=self.generate, min_new_tokens=self.generate, do_sample=False
            )

    def _captured(self, inputs: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
        """What each fused module is called with, first time."""
        found: dict[str, tuple[Any, Any]] = {}
        if "site" in self.skip:
            return found
        names = {site.name for site in (*self.plan.sites, *self.plan.applied)}

        def keep(name: str) -> Callable[..., None]:
            def hook(module: nn.Module, args: Any, kwargs: Any) -> None:
                found.setdefault(name, (_detached(args), _detached(kwargs)))

            return hook

        hooks = [
            self.copy.get_submodule(name).register_forward_pre_hook(keep(name), with_kwargs=True)
            for name in names
        ]
        try:
            with torch.no_grad():
                self.copy(**inputs)
        finally:
            for hook in hooks:
                hook.remove()
        return found

    # -- verdicts -----------------------------------------------------------------------------

    def _judge(self, unfused: _Run, fused: _Run, reference: _Run, names: list[str]) -> None:
        if "outputs" not in self.skip:
            if not reference.outputs:
                self._leave_out(["outputs"], "the model returned no floating tensor")
            for index, (a, b, exact) in enumerate(
                zip(unfused.outputs, fused.outputs, reference.outputs, strict=True)
            ):
                name = "" if len(reference.outputs) == 1 else f"output {index}"
                self.checks.append(self._check("outputs", name, "", a, b, exact))
        if "gradients" not in self.skip:
            if not reference.gradients:
                self._leave_out(["gradients"], "no parameter has a gradient")
            self._judge_gradients(unfused.gradients, fused.gradients, reference.gradients)
        if "top-1" not in self.skip:
            if reference.logits is None or fused.logits is None or unfused.logits is None:
                self._leave_out(["top-1"], "the model returns no logits")
            else:
                self.checks.append(_top1_check(unfused.logits, fused.logits, reference.logits))
        for name in names:
            if name in reference.layers:
                a, b, exact = unfused.layers[name], fused.layers[name], reference.layers[name]
                errors = *_errors(a, exact), *_errors(b, exact)
                self.layers.append(LayerError(name, errors[0], errors[2], errors[1], errors[3]))

    def _judge_gradients(self, unfused: _Gradients, fused: _Gradients, reference: _Gradients) -> None:
        scales = {name: float(exact.abs().max()) or 1.0 for name, exact in reference.items()}
        errors = {name: _errors(unfused[name], exact) for name, exact in reference.items() if name in unfused}
        worst = [
            max((error[i] / scales[name] for name, error in errors.items()), default=0.0) for i in (0, 1)
        ]
        for name, exact in reference.items():
            if name not in unfused or name not in fused:
                self.checks.append(
                    Check("gradients", name, "", False, "it has no gradient in one of the runs")
                )
                continue
            noise = (worst[0] * scales[name], worst[1] * scales[name])
            self.checks.append(self._check("gradients", name, "", unfused[name], fused[name], exact, noise))

    def _judge_text(self, texts: list[torch.Tensor | None], noise: float) -> None:
        """The same tokens, or a fork where float64 cannot tell the two tokens apart beyond the rounding noise."""
        if "generation" in self.skip:
            return
        before, after = texts
        if before is None or after is None:
            self._leave_out(["generation"], "the model does not generate from input_ids")
            return
        start = before.shape[1] - self.generate
        same = before == after
        agree = int(same[:, start:].sum())
        detail = f"{agree} of {self.generate * before.shape[0]} tokens, greedy, are the same"
        ok = True
        for row in (~same).any(1).nonzero().flatten().tolist():
            fork = int((~same[row]).nonzero()[0])
            with torch.no_grad(), Lifted():
                logits = self.copy(input_ids=before[row : row + 1, :fork], use_cache=False).logits[0, -1]
            margin = abs(float(logits[before[row, fork]] - logits[after[row, fork]]))
            ok &= margin <= noise
            detail += f"; sequence {row} forks at token {fork - start}, where float64 tells them apart by {margin:.2g}"
            detail += f" (rounding noise {noise:.2g})"
        self.checks.append(Check("generation", "", "", ok, detail, same_bits=bool(same.all())))

    def _judge_sites(self, fused_plan: Plan, captured: dict[str, tuple[Any, Any]]) -> None:
        """Each site by itself, on a copy of its module, with what the module was called with."""
        for site in fused_plan.sites:
            if site.name not in captured:
                self._leave_out(["site"], f"{site.name or site.type_name}: it was not called in this run")
                continue
            args, kwargs = captured[site.name]
            module = copy.deepcopy(site.module)
            results = []
            with torch.no_grad():
                results.append(_first(module(*args, **kwargs)))
                same = tuple(
                    own for own in make_plan(module).sites if not own.name and own.match == site.match
                )
                with apply(Plan(module, same, (), ())):
                    results.append(_first(module(*args, **kwargs)))
                module.double()
                with Lifted():
                    results.append(_first(module(*_as_double(args), **_as_double(kwargs))))
            if any(result is None for result in results):
                self._leave_out(["site"], f"{site.name}: it returned no floating tensor")
                continue
            self.checks.append(self._check("site", site.name, site.fusion, *results))

    def _check(
        self,
        what: str,
        name: str,
        fusion: str,
        unfused: Any,
        fused: Any,
        reference: torch.Tensor,
        noise: tuple[float, float] = (0.0, 0.0),
    ) -> Check:
        unfused_max, unfused_rms = _errors(unfused, reference)
        fused_max, fused_rms = _errors(fused, reference)
        floor = EPS * torch.finfo(self.dtype).eps * float(reference.abs().max() if reference.numel() else 0)
        allowed_max = max(RATIO * max(unfused_max, noise[0]), floor)
        allowed_rms = max(RATIO * max(unfused_rms, noise[1]), floor)
        shapes = unfused.shape == fused.shape and unfused.dtype == fused.dtype
        ok = shapes and fused_max <= allowed_max and fused_rms <= allowed_rms
        detail = f"largest error {fused_max:.3g}, {unfused_max:.3g} unfused; allowed {allowed_max:.3g}"
        if not shapes:
            detail = f"fused gives {fused.dtype} {list(fused.shape)}, unfused {unfused.dtype} {list(unfused.shape)}"
        same = shapes and torch.equal(unfused, fused)
        return Check(
            what, name, fusion, bool(ok), detail, fused_max, unfused_max, fused_rms, unfused_rms, same
        )


def _errors(found: torch.Tensor, reference: torch.Tensor) -> tuple[float, float]:
    """(largest, root-mean-square) absolute error; infinite where `found` is not finite and the reference is."""
    if found.shape != reference.shape:
        return math.inf, math.inf
    if not found.numel():
        return 0.0, 0.0
    difference = (found.double() - reference.double()).abs()
    difference = torch.where(found.double() == reference.double(), 0.0, difference)  # equal infinities
    difference = torch.nan_to_num(difference, nan=math.inf, posinf=math.inf)
    both = torch.isnan(found) & torch.isnan(reference)
    difference = torch.where(both, 0.0, difference)
    return float(difference.max()), float(difference.square().mean().sqrt())


def _noise(unfused: _Run, fused: _Run, reference: _Run) -> float:
    """How far the logits of both runs together are from float64; 0.0 where there are none."""
    if reference.logits is None or unfused.logits is None or fused.logits is None:
        return 0.0
    return _errors(unfused.logits, reference.logits)[0] + _errors(fused.logits, reference.logits)[0]


def _state_check(before: dict[str, torch.Tensor], after: dict[str, torch.Tensor]) -> Check:
    if list(before) != list(after):
        return Check("state dict", "", "", False, "the names are not the same, or not in the same order")
    wrong = [name for name, tensor in before.items() if not _same_bits(tensor, after[name])]
    detail = f"{len(before)} tensors, the same names and bits" if not wrong else f"{wrong[0]} differs"
    return Check("state dict", "", "", not wrong, detail, same_bits=not wrong)


def _same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    same = left.shape == right.shape and left.dtype == right.dtype
    return same and bool(((left == right) | (left.isnan() & right.isnan())).all())


def _top1_check(unfused: torch.Tensor, fused: torch.Tensor, reference: torch.Tensor) -> Check:
    """Fused must pick the unfused token wherever the reference tells the first two tokens apart."""
    best = reference.topk(2, -1).values
    noise = (unfused.double() - reference).abs().amax(-1) + (fused.double() - reference).abs().amax(-1)
    clear = best[..., 0] - best[..., 1] > noise
    same = unfused.argmax(-1) == fused.argmax(-1)
    ok = bool((same | ~clear).all())
    exact = int((fused.argmax(-1) == reference.argmax(-1)).sum())
    detail = f"{int(same.sum())} of {same.numel()} positions agree with unfused, {exact} with float64"
    return Check("top-1", "", "", ok, detail, same_bits=bool(same.all()))


# -- the model and its inputs -----------------------------------------------------------------


def _vocabulary(model: nn.Module) -> int | None:
    """The number of tokens of a causal language model, None for any other."""
    config = getattr(model, "config", None)
    if config is None or not _generates(model) or not hasattr(model, "get_input_embeddings"):
        return None
    if getattr(config, "is_encoder_decoder", False):
        return None
    embedding = model.get_input_embeddings()
    return getattr(embedding, "num_embeddings", None)


def _generates(model: nn.Module) -> bool:
    ask = getattr(model, "can_generate", None)
    return callable(ask) and bool(ask()) and hasattr(model, "generate")


def _layer_names(model: nn.Module) -> list[str]:
    """The repeated layers of a model: the members of its longest list of modules of one class."""
    best: list[str] = []
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and len({type(child) for child in module}) == 1:
            names = [f"{name}.{index}" if name else str(index) for index in range(len(module))]
            if len(names) > len(best):
                best = names
    return best


def _keep(kept: dict[str, torch.Tensor], name: str) -> Callable[..., None]:
    def hook(module: nn.Module, args: Any, result: Any) -> None:
        tensors = [tensor for tensor in _tensors(result) if tensor.is_floating_point()]
        if tensors:
            kept.setdefault(name, tensors[0].detach().clone())

    return hook


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _tensors(item)
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _tensors(item)


def _first(result: Any) -> torch.Tensor | None:
    return next((tensor for tensor in _tensors(result) if tensor.is_floating_point()), None)


def _map(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    if isinstance(value, torch.Tensor):
        return change(value)
    if type(value) in (tuple, list):
        return type(value)(_map(item, change) for item in value)
    if type(value) is dict:
        return {name: _map(item, change) for name, item in value.items()}
    return value


def _moved(inputs: dict[str, Any], device: torch.device) -> dict[str, Any]:
    return _map(dict(inputs), lambda tensor: tensor.to(device))


def _detached(value: Any) -> Any:
    return _map(value, lambda tensor: tensor.detach().clone())


def _as_double(value: Any) -> Any:
    return _map(value, lambda tensor: tensor.double() if tensor.is_floating_point() else tensor)


def _devices(device: torch.device) -> list[torch.device]:
    return [device] if device.type == "cuda" else []


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
