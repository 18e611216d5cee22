"""Fused against unfused, both against float64: outputs, gradients, state dict, generation, each site."""

import contextlib
import copy
import logging
import warnings
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.nn as nn

from fusekit.errors import FusekitError
from fusekit.model.apply import Fused, revert
from fusekit.model.binding import is_fused
from fusekit.model.compare import state_check
from fusekit.model.findings import Findings
from fusekit.model.inputs import checked_inputs, describe, made_up_inputs, missing_inputs
from fusekit.model.lifted import Lifted
from fusekit.model.plan import Plan
from fusekit.model.report import CHECKS, VerifyReport
from fusekit.model.runs import (
    Call,
    Run,
    Text,
    as_double,
    captured,
    generated,
    generates,
    prompt_of,
    run,
    said,
    with_tensors,
)
from fusekit.model.site_checks import apply_copied, site_checks


def verify(
    plan: Plan,
    inputs: Mapping[str, Any] | None = None,
    *,
    tokens: int = 16,
    generate: int = 16,
    skip: Collection[str] = (),
) -> VerifyReport:
    """Check what `plan` fuses, and what it found applied, against a float64 run of the same model.

    Runs on one deep copy, in eval mode, in the model's own dtype and on its device; the model is
    not changed. `inputs` are keyword arguments of its forward; without any, a model of Transformers
    gets random ones of the sizes in its configuration: `input_ids` of shape [2, tokens], `pixel_values`,
    `input_features` and what else it needs. `generate` is the number of tokens to
    compare (greedy). `skip` names checks to leave out: of `outputs`, `gradients`, `state dict`,
    `top-1`, `routing`, `generation`, `site`.

    The float64 run has its casts lifted too (`Lifted`). Where the model picks by a score (a router its
    experts), the fused and the float64 run follow the picks of the unfused one, so that all three
    compute the same; `routing` says whether fused would have picked the same by itself wherever
    float64 tells the two apart. A value passes when its largest and its
    root-mean-square error are at most 1.5 times the unfused ones, or at most 8 eps of the dtype
    times the largest magnitude of the reference: an unfused error of zero proves nothing.

    Gradients get the same, and two allowances more, since rounding noise that came down the whole
    depth hits each parameter by luck. Every error is taken relative to the largest magnitude of the
    parameter's own exact gradient. A parameter may be as far off as 1.5 times the worst unfused one
    in the root of the mean square, and 3 times in the largest error (one entry's luck), but never by
    more than half of the digits (the root of eps); parameters whose exact gradient is
    below eps times the largest gradient of the model do not count for that worst, for theirs is
    nothing but rounding. And no parameter has to be nearer than eps times that largest gradient.

    What was not run is in `.not_run` with the reason, and makes `.ok` False unless `skip` asked for
    it or it does not apply to the model (text of one that writes none). A fused model that fails where
    the unfused one runs is a check that failed.

    Raises `FusekitError` for inputs that are no keyword arguments of the forward, and for a plan
    whose model has changed since it was made.
    """
    if isinstance(skip, str):
        raise FusekitError(f"skip={skip!r}: pass a tuple of names, skip=({skip!r},)")
    for name in skip:
        if name not in CHECKS:
            raise FusekitError(f"skip={name!r}: there is no such check; there are {', '.join(CHECKS)}")
    for option, value in (("tokens", tokens), ("generate", generate)):
        if value < 1:
            raise FusekitError(f"{option}={value}: it must be 1 or more")
    given = None if inputs is None else checked_inputs(plan.model, inputs)
    return _Verification(plan, given, tokens, generate, frozenset(skip)).report()


class _Verification:
    """The runs of one report."""

    def __init__(
        self, plan: Plan, inputs: dict[str, Any] | None, tokens: int, generate: int, skip: frozenset[str]
    ):
        self.plan, self.given, self.tokens, self.generate = plan, inputs, tokens, generate
        self.sites = (*plan.sites, *plan.applied)
        tensors = [*plan.model.parameters(), *plan.model.buffers()]
        floats = [tensor for tensor in tensors if tensor.is_floating_point()]
        self.dtype = floats[0].dtype if floats else torch.float32
        self.device = floats[0].device if floats else torch.device("cpu")
        self.found = Findings(self.dtype, skip)

    def report(self) -> VerifyReport:
        used = self._run_all()
        return VerifyReport(
            self.plan.model_name,
            str(self.dtype).removeprefix("torch."),
            str(self.device),
            len(self.sites),
            tuple(self.found.checks),
            tuple(self.found.layers),
            tuple(self.found.not_run),
            used,
        )

    def _run_all(self) -> str:
        """Every check; returns what was run, in words."""
        model = self.plan.model
        reason, inputs, made = "", self.given, []
        if not self.sites:
            reason = "the plan fuses nothing, so there is nothing to compare"
        elif any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers())):
            reason = "the model is on the meta device: load its weights first"
        elif inputs is None:
            made = made_up_inputs(model, self.tokens)
            if not made:
                reason = f"no inputs are known for a {self.plan.model_name}: pass {missing_inputs(model)}"
        if not reason:
            try:
                self.copy = copy.deepcopy(model).eval()
            except Exception as error:
                reason = f"the model cannot be copied: {said(error)}"
        if reason:
            self.found.leave_out(CHECKS, reason)
            return "nothing was run"
        if any(is_fused(module) for module in self.copy.modules()):
            revert(self.copy)
        for parameter in self.copy.parameters():
            parameter.requires_grad_(parameter.is_floating_point())
        devices = [self.device] if self.device.type == "cuda" else []
        with _quiet(), torch.random.fork_rng(devices=devices):
            if inputs is not None:
                used = f"the given inputs ({', '.join(inputs)})"
                inputs = self._placed(inputs)
            else:
                inputs = self._that_run([self._placed(one) for one in made])
                used = f"random {describe(inputs)}"
            self._compare(inputs)
        return used

    def _placed(self, inputs: dict[str, Any]) -> dict[str, Any]:
        return with_tensors(inputs, lambda tensor: tensor.detach().to(self.device))

    def _that_run(self, made: list[dict[str, Any]]) -> dict[str, Any]:
        """The first of made-up inputs that the model runs on, else the last."""
        for inputs in made[:-1]:
            if not run(self.copy, inputs, [], False).failed:
                return inputs
        return made[-1]

    def _compare(self, inputs: dict[str, Any]) -> None:
        found, names = self.found, _layer_names(self.copy)
        state = self.plan.model.state_dict()
        unfused = self._run(inputs, names)
        before = self._generated(inputs)
        calls = self._calls(inputs, unfused)
        applied = self._apply()
        fused = Run(failed=unfused.failed) if unfused.failed else self._run(inputs, names, unfused)
        after = self._generated(inputs)
        kept = state_check(state, self.copy.state_dict())
        applied.revert()
        sites, reasons = ([], []) if calls is None else site_checks(self.sites, self.copy, calls, self.dtype)
        exact = self._exact(inputs, names, unfused)
        found.judge(unfused, fused, exact, names, generates(self.copy))
        if found.wants("state dict"):
            found.checks.append(kept)
        if found.wants("generation"):
            found.judge_text(self.copy, inputs, self.generate, (before, after), (unfused, fused, exact))
        found.checks += sites
        for reason in reasons:
            found.leave_out(["site"], reason)

    def _run(self, inputs: dict[str, Any], names: list[str], after: Run | None = None) -> Run:
        return run(
            self.copy, inputs, names, self.found.wants("gradients"), None if after is None else after.choices
        )

    def _generated(self, inputs: dict[str, Any]) -> Text | None:
        """None where there is nothing to generate."""
        if not self.found.wants("generation") or not generates(self.copy):
            return None
        if not prompt_of(self.copy, inputs):
            return None
        return generated(self.copy, inputs, self.generate)

    def _calls(self, inputs: dict[str, Any], unfused: Run) -> dict[str, Call] | None:
        """What the module of each site is called with; None where sites are not checked."""
        if not self.found.wants("site") or unfused.failed:
            return None
        try:
            return captured(self.copy, {site.name for site in self.sites}, inputs)
        except Exception as error:
            self.found.leave_out(["site"], f"what the modules are called with cannot be kept: {said(error)}")
            return None

    def _apply(self) -> Fused:
        """The sites of the plan on the copy."""
        names = dict(self.plan.model.named_modules())
        for site in self.sites:
            if names.get(site.name) is not site.module:
                raise FusekitError(
                    f"{site.name or site.type_name}: another module is in its place since the plan was made; "
                    "plan again"
                )
        own = [replace(site, module=self.copy.get_submodule(site.name)) for site in self.sites]
        return apply_copied(own, self.copy, self.plan.model)

    def _exact(self, inputs: dict[str, Any], names: list[str], unfused: Run) -> Run:
        """The float64 run; the copy stays in float64."""
        try:
            self.copy.double()
        except Exception as error:
            return Run(failed=said(error))
        with Lifted():
            return self._run(as_double(inputs), names, unfused)


def _layer_names(model: nn.Module) -> list[str]:
    """The repeated layers of a model: the members of its longest list of modules of one class."""
    best: list[str] = []
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and len({type(child) for child in module}) == 1:
            names = [f"{name}.{index}" if name else str(index) for index in range(len(module))]
            if len(names) > len(best):
                best = names
    return best


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without what Python and Transformers advise about settings that are `verify`'s own."""
    logger = logging.getLogger("transformers")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)
