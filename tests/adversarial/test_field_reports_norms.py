"""Field reports of kinds 19 to 29 and 55 to 60: norms, gates, routers (all: test_field_reports.py)."""

import copy
import itertools

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F

import fusekit as fk
from tests.adversarial.cases import Cases, Pair, check_values, check_verdict

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
cases = Cases()


class Norm(nn.Module):
    def __init__(self, width=64, eps=1e-6):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.randn(width)), eps


def assert_same_bits(module, fusion, inputs=1, width=64):
    """`module` is one `fusion`, with the same bits and the same dtype for all dtypes of weight and input."""
    plan = fk.plan(module)
    assert [site.fusion for site in plan.sites] == [fusion], [no.message for no in plan.refusals]
    for own, other in itertools.product(DTYPES, DTYPES):
        module.to(own)
        given = [torch.randn(4, width).to(other) for _ in range(inputs)]
        want = module(*given)
        with plan.apply():
            got = module(*given)
        assert got.dtype == want.dtype and torch.equal(got, want)


def assert_no_norm(module, said):
    plan = fk.plan(module)
    assert not plan.sites
    (no,) = plan.refusals
    assert no.reason == "not-this-function" and said in no.message, no.message


# -- 19: an offset on the weight -------------------------------------------------------------------


class Gemma(Norm):
    def forward(self, x):
        h = x.float()
        h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + self.eps)
        return (h * (1.0 + self.weight.float())).to(x.dtype)


def test_19_an_offset_is_added_as_exactly_as_before():
    module = Gemma()
    nn.init.normal_(module.weight, std=1e-3)  # of this much, bfloat16 beside 1 keeps nothing
    assert_same_bits(module, "rms_norm")


class LlamaRMSNorm(Norm):
    """A name like Llama's, and another weight."""

    def forward(self, x):
        h = x.float()
        h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + self.eps)
        return (h * (self.weight.float() + self.weight.float() ** 2)).to(x.dtype)


def test_19_a_weight_that_is_changed_in_another_way_is_refused():
    module = LlamaRMSNorm()
    assert_no_norm(module, "something is added to it")


# -- 20: where it is cast back ---------------------------------------------------------------------


class CastBeforeTheWeight(Norm):
    def forward(self, x):
        h = x.float()
        h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * h.to(x.dtype)


class CastBehindTheWeight(Norm):
    def forward(self, x):
        h = x.float()
        h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + self.eps)
        return (self.weight * h).to(x.dtype)


@pytest.mark.parametrize("cls", [CastBeforeTheWeight, CastBehindTheWeight])
def test_20_both_orders_of_the_cast_keep_their_bits_and_their_dtype(cls):
    assert_same_bits(cls(), "rms_norm")


class CastBetweenScalings(Norm):
    def forward(self, x):
        h = x.float()
        scale = torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + self.eps).to(torch.float16)
        return (self.weight * h * scale).to(x.dtype)


def test_20_a_cast_that_no_kernel_has_is_refused():
    assert_no_norm(CastBetweenScalings(), "no order of rounding gives its bits")


# -- 28: what is small in one layer grows with depth ------------------------------------------------


class Layer(nn.Module):
    def __init__(self, norm):
        super().__init__()
        self.norm, self.linear = norm, nn.Linear(64, 64, bias=False)
        nn.init.normal_(self.linear.weight, std=3 / 8)

    def forward(self, x):
        return x + torch.tanh(self.linear(self.norm(x)))


@pytest.mark.parametrize("cls", [CastBeforeTheWeight, CastBehindTheWeight])
def test_28_forty_eight_layers_end_with_the_same_bits(cls):
    model = nn.Sequential(*(Layer(cls()) for _ in range(48))).bfloat16()
    x = torch.randn(4, 64).bfloat16()
    want = model(x)
    with fk.fuse(model) as fused:
        assert len(fused.sites) == 48
        assert torch.equal(model(x), want)


def test_28_verify_sees_one_wrong_norm_at_the_end_of_the_stack():
    model = nn.Sequential(*(Layer(CastBeforeTheWeight()) for _ in range(12))).bfloat16().eval()
    plan = fk.plan(model)
    assert plan.verify({"input": torch.randn(4, 64).bfloat16()}).ok
    with pytest.MonkeyPatch.context() as patch:
        right = fk.kernels.rms_norm
        patch.setattr(fk.kernels, "rms_norm", lambda *args, **options: right(*args, **options) * 1.05)
        assert not plan.verify({"input": torch.randn(4, 64).bfloat16()}).ok


# -- 29: eps -----------------------------------------------------------------------------------------


def test_29_each_norm_reads_its_own_eps_as_it_is_now():
    norms = [CastBeforeTheWeight(eps=1.0), CastBeforeTheWeight(eps=1e-6), nn.RMSNorm(64, eps=0.1)]
    model = nn.ModuleList(norms)
    twin, x = copy.deepcopy(model), torch.randn(4, 64)
    fused = fk.fuse(model)
    assert len(fused.sites) == 2  # the one of PyTorch needs no rewriting
    for value in (None, 0.5):
        for own, other in zip(model, twin, strict=True):
            if value is not None:
                own.eps = other.eps = value
            assert torch.equal(own(x), other(x))


class EpsOfTheDtype(Norm):
    def forward(self, x):
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + torch.finfo(x.dtype).eps))


def test_29_an_eps_that_comes_from_elsewhere_is_itself_or_refused():
    module = EpsOfTheDtype()
    twin = copy.deepcopy(module)
    plan = fk.plan(module)
    assert plan.sites or plan.refusals
    plan.apply()
    for dtype in DTYPES:
        x = (torch.randn(4, 64) * 1e-3).to(dtype)
        assert torch.equal(module.to(dtype)(x), twin.to(dtype)(x))


# -- 55: rows that are packed or interleaved ---------------------------------------------------------


@cases.fuses("packed q")
class Kind55PackedByHead(Pair):
    """Queries, keys and values of each head lie together, as in GPT-NeoX; beside them another linear."""

    def __init__(self):
        super().__init__()
        self.packed = nn.Linear(8, 24)

    def forward(self, x):
        q, k, v = self.packed(x).view(*x.shape[:-1], 2, 3, 4).unbind(-2)
        return q + k, v * 1, self.q(x) * 1


@cases.refuses("not-this-function")
class Kind55GateAndUpInterleaved(Pair):
    """The columns of gate and up alternate, as in gpt-oss: halves would be other columns."""

    def forward(self, x):
        y = self.q(x)
        return F.silu(y[..., ::2]) * y[..., 1::2]


# -- 56: where the gate and the weight stand -----------------------------------------------------------


class NormThenGate(Norm):
    def forward(self, x, gate):
        h = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * h * F.silu(gate)


class GateThenNorm(Norm):
    def forward(self, x, gate):
        h = x * F.silu(gate)
        h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * h


class WeightThenNorm(Norm):
    def forward(self, x, gate):
        h = x * self.weight
        h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + self.eps)
        return h * F.silu(gate)


@pytest.mark.parametrize("cls", [NormThenGate, GateThenNorm])
def test_56_gate_and_norm_keep_their_order(cls):
    assert_same_bits(cls(), "gated_rms_norm", inputs=2)


def test_56_a_weight_in_front_of_the_norm_is_refused():
    assert_no_norm(WeightThenNorm(), "its input is scaled before it is normalised")


# -- 57: a norm over part of the features --------------------------------------------------------------


class VarianceSize(Norm):
    def __init__(self, size):
        super().__init__()
        self.size = size

    def forward(self, x):
        part = x if self.size is None else x[..., : self.size]
        return self.weight * (x * torch.rsqrt(part.pow(2).mean(-1, keepdim=True) + self.eps))


def test_57_the_size_of_the_variance_is_that_of_each_instance():
    model = nn.ModuleList([VarianceSize(None), VarianceSize(32), VarianceSize(64)])
    twin, x = copy.deepcopy(model), torch.randn(4, 64)
    plan = fk.plan(model)
    assert "1" not in {site.name for site in plan.sites} and "1" in {no.name for no in plan.refusals}
    plan.apply()
    for own, other in zip(model, twin, strict=True):
        torch.testing.assert_close(own(x), other(x))
    for own, other in zip(model, twin, strict=True):  # and as it is set later
        own.size = other.size = 16
        torch.testing.assert_close(own(x), other(x))


# -- 59: routers ----------------------------------------------------------------------------------------


@cases.fuses("q k")
class Kind59Router(Pair):
    """Groups are chosen with a bias that does not enter the weights; two linears score one input."""

    def __init__(self):
        super().__init__()
        self.register_buffer("bias", torch.linspace(-0.3, 0.3, 8))

    def forward(self, x):
        scores, other = torch.sigmoid(self.q(x)), self.k(x)
        biased = scores + self.bias
        groups = biased.unflatten(-1, (2, 4)).topk(2, -1).values.sum(-1).topk(1, -1).indices
        mask = torch.zeros_like(biased.unflatten(-1, (2, 4))[..., 0]).scatter(-1, groups, 1.0)
        picked = biased.masked_fill(mask.repeat_interleave(4, -1) == 0, -9.0).topk(2, -1).indices
        weights = scores.gather(-1, picked)
        return picked, weights / weights.sum(-1, keepdim=True) * 2.5, other * 1


@cases.refuses("called-twice", "different-branches", "module-escapes", "input-may-be-written")
class Kind59ExpertsInALoop(Pair):
    def forward(self, x):
        found = torch.zeros_like(x)
        for expert in (self.q, self.k):
            found = found + expert(x)
        return found


# -- 60: autocast and mixed dtypes -------------------------------------------------------------------------


@pytest.mark.parametrize("cls", [CastBeforeTheWeight, CastBehindTheWeight, Gemma])
def test_60_under_autocast_a_norm_keeps_its_dtype_and_its_bits(cls):
    module = cls()
    given = [torch.randn(4, 64), torch.randn(4, 64).bfloat16()]
    for x in given:
        with torch.autocast("cpu", torch.bfloat16):
            want = module(x)
            with fk.fuse(module) as fused:
                assert len(fused.sites) == 1
                got = module(x)
        assert got.dtype == want.dtype and torch.equal(got, want)


@pytest.mark.parametrize("case", cases, ids=str)
def test_values(case):
    check_values(case)


@pytest.mark.parametrize("case", cases, ids=str)
def test_verdict(case):
    check_verdict(case)
