"""Gated RMSNorms: those of Transformers and their kin, the gate that is None, and what is none."""

import importlib
import itertools

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.activations import ACT2FN

import fusekit as fk

WIDTH, GROUP = 48, 16
REAL = [
    ("bailing_hybrid", "BailingHybridRMSNormGated"),
    ("bamba", "BambaRMSNormGated"),
    ("glm5_next", "Glm5NextTextRMSNormGated"),
    ("granitemoehybrid", "GraniteMoeHybridRMSNormGated"),
    ("kimi_linear", "KimiLinearRMSNormGated"),
    ("lara_mini", "LaraMiniRMSNormGated"),
    ("mamba2", "MambaRMSNormGated"),
    ("nemotron_h", "NemotronHRMSNormGated"),
    ("olmo_hybrid", "OlmoHybridRMSNormGated"),
    ("qwen3_5", "Qwen3_5RMSNormGated"),
    ("qwen3_5_moe", "Qwen3_5MoeRMSNormGated"),
    ("qwen3_next", "Qwen3NextRMSNormGated"),
    ("zamba2", "Zamba2RMSNormGated"),
]
GROUPED = {"bamba", "granitemoehybrid", "mamba2", "nemotron_h", "zamba2"}
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def real(model, name):
    cls = getattr(importlib.import_module(f"transformers.models.{model}.modeling_{model}"), name)
    module = cls(WIDTH, **({"group_size": GROUP} if model in GROUPED else {}))
    module.weight = nn.Parameter(torch.randn(WIDTH))
    module.variance_epsilon = 1e-3
    return module


def rows(dtype, *shape):
    x = torch.randn(*shape, WIDTH, dtype=torch.float64)
    return (x * torch.logspace(-3, 1, shape[-1], dtype=torch.float64)[:, None]).to(dtype)


def text_of(module):
    return fk.source(module).text


@pytest.mark.parametrize("model, name", REAL)
def test_norm_of_transformers_fuses_with_the_same_bits(model, name):
    module = real(model, name)
    plan = fk.plan(module)
    assert [site.fusion for site in plan.sites] == ["gated_rms_norm"], [r.message for r in plan.refusals]
    assert plan.refusals == ()
    for weight_dtype, dtype in itertools.product(DTYPES, DTYPES):
        module.to(weight_dtype)
        for shape in ((5,), (2, 3), (2, 2, 3)):
            x, gate = rows(dtype, *shape), rows(dtype, *shape)
            want = module(x, gate)
            with plan.apply():
                assert "kernels.gated_rms_norm(" in text_of(module)
                got = module(x, gate)
            assert got.dtype == want.dtype and torch.equal(got, want)


@pytest.mark.parametrize("model, name", [item for item in REAL if item[0] in GROUPED])
def test_a_gate_of_none_is_no_gate_as_before(model, name):
    module, x = real(model, name), rows(torch.bfloat16, 2, 3)
    want, positional = module(x), module(x, None)
    with fk.fuse(module):
        assert text_of(module).count("if gate is not None:") == 2
        assert torch.equal(module(x), want) and torch.equal(module(x, gate=None), positional)


def test_a_gate_of_none_fails_where_it_did():
    module = real("kimi_linear", "KimiLinearRMSNormGated")
    with fk.fuse(module), pytest.raises(ValueError, match="gate is a NoneType; it must be a tensor"):
        module(rows(torch.float32, 2, 3))


def test_line_of_mamba2_and_of_qwen3_next():
    module = real("mamba2", "MambaRMSNormGated")
    with fk.fuse(module):
        line = (
            "hidden_states, gate, self.weight, self.variance_epsilon, "
            "group_size=self.group_size, gate_first=True"
        )
        assert line in text_of(module)
    module = real("qwen3_next", "Qwen3NextRMSNormGated")
    with fk.fuse(module):
        line = 'hidden_states, gate, self.weight, self.variance_epsilon, act=self.activation, output="input"'
        assert line in text_of(module) and "rsqrt" not in text_of(module)


def test_settings_are_read_from_the_instance():
    model = nn.ModuleList([real("mamba2", "MambaRMSNormGated"), real("qwen3_next", "Qwen3NextRMSNormGated")])
    x, gate = rows(torch.float32, 2, 3), rows(torch.float32, 2, 3)
    before = [module(x, gate) for module in model]
    with fk.fuse(model) as fused:
        assert len(fused.sites) == 2
        model[0].group_size, model[1].activation = 12, "sigmoid"
        model[0].variance_epsilon = model[1].variance_epsilon = 0.5
        model[1].weight = nn.Parameter(torch.randn(WIDTH))
        got = [module(x, gate) for module in model]
    for module, mine, old in zip(model, got, before, strict=True):
        assert torch.equal(mine, module(x, gate)) and not torch.equal(mine, old)


@pytest.mark.parametrize("model, name", [REAL[6], REAL[11], REAL[4]])
def test_gradients_equal(model, name):
    module = real(model, name).double()
    x, gate = rows(torch.float64, 2, 3).requires_grad_(), rows(torch.float64, 2, 3).requires_grad_()
    wanted = [x, gate, module.weight]
    want = torch.autograd.grad(module(x, gate).square().sum(), wanted)
    with fk.fuse(module):
        got = torch.autograd.grad(module(x, gate).square().sum(), wanted)
    torch.testing.assert_close(got, want)


class Gated(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH))
        self.eps = 1e-3


class ByMethod(Gated):
    def _norm(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)

    def forward(self, x, z):
        return (self.weight * self._norm(x.float()) * torch.sigmoid(z.float())).to(x.dtype)


class Weightless(nn.Module):
    def forward(self, x, z=None):
        if z is not None:
            x = x * F.silu(z)
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-3)


class GateRounded(Gated):
    def forward(self, gate, x):
        h = x.float()
        h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + self.eps)
        return (1 + self.weight) * h.to(x.dtype) * F.silu(gate.float()).to(x.dtype)


@pytest.mark.parametrize("cls", [ByMethod, Weightless, GateRounded])
def test_other_spellings_fuse_with_the_same_bits(cls):
    module = cls()
    plan = fk.plan(module)
    assert [site.fusion for site in plan.sites] == ["gated_rms_norm"], [r.message for r in plan.refusals]
    for weight_dtype, dtype in itertools.product(DTYPES, DTYPES):
        module.to(weight_dtype)
        x, gate = rows(dtype, 2, 3), rows(dtype, 2, 3)
        want = module(x, gate)
        with plan.apply():
            got = module(x, gate)
        assert got.dtype == want.dtype and torch.equal(got, want)


# -- what only looks like one ----------------------------------------------------------------------


class LayerNormGated(Gated):
    def forward(self, x, gate):
        x = x - x.mean(-1, keepdim=True)
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)) * F.silu(gate)


class GateOnlySquared(Gated):
    def forward(self, x, gate):
        scale = torch.rsqrt((x * F.silu(gate)).pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * (x * scale)


class GatedTwice(Gated):
    def forward(self, x, gate):
        x = x * F.silu(gate)
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)) * F.silu(gate)


class ManualAct(Gated):
    def forward(self, x, gate):
        return self.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * (F.silu(gate) + 1)


class SeveralSteps(Gated):
    act = "gelu_new"

    def forward(self, x, gate=None):
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * x * ACT2FN[self.act](gate)


class PrintsGated(Gated):
    def forward(self, x, gate):
        print("gating")
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)) * F.silu(gate)


class BranchesOnGate(Gated):
    def forward(self, x, gate):
        if gate.shape[-1] != x.shape[-1]:
            gate = gate.repeat(1, 1, 2)
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)) * F.silu(gate)


class NumberOfGroups(Gated):
    def forward(self, x, gate):
        h = (x * F.silu(gate)).view(*x.shape[:-1], 3, 16)
        h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * h.view(*x.shape)


@pytest.mark.parametrize(
    "cls, said",
    [
        (LayerNormGated, "it subtracts the mean"),
        (GateOnlySquared, "its gate is not multiplied in once"),
        (GatedTwice, "its gate is not multiplied in once"),
        (ManualAct, "something is added to it"),
        (PrintsGated, 'it also does this: print("gating")'),
        (BranchesOnGate, "it branches on `gate.shape[-1] != x.shape[-1]`"),
        (NumberOfGroups, "the size of its groups is no attribute of the module"),
    ],
)
def test_near_gated_norm_is_refused_and_says_why(cls, said):
    plan = fk.plan(cls())
    assert plan.sites == ()
    (refusal,) = plan.refusals
    assert (refusal.fusion, refusal.reason) == ("gated_rms_norm", "not-this-function")
    assert "it looks like a gated RMSNorm" in refusal.message and said in refusal.message


def test_activation_of_several_steps_is_no_silence():
    plan = fk.plan(SeveralSteps())
    (refusal,) = plan.refusals
    assert plan.sites == () and (refusal.fusion, refusal.reason) == ("rms_norm", "not-this-function")


def test_only_and_exclude_know_it():
    module = real("qwen3_next", "Qwen3NextRMSNormGated")
    assert len(fk.plan(module, only="gated_rms_norm").sites) == 1
    assert fk.plan(module, exclude="gated_rms_norm").sites == ()


GATES = ["F.silu(z)", "F.silu(z.float())", "torch.sigmoid(z.float()).to(x.dtype)", "z.tanh()"]
CASTS = ["{}", "{}.float()", "{}.to(x.dtype)", "{}.type_as(self.weight)"]


@settings(max_examples=40, deadline=None)
@given(st.sampled_from(GATES), st.sampled_from(CASTS), st.sampled_from(CASTS), st.booleans(), st.booleans())
def test_any_gate_is_fused_in_its_own_bits_or_refused(tmp_path_factory, gate, first, last, front, optional):
    gated = f"h = {first.format('h')} * {gate}"
    normed = "h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-3)"
    gating = [f"if z is not None: {gated}"] if optional else [gated]
    lines = ["h = x.float()", *gating, normed] if front else ["h = x.float()", normed, *gating]
    lines.append(f"return {last.format('(self.weight * h)')}")
    text = "import torch\nimport torch.nn.functional as F\nfrom torch import nn\n\n\nclass Made(nn.Module):\n"
    text += f"    def forward(self, x, z{'=None' if optional else ''}):\n"
    text += "".join(f"        {line}\n" for line in lines)
    path = tmp_path_factory.mktemp("made") / "made.py"
    path.write_text(text)
    names = {}
    exec(compile(text, str(path), "exec"), names)
    module = names["Made"]()
    module.weight = nn.Parameter(torch.randn(WIDTH))
    plan = fk.plan(module)
    (found,) = (*plan.sites, *plan.refusals)
    assert found.fusion in ("gated_rms_norm", "rms_norm")
    for dtype, weight_dtype in itertools.product(DTYPES, DTYPES):
        module.to(weight_dtype)
        x, z = rows(dtype, 2, 3), rows(dtype, 2, 3)
        calls = [(x, z), (x,), (x, None)] if optional else [(x, z), (x, z.double())]
        want = [module(*call) for call in calls]
        with plan.apply():
            got = [module(*call) for call in calls]
        for mine, theirs in zip(got, want, strict=True):
            assert mine.dtype == theirs.dtype and torch.equal(mine, theirs)
