"""What `verify` found so far: verdicts on three runs, and what could not be run and why."""

from collections.abc import Collection
from typing import Any

import torch
import torch.nn as nn

from fusekit.model.choices import routing_check
from fusekit.model.compare import compare, errors, gradient_checks, text_check, top1_check
from fusekit.model.lifted import Lifted
from fusekit.model.report import CHECKS, Check, LayerError, NotRun
from fusekit.model.runs import Run, Text, as_double, generates, next_logits


class Findings:
    """Checks, errors of layers and what was not run, of one model in one dtype.

    What only the fused model cannot do is a check that failed; what the unfused or the float64 model
    cannot do either is not run.
    """

    def __init__(self, dtype: torch.dtype, skip: Collection[str]):
        self.dtype, self.skip = dtype, skip
        self.checks: list[Check] = []
        self.layers: list[LayerError] = []
        self.not_run: list[NotRun] = []
        if skip:
            self.not_run.append(NotRun(_listed(skip), "left out by skip=", True))

    def wants(self, name: str) -> bool:
        return name not in self.skip

    def leave_out(self, names: Collection[str], reason: str, excused: bool = False) -> None:
        left = [name for name in names if self.wants(name)]
        if left:
            self.not_run.append(NotRun(_listed(left), reason, excused))

    def fail(self, what: str, detail: str, name: str = "", fusion: str = "") -> None:
        self.checks.append(Check(what, name, fusion, False, detail))

    def judge(self, unfused: Run, fused: Run, exact: Run, layers: list[str], writes: bool) -> None:
        """Outputs, gradients and top-1, and the error down `layers`; `writes`: whether it can generate."""
        if unfused.failed:
            what = ["outputs", "gradients", "top-1", "site"] + ["generation"] * (not writes)
            self.leave_out(what, f"the unfused model fails on these inputs: {unfused.failed}")
            return
        self._leave_out_what_does_not_apply(unfused, writes)
        if fused.failed:
            self.fail("outputs", f"the fused model fails: {fused.failed}")
            what = ["gradients", *_by_the_model(unfused)]
            self.leave_out(what, "the fused model fails, see outputs")
            return
        if exact.failed:
            what = ["outputs", "gradients", *_by_the_model(unfused)]
            self.leave_out(what, f"the float64 run, which is the reference, fails: {exact.failed}")
        else:
            self._judge_outputs(unfused, fused, exact)
            if _has_tokens(unfused) and self.wants("top-1"):
                self._judge_top1(unfused, fused, exact)
            if unfused.choices.made and self.wants("routing"):
                self._judge_routing(unfused, fused, exact)
            self._follow(layers, unfused, fused, exact)
        if self.wants("gradients"):
            self._judge_gradients(unfused, fused, exact)

    def _follow(self, layers: list[str], unfused: Run, fused: Run, exact: Run) -> None:
        for name in layers:
            if all(name in one.layers for one in (unfused, fused, exact)):
                reference = exact.layers[name]
                unfused_max, unfused_rms = errors(unfused.layers[name], reference)
                fused_max, fused_rms = errors(fused.layers[name], reference)
                self.layers.append(LayerError(name, unfused_max, fused_max, unfused_rms, fused_rms))

    def _leave_out_what_does_not_apply(self, unfused: Run, writes: bool) -> None:
        """Top-1 and generation, of a model that is no language model."""
        if not _has_tokens(unfused):
            self.leave_out(["top-1"], "the model returns no logits to choose a token by", excused=True)
        if not writes:
            self.leave_out(["generation"], "the model does not generate", excused=True)

    def _judge_outputs(self, unfused: Run, fused: Run, exact: Run) -> None:
        if not self.wants("outputs"):
            return
        counts = [len(one.outputs) for one in (unfused, fused, exact)]
        if counts[0] != counts[1]:
            self.fail("outputs", f"fused returns {counts[1]} floating tensors, unfused {counts[0]}")
        elif not counts[0]:
            self.leave_out(["outputs"], "the model returns no floating tensor")
        elif counts[0] != counts[2]:
            self.leave_out(["outputs"], f"the float64 run returns {counts[2]} tensors, not {counts[0]}")
        else:
            triples = zip(unfused.outputs, fused.outputs, exact.outputs, strict=True)
            for index, triple in enumerate(triples):
                name = "" if counts[0] == 1 else f"output {index}"
                self.checks.append(compare("outputs", name, *triple, dtype=self.dtype))

    def _judge_top1(self, unfused: Run, fused: Run, exact: Run) -> None:
        if exact.logits is None:
            self.leave_out(["top-1"], "the float64 run returns no logits")
        elif unfused.logits is None or fused.logits is None or fused.logits.shape != unfused.logits.shape:
            self.fail("top-1", "the logits of the fused model are missing or of another shape")
        else:
            self.checks.append(top1_check(unfused.logits, fused.logits, exact.logits))

    def _judge_routing(self, unfused: Run, fused: Run, exact: Run) -> None:
        if exact.choices.strayed or len(exact.choices.made) != len(unfused.choices.made):
            self.leave_out(["routing"], "the float64 run chooses among others")
        else:
            self.checks.append(routing_check(unfused.choices, fused.choices, exact.choices, dtype=self.dtype))

    def _judge_gradients(self, unfused: Run, fused: Run, exact: Run) -> None:
        if unfused.no_gradients:
            self.leave_out(["gradients"], f"backward of the unfused model fails: {unfused.no_gradients}")
        elif fused.no_gradients:
            self.fail("gradients", f"backward of the fused model fails: {fused.no_gradients}")
        elif exact.failed:
            return  # said with the outputs
        elif exact.no_gradients:
            self.leave_out(["gradients"], f"backward of the float64 run fails: {exact.no_gradients}")
        elif not exact.gradients:
            self.leave_out(["gradients"], "no parameter has a gradient")
        else:
            self.checks += gradient_checks(
                unfused.gradients, fused.gradients, exact.gradients, dtype=self.dtype
            )

    def judge_text(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        tokens: int,
        texts: tuple[Text | None, Text | None],
        runs: tuple[Run, Run, Run],
    ) -> None:
        """Generation: `texts` of the unfused and the fused model; `model` is the one in float64."""
        before, after = texts
        if before is None or after is None:
            if generates(model):
                main = getattr(model, "main_input_name", "input_ids")
                self.leave_out(["generation"], f"there are no {main} to generate from")
            return
        if before.ids is None:
            self.leave_out(["generation"], f"generate() of the unfused model fails: {before.failed}")
            return
        if after.ids is None:
            self.fail("generation", f"generate() of the fused model fails: {after.failed}")
            return
        unfused, fused, exact = runs

        def exact_logits(row: int, so_far: torch.Tensor) -> torch.Tensor | None:
            if exact.logits is None or unfused.logits is None or fused.logits is None:
                return None
            try:
                with Lifted():
                    return next_logits(model, as_double(inputs), row, so_far)
            except Exception:  # a model whose generate() calls it in a way of its own
                return None

        noise = _noise(unfused, fused, exact)
        self.checks.append(text_check(before.ids, after.ids, tokens, noise, exact_logits))


def _by_the_model(unfused: Run) -> list[str]:
    """The checks that only some models have."""
    return ["top-1"] * _has_tokens(unfused) + ["routing"] * bool(unfused.choices.made)


def _has_tokens(unfused: Run) -> bool:
    return unfused.logits is not None and unfused.logits.dim() > 0 and unfused.logits.shape[-1] > 1


def _noise(unfused: Run, fused: Run, exact: Run) -> float:
    """How far the logits of both runs together are from float64; 0.0 where there are none."""
    if exact.logits is None or unfused.logits is None or fused.logits is None:
        return 0.0
    return errors(unfused.logits, exact.logits)[0] + errors(fused.logits, exact.logits)[0]


def _listed(names: Collection[str]) -> str:
    """`outputs, top-1`, or `all checks`."""
    inside = [name for name in CHECKS if name in names]
    return "all checks" if len(inside) == len(CHECKS) else ", ".join(inside)
