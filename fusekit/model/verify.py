"""Fused against unfused, both against float64: outputs, gradients, state dict, generation, each site."""

import contextlib
import copy
import warnings
from collections.abc import Collection, Iterator
from typing import Any

import torch
import torch.nn as nn

from fusekit.errors import FusekitError
from fusekit.model.apply import apply, revert
from fusekit.model.binding import is_fused
from fusekit.model.compare import compare, errors, state_check, top1_check
from fusekit.model.lifted import Lifted
from fusekit.model.plan import Plan
from fusekit.model.plan import plan as make_plan
from fusekit.model.report import Check, LayerError, NotRun, VerifyReport
from fusekit.model.runs import (
    SEED,
    Gradients,
    Run,
    as_double,
    captured,
    floating,
    generated,
    generates,
    run,
    with_tensors,
)

CHECKS = ("outputs", "gradients", "state dict", "top-1", "generation", "site")


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
            return with_tensors(
                dict(self.given), lambda tensor: tensor.to(self.device)
            ), f"the given inputs ({', '.join(self.given)})"
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
        unfused = self._run(inputs, names)
        texts = [self._generated(inputs)]
        captured = self._captured(inputs)
        fused_plan = self._plan_of(self.copy)
        fused = apply(fused_plan)
        run = self._run(inputs, names)
        texts.append(self._generated(inputs))
        after = self.copy.state_dict()
        if "state dict" not in self.skip:
            self.checks.append(state_check(state, after))
        fused.revert()
        self.copy.double()
        with Lifted():
            reference = self._run(as_double(inputs), names)
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

    def _run(self, inputs: dict[str, Any], names: list[str]) -> Run:
        return run(self.copy, inputs, names, "gradients" not in self.skip)

    def _generated(self, inputs: dict[str, Any]) -> torch.Tensor | None:
        return None if "generation" in self.skip else generated(self.copy, inputs, self.generate)

    def _captured(self, inputs: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
        names = {site.name for site in (*self.plan.sites, *self.plan.applied)}
        return {} if "site" in self.skip else captured(self.copy, names, inputs)

    # -- verdicts -----------------------------------------------------------------------------

    def _judge(self, unfused: Run, fused: Run, reference: Run, names: list[str]) -> None:
        if "outputs" not in self.skip:
            if not reference.outputs:
                self._leave_out(["outputs"], "the model returned no floating tensor")
            for index, (a, b, exact) in enumerate(
                zip(unfused.outputs, fused.outputs, reference.outputs, strict=True)
            ):
                name = "" if len(reference.outputs) == 1 else f"output {index}"
                self.checks.append(compare("outputs", name, a, b, exact, dtype=self.dtype))
        if "gradients" not in self.skip:
            if not reference.gradients:
                self._leave_out(["gradients"], "no parameter has a gradient")
            self._judge_gradients(unfused.gradients, fused.gradients, reference.gradients)
        if "top-1" not in self.skip:
            if reference.logits is None or fused.logits is None or unfused.logits is None:
                self._leave_out(["top-1"], "the model returns no logits")
            else:
                self.checks.append(top1_check(unfused.logits, fused.logits, reference.logits))
        for name in names:
            if name in reference.layers:
                a, b, exact = unfused.layers[name], fused.layers[name], reference.layers[name]
                (unfused_max, unfused_rms), (fused_max, fused_rms) = errors(a, exact), errors(b, exact)
                self.layers.append(LayerError(name, unfused_max, fused_max, unfused_rms, fused_rms))

    def _judge_gradients(self, unfused: Gradients, fused: Gradients, reference: Gradients) -> None:
        scales = {name: float(exact.abs().max()) or 1.0 for name, exact in reference.items()}
        known = {name: errors(unfused[name], exact) for name, exact in reference.items() if name in unfused}
        worst = [max((error[i] / scales[name] for name, error in known.items()), default=0.0) for i in (0, 1)]
        for name, exact in reference.items():
            if name not in unfused or name not in fused:
                self.checks.append(
                    Check("gradients", name, "", False, "it has no gradient in one of the runs")
                )
                continue
            noise = (worst[0] * scales[name], worst[1] * scales[name])
            pair = unfused[name], fused[name]
            self.checks.append(compare("gradients", name, *pair, exact, dtype=self.dtype, noise=noise))

    def _judge_text(self, texts: list[torch.Tensor | None], noise: float) -> None:
        """The same tokens, or a fork between two that float64 tells apart by less than the noise."""
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
            detail += (
                f"; sequence {row} forks at token {fork - start}: in float64 the two are {margin:.2g} apart"
            )
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
                results.append(floating(module(*args, **kwargs))[:1])
                same = tuple(
                    own for own in make_plan(module).sites if not own.name and own.match == site.match
                )
                with apply(Plan(module, same, (), ())):
                    results.append(floating(module(*args, **kwargs))[:1])
                module.double()
                with Lifted():
                    results.append(floating(module(*as_double(args), **as_double(kwargs)))[:1])
            if not all(results):
                self._leave_out(["site"], f"{site.name}: it returned no floating tensor")
                continue
            self.checks.append(
                compare(
                    "site", site.name, *(found[0] for found in results), dtype=self.dtype, fusion=site.fusion
                )
            )


def _noise(unfused: Run, fused: Run, reference: Run) -> float:
    """How far the logits of both runs together are from float64; 0.0 where there are none."""
    if reference.logits is None or unfused.logits is None or fused.logits is None:
        return 0.0
    return errors(unfused.logits, reference.logits)[0] + errors(fused.logits, reference.logits)[0]


# -- the model and its inputs -----------------------------------------------------------------


def _vocabulary(model: Any) -> int | None:
    """The number of tokens of a causal language model, None for any other."""
    config = getattr(model, "config", None)
    if config is None or not generates(model) or not hasattr(model, "get_input_embeddings"):
        return None
    if getattr(config, "is_encoder_decoder", False):
        return None
    embedding = model.get_input_embeddings()
    return getattr(embedding, "num_embeddings", None)


def _layer_names(model: nn.Module) -> list[str]:
    """The repeated layers of a model: the members of its longest list of modules of one class."""
    best: list[str] = []
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and len({type(child) for child in module}) == 1:
            names = [f"{name}.{index}" if name else str(index) for index in range(len(module))]
            if len(names) > len(best):
                best = names
    return best


def _devices(device: torch.device) -> list[torch.device]:
    return [device] if device.type == "cuda" else []


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
