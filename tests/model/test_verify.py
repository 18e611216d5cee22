"""verify(): it passes what is right, fails what is wrong, and says what it did not run."""

import copy

import pytest
import torch
import torch.nn as nn
from transformers import LlamaConfig, LlamaForCausalLM

import fusekit as fk
from fusekit import kernels
from fusekit.model import gradients, storage
from fusekit.model.lifted import Lifted


def small_llama(**changes) -> LlamaForCausalLM:
    settings = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 60,
        "eos_token_id": None,
        "bos_token_id": None,
    }
    model = LlamaForCausalLM(LlamaConfig(**settings | changes)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.3 + 0.1)
    return model


def checks(report, what):
    return [check for check in report.checks if check.what == what]


def test_a_right_fusion_passes_every_check():
    model = small_llama()
    report = fk.plan(model).verify()
    assert report.ok, report
    assert {check.what for check in report.checks} == {
        "outputs",
        "gradients",
        "state dict",
        "top-1",
        "generation",
        "site",
    }
    assert len(checks(report, "site")) == report.sites == 9
    assert {check.name for check in checks(report, "gradients")} == dict(model.named_parameters()).keys()
    assert [layer.name for layer in report.layers] == ["model.layers.0", "model.layers.1"]
    assert report.not_run == ()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_dtypes_pass_in_their_own_dtype(dtype):
    report = fk.plan(small_llama().to(dtype)).verify()
    assert report.ok, report
    assert report.dtype == str(dtype).removeprefix("torch.")
    assert checks(report, "outputs")[0].unfused_max > 1e-4  # rounding in the model's own dtype shows


def test_the_model_is_left_as_it_was():
    model = small_llama()
    model.model.layers[0].mlp.gate_proj.weight.requires_grad_(False)
    model.train()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    random = torch.get_rng_state()
    classes = [type(module) for module in model.modules()]
    fk.plan(model).verify(generate=2)
    assert classes == [type(module) for module in model.modules()]
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not model.model.layers[0].mlp.gate_proj.weight.requires_grad
    assert model.training
    assert torch.equal(random, torch.get_rng_state())


def test_an_applied_plan_can_be_verified_and_stays_applied():
    model = small_llama()
    with fk.plan(model).apply():
        report = fk.plan(model).verify(generate=2)
        assert report.ok and report.sites == 9
        assert len(fk.plan(model).applied) == 9


def test_a_wrong_norm_fails_outputs_gradients_and_its_sites(monkeypatch):
    model = small_llama()
    plan = fk.plan(model)
    right = kernels.rms_norm
    monkeypatch.setattr(kernels, "rms_norm", lambda x, w, eps, **form: right(x, w, eps * 1000 + 1e-3, **form))
    report = plan.verify(generate=2)
    assert not report.ok
    assert not checks(report, "outputs")[0].ok
    assert not all(check.ok for check in checks(report, "gradients"))
    wrong = [check for check in checks(report, "site") if not check.ok]
    assert wrong and {check.fusion for check in wrong} == {"rms_norm"}


def test_a_gradient_that_goes_to_the_wrong_rows_fails(monkeypatch):
    right = gradients.Rows.backward

    def swapped(ctx, grad):
        whole, sizes, first, second, *rest = right(ctx, grad)
        return whole, sizes, first, second * 1.01, *rest

    monkeypatch.setattr(gradients.Rows, "backward", staticmethod(swapped))
    report = fk.plan(small_llama(), only=["qkv"]).verify(generate=2)
    wrong = {check.name for check in checks(report, "gradients") if not check.ok}
    assert wrong == {f"model.layers.{i}.self_attn.k_proj.weight" for i in (0, 1)}
    assert checks(report, "outputs")[0].ok and not report.ok


def test_a_changed_weight_fails_the_state_dict(monkeypatch):
    tie = storage.MergedLinear.tie

    def careless(self):
        done = tie(self)
        with torch.no_grad():
            self.weight[0, 0] += 1e-3
        return done

    monkeypatch.setattr(storage.MergedLinear, "tie", careless)
    report = fk.plan(small_llama(), only=["qkv"]).verify(generate=2)
    (check,) = checks(report, "state dict")
    assert not check.ok and "q_proj.weight" in check.detail


def test_what_cannot_run_is_listed_and_is_not_ok():
    class Pair(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(4, 3), nn.Linear(4, 5)

        def forward(self, x):
            return self.a(x), self.b(x)

    plan = fk.plan(Pair())
    report = plan.verify()
    assert not report.ok and report.checks == ()
    assert "pass verify(inputs=" in report.not_run[0].reason
    given = plan.verify({"x": torch.randn(2, 4)})
    assert not given.ok and {left.what for left in given.not_run} == {"top-1", "generation"}
    asked = plan.verify({"x": torch.randn(2, 4)}, skip=("top-1", "generation"))
    assert asked.ok, asked
    assert [check.name for check in checks(asked, "outputs")] == ["output 0", "output 1"]


def test_a_model_without_weights_is_not_ok():
    with torch.device("meta"):
        model = small_llama()
    report = fk.plan(model).verify()
    assert not report.ok
    assert "meta device" in report.not_run[0].reason


def test_a_plan_that_fuses_nothing_proves_nothing():
    report = fk.plan(nn.Sequential(nn.Linear(2, 2))).verify()
    assert not report.ok and "nothing to compare" in report.not_run[0].reason


def test_an_unknown_check_is_named():
    with pytest.raises(fk.FusekitError, match=r"skip='gradient'.*gradients"):
        fk.plan(small_llama()).verify(skip=("gradient",))


def test_the_float64_run_lifts_casts_and_new_tensors():
    class Casts(nn.Module):
        def forward(self, x):
            y = x.to(torch.float32) * torch.ones(3, dtype=torch.float16)
            return y.softmax(-1, dtype=torch.float32) + torch.arange(3).float() / 3

    x = torch.randn(3, dtype=torch.float64)
    exact = x.softmax(-1) + torch.arange(3, dtype=torch.float64) / 3
    with Lifted():
        lifted = Casts()(x)
    assert lifted.dtype == torch.float64 and torch.equal(lifted, exact)
    assert not torch.equal(Casts()(x).double(), exact)


def test_a_plain_double_copy_would_be_no_float64_reference():
    model = small_llama()
    exact = copy.deepcopy(model).double()
    ids = torch.randint(60, (1, 5))
    with torch.no_grad():
        plain = exact(ids).logits.double()
        with Lifted():
            reference = exact(ids).logits
    assert reference.dtype == torch.float64
    assert 1e-9 < (plain - reference).abs().max() < 1e-2  # norms and rotary tables round to float32
