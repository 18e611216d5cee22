"""RMSNorm in its spellings, and what only looks like one."""

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F

import fusekit as fk


class Norm(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(16))
        self.eps = 1e-3  # large, so that its place shows


class Llama(Norm):
    def forward(self, x):
        dtype = x.dtype
        x = x.to(torch.float32)
        variance = x.pow(2).mean(-1, keepdim=True)
        x = x * torch.rsqrt(variance + self.eps)
        return self.weight * x.to(dtype)


class Olmo2(Norm):
    def forward(self, x):
        dtype = x.dtype
        x = x.to(torch.float32)
        variance = x.pow(2).mean(-1, keepdim=True)
        x = x * torch.rsqrt(variance + self.eps)
        return (self.weight * x).to(dtype)


class Gemma(Norm):
    def forward(self, x):
        output = x.float()
        output = output * torch.rsqrt(output.pow(2).mean(-1, keepdim=True) + self.eps)
        output = output * (1.0 + self.weight.float())
        return output.type_as(x)


class T5(Norm):
    def forward(self, hidden_states):
        variance = hidden_states.to(torch.float32).pow(2).mean(-1, keepdim=True)
        hidden_states = hidden_states * torch.rsqrt(variance + self.eps)
        return self.weight * hidden_states


class DividesByRoot(Norm):
    def forward(self, x):
        return self.weight * (x / torch.sqrt((x * x).mean(dim=-1, keepdim=True) + self.eps))


class Power(Norm):
    def forward(self, x):
        return x * (x.square().mean(-1, keepdim=True) + self.eps).pow(-0.5) * self.weight


class Reciprocal(Norm):
    def forward(self, x):
        return (1.0 / torch.sqrt(self.eps + torch.mean(x**2, -1, True))) * x * self.weight


class Weightless(nn.Module):
    eps = 1e-3

    def forward(self, x):
        """Has no weight."""
        h = x.float()
        return (h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-3)).to(x.dtype)


class OneLine(Norm):
    def forward(self, x): return x * torch.rsqrt((x * x).mean(-1, True) + self.eps) * self.weight  # fmt: skip


SPELLINGS = [Llama, Olmo2, Gemma, T5, DividesByRoot, Power, Reciprocal, Weightless, OneLine]


@pytest.mark.parametrize("cls", SPELLINGS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_spelling_fuses_with_the_same_bits(cls, dtype):
    module = cls()
    x = (torch.randn(4, 5, 16) * torch.logspace(-3, 2, 5)[:, None]).to(dtype)
    for weight_dtype in {dtype, torch.float32}:
        module.to(weight_dtype)
        want = module(x)
        plan = fk.plan(module)
        assert [site.fusion for site in plan.sites] == ["rms_norm"], [r.message for r in plan.refusals]
        with plan.apply():
            assert "kernels.rms_norm(" in fk.source(module).text
            got = module(x)
        assert got.dtype == want.dtype and torch.equal(got, want)


@pytest.mark.parametrize("cls", SPELLINGS)
def test_gradients_equal(cls):
    module = cls().double()
    x = torch.randn(3, 16, dtype=torch.float64, requires_grad=True)
    wanted = [x, *module.parameters()]
    want = torch.autograd.grad(module(x).square().sum(), wanted)
    with fk.fuse(module):
        got = torch.autograd.grad(module(x).square().sum(), wanted)
    torch.testing.assert_close(got, want)


def test_eps_is_read_from_the_instance():
    model = nn.Sequential(Llama(), Llama())
    model[1].eps = 0.5
    x = torch.randn(2, 16)
    want = model(x)
    with fk.fuse(model):
        assert torch.equal(model(x), want)
        model[0].eps = 2.0
        changed = model(x)
    assert torch.equal(model(x), changed) and not torch.equal(changed, want)


# -- what only looks like one ----------------------------------------------------------------------


class MeanSubtracted(Norm):
    def forward(self, x):
        x = x - x.mean(-1, keepdim=True)
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps))


class Sum(Norm):
    def forward(self, x):
        return self.weight * (x * torch.rsqrt(x.pow(2).sum(-1, keepdim=True) + self.eps))


class EpsOutside(Norm):
    def forward(self, x):
        return self.weight * (x / (torch.sqrt(x.pow(2).mean(-1, keepdim=True)) + self.eps))


class OtherAxis(Norm):
    def forward(self, x):
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-2, keepdim=True) + self.eps))


class TwoAxes(Norm):
    def forward(self, x):
        return self.weight * (x * torch.rsqrt(x.pow(2).mean((-2, -1), keepdim=True) + self.eps))


class ReturnsMore(Norm):
    def forward(self, x):
        scale = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * (x * scale), scale


class WritesItsInput(Norm):
    def forward(self, x):
        scale = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * x.mul_(scale)


class TwoInputs(Norm):
    def forward(self, x, y):
        return self.weight * (x * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + self.eps))


class Counts(Norm):
    calls = 0

    def forward(self, x):
        self.calls += 1
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps))


class Prints(Norm):
    def forward(self, x):
        print("normalising")
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps))


class Branches(Norm):
    def forward(self, x):
        if x.dtype == torch.float64:
            x = x.float()
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps))


class ThirdPower(Norm):
    def forward(self, x):
        return self.weight * (x * torch.rsqrt(x.pow(3).mean(-1, keepdim=True) + self.eps))


class EpsByProperty(nn.Module):
    reads = 0

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(16))

    @property
    def eps(self):
        self.reads += 1
        return 1e-3 * self.reads

    def forward(self, x):
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps))


class ReadsProperty(Norm):
    reads = 0

    @property
    def tick(self):
        self.reads += 1

    def forward(self, x):
        self.tick
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps))


class DropsOut(Norm):
    def forward(self, x):
        x = F.dropout(x, 0.5, self.training)
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps))


class Biased(Norm):
    def forward(self, x):
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)) + self.weight


@pytest.mark.parametrize(
    "cls",
    [
        MeanSubtracted,
        Sum,
        EpsOutside,
        OtherAxis,
        TwoAxes,
        ReturnsMore,
        WritesItsInput,
        TwoInputs,
        Counts,
        Prints,
        Branches,
        ThirdPower,
        EpsByProperty,
        ReadsProperty,
        DropsOut,
        Biased,
    ],
)
def test_near_norm_is_refused_and_says_so(cls):
    module = cls()
    plan = fk.plan(module)
    assert plan.sites == ()
    (refusal,) = plan.refusals
    assert refusal.fusion == "rms_norm"
    assert refusal.reason in ("not-this-function", "input-written")
    assert "looks like an RMSNorm" in refusal.message or refusal.reason == "input-written"


def test_computing_eps_for_one_norm_changes_nothing_for_another():
    # One class, two instances: the plan of the second must not be the first's.
    one, other = Llama(), Llama()
    other.weight = nn.Parameter(torch.randn(3, 16))
    assert [site.fusion for site in fk.plan(one).sites] == ["rms_norm"]
    assert fk.plan(other).sites == ()


@pytest.mark.parametrize(("weights", "width"), [(1, 16), (1, 1), (64, 1), (64, 64)])
def test_weight_of_one_element_and_input_of_one_column_broadcast(weights, width):
    module = Llama()
    module.weight = nn.Parameter(torch.full((weights,), 1.5))
    x = torch.randn(3, 5, width)
    want = module(x)
    plan = fk.plan(module)
    assert [site.fusion for site in plan.sites] == ["rms_norm"], [r.message for r in plan.refusals]
    with plan.apply():
        assert torch.equal(module(x), want)

    if weights == 64:
        with plan.apply(), pytest.raises(ValueError, match=r"weight has shape \[64\] and x has shape"):
            module(torch.randn(3, 5))


def test_weight_of_one_element_is_probed_over_several_columns():
    # Over one column every x becomes about 1 or -1, and roundings that differ would look alike.
    module = Olmo2()
    module.weight = nn.Parameter(torch.tensor([0.7]))
    x = (torch.randn(4, 32) * torch.logspace(-3, 2, 4)[:, None]).to(torch.bfloat16)
    want = module(x)
    with fk.fuse(module):
        assert "output=" in fk.source(module).text
        assert torch.equal(module(x), want)


class ScalarWeight(Norm):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(1.5))

    def forward(self, x):
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps))


def test_weight_that_is_a_number_is_refused_and_says_so():
    (refusal,) = fk.plan(ScalarWeight()).refusals
    assert (refusal.fusion, refusal.reason) == ("rms_norm", "not-this-function")


class CallsMethod(Norm):
    def _norm(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)

    def forward(self, x):
        output = self._norm(x.float())
        return (output * self.weight).type_as(x)


def test_method_that_computes_the_norm_is_named():
    (refusal,) = fk.plan(CallsMethod()).refusals
    assert "it calls self._norm(), a method of the module, which is not followed yet" in refusal.message
    assert refusal.line == CallsMethod.forward.__code__.co_firstlineno + 1


class BranchesOnWeight(Norm):
    def forward(self, x):
        variance = x.to(torch.float32).pow(2).mean(-1, keepdim=True)
        x = x * torch.rsqrt(variance + self.eps)
        if self.weight.dtype in [torch.float16, torch.bfloat16]:
            x = x.to(self.weight.dtype)
        return self.weight * x


def test_branch_is_quoted():
    (refusal,) = fk.plan(BranchesOnWeight()).refusals
    assert "it branches on `self.weight.dtype in [torch.float16, torch.bfloat16]`" in refusal.message
    assert refusal.line == BranchesOnWeight.forward.__code__.co_firstlineno + 3
