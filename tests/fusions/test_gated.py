"""Gated products in the dataflow: slices of one linear, scalings and casts, and what only looks like one."""

import re

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F

import fusekit as fk


class Cut(nn.Module):
    """One linear whose output is cut in two."""

    def __init__(self, act=None):
        super().__init__()
        self.gate_up = nn.Linear(8, 24)
        self.down = nn.Linear(12, 8)
        self.act = act or nn.SiLU()
        self.drop = nn.Dropout(0.5)
        self.half = 12

    def forward(self, x):
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down(self.act(gate) * up)


class UpNamedLikeTheOutput(Cut):
    def forward(self, x):
        up = self.gate_up(x)

        gate, up = up.chunk(2, dim=-1)
        up = up * self.act(gate)

        return self.down(up)


class UpFirst(Cut):
    def forward(self, x):
        up, gate = torch.chunk(self.gate_up(x), 2, dim=-1)
        return self.down(up * self.act(gate))


class SplitBySize(Cut):
    def forward(self, x):
        gate, up = torch.split(self.gate_up(x), self.half, dim=-1)
        return self.down(torch.mul(self.act(gate), up))


class SplitBySizes(Cut):
    def forward(self, x):
        gate, up = self.gate_up(x).split([self.half, self.half], -1)
        return self.down(up.mul(self.act(gate)))


class Sliced(Cut):
    def forward(self, x):
        y = self.gate_up(x)
        return self.down(self.act(y[..., : self.half]) * y[..., self.half :])


class Indexed(Cut):
    def forward(self, x):
        halves = self.gate_up(x).chunk(2, dim=-1)
        return self.down(self.act(halves[0]) * halves[1])


class Viewed(Cut):
    def forward(self, x, layer=None):
        y = self.gate_up(x) if layer is None else self.gate_up(x, layer)
        n, t, _ = x.shape
        y = y.view(n, t, 2, -1)
        return self.down(self.act(y[..., 0, :]) * y[..., 1, :])


class Apart(Cut):
    def forward(self, x):
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        gate = self.act(gate)
        return self.down(self.drop(gate * up))


class Scaled(Cut):
    def __init__(self, act=None):
        super().__init__(act)
        self.scale = nn.Parameter(torch.rand(12) + 0.5)
        self.by = 0.37

    def forward(self, x):
        gate, up = (self.gate_up(x) * self.by).chunk(2, dim=-1)
        return self.down((self.act(gate.float() * self.scale) * (up.float() / 3)).to(x.dtype))


class WithoutAnotherLinear(Cut):
    def forward(self, x):
        hidden, gate = self.gate_up(x).chunk(2, dim=-1)
        return hidden * F.gelu(gate)


class OneLinearInAll(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate_up = nn.Linear(8, 24)

    def forward(self, x):
        y = self.gate_up(x)
        return y[..., 12:] * F.silu(y[..., :12])


CUT = [UpNamedLikeTheOutput, UpFirst, SplitBySize, SplitBySizes, Sliced, Indexed, Viewed, Apart, Scaled]
CUT += [Cut, WithoutAnotherLinear, OneLinearInAll]


@pytest.mark.parametrize("cls", CUT)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_linear_cut_in_two_keeps_every_bit(cls, dtype):
    module, x = cls().to(dtype), torch.randn(2, 5, 8, dtype=dtype)
    parameters = dict(module.named_parameters())
    plan = fk.plan(module)
    assert [(site.fusion, site.parts) for site in plan.sites] == [("glu", ("gate_up",))]
    assert plan.refusals == ()
    for training in (False, True):
        module.train(training)
        torch.manual_seed(0)
        want = module(x)
        wanted = torch.autograd.grad(want.sum(), [p for p in module.parameters()], allow_unused=True)
        with fk.fuse(module):
            assert "act_and_mul" in fk.source(module).text
            assert not hasattr(module, "merged_glu")
            assert all(p is parameters[name] for name, p in module.named_parameters())
            torch.manual_seed(0)
            got = module(x)
            grads = torch.autograd.grad(got.sum(), [p for p in module.parameters()], allow_unused=True)
        assert torch.equal(got, want) and got.dtype == want.dtype
        assert all(a is b is None or torch.equal(a, b) for a, b in zip(grads, wanted, strict=True))


def test_a_hook_on_the_linear_that_is_cut_is_called_as_ever():
    module, x = Cut(), torch.randn(2, 5, 8)
    module.gate_up.register_forward_hook(lambda module, args, output: output * 3)
    want = module(x)
    with fk.fuse(module) as fused:
        assert [site.fusion for site in fused.sites] == ["glu"]
        assert torch.equal(module(x), want)


def test_the_linear_that_is_cut_may_be_merged_with_its_sibling():
    class Beside(Cut):
        def __init__(self):
            super().__init__()
            self.other = nn.Linear(8, 8)

        def forward(self, x):
            y = self.gate_up(x)
            z = self.other(x)
            gate, up = y.chunk(2, dim=-1)
            return self.down(self.act(gate) * up) + z

    module, x = Beside(), torch.randn(2, 5, 8)
    want = module(x)
    plan = fk.plan(module)
    sites = {(site.fusion, site.parts) for site in plan.sites}
    assert sites == {("glu", ("gate_up",)), ("columns", ("gate_up", "other"))}
    with plan.apply():
        torch.testing.assert_close(module(x), want)
    for first, second in (("glu", "columns"), ("columns", "glu")):
        with fk.fuse(module, only=first), fk.fuse(module) as then:
            assert [site.fusion for site in then.sites] == [second]
            torch.testing.assert_close(module(x), want)


class OfTheRoundBefore(Cut):
    def forward(self, x):
        y = self.gate_up(x)
        g = h = torch.full_like(y[..., 12:], 2.0)
        for _ in range(2):
            h = h + g * y[..., 12:]
            g = self.act(y[..., :12])
        return self.down(h)


class ANumberAtFirst(Cut):
    def forward(self, x):
        y = self.gate_up(x)
        u = 2.0
        for _ in range(2):
            h = self.act(y[..., :12]) * u
            u = y[..., 12:]
        return self.down(h)


@pytest.mark.parametrize("cls", [OfTheRoundBefore, ANumberAtFirst])
def test_a_factor_of_the_round_before_stays_where_it_is(cls):
    module, x = cls(), torch.randn(2, 5, 8)
    want = module(x)
    plan = fk.plan(module)
    (refusal,) = plan.refusals
    assert (refusal.fusion, refusal.reason) == ("glu", "not-this-function")
    assert "of an earlier round of the loop" in refusal.message
    with plan.apply():
        assert torch.equal(module(x), want)


# -- what is no gated product ------------------------------------------------------------------


class Interleaved(Cut):
    def forward(self, x):
        y = self.gate_up(x)
        return self.down(self.act(y[..., ::2]) * y[..., 1::2])


class OneHalfTwice(Cut):
    def forward(self, x):
        y = self.gate_up(x)
        return self.down(self.act(y[..., :12]) * y[..., 0:12])


class Overlapping(Cut):
    def forward(self, x):
        y = self.gate_up(x)
        return self.down(self.act(y[..., :12]) * y[..., 6:18])


class UnequalWidths(Cut):
    def forward(self, x):
        gate, up = self.gate_up(x).split([1, 12, 11], dim=-1)[:2]
        return self.down(self.act(gate) * up)


class AlongTheSequence(Cut):
    def __init__(self, act=None):
        super().__init__(act)
        self.gate_up = nn.Linear(8, 12)

    def forward(self, x):
        y = self.gate_up(x)
        return self.down(self.act(y[:, :3]) * y[:, 3:6])


class FromTheFront(Cut):
    def forward(self, x):
        gate, up = self.gate_up(x).chunk(2, 2)
        return self.down(self.act(gate) * up)


class BothActivated(Cut):
    def forward(self, x):
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down(torch.sigmoid(gate) * torch.tanh(up))


class OneActivationForBoth(Cut):
    def forward(self, x):
        gate, up = self.act(self.gate_up(x)).chunk(2, dim=-1)
        return self.down(self.act(gate) * up)


class Clamped(Cut):
    def forward(self, x):
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down(self.act(gate.clamp(max=7.0)) * up.clamp(min=-7.0, max=7.0))


class ClampedAfter(Cut):
    def forward(self, x):
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down(self.act(gate).clamp(max=7.0) * up)


class UpPlusOne(Cut):
    def forward(self, x):
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down(self.act(gate) * (up + 1))


class OnePlusTanh(Cut):
    def forward(self, x):
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down((1 + torch.tanh(gate)) * up)


class Sum(Cut):
    def forward(self, x):
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down(self.act(gate) + up)


class ThirdFactor(Cut):
    def forward(self, x):
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down(0.5 * self.act(gate) * up)


class DropoutBetween(Cut):
    def forward(self, x):
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down(self.drop(self.act(gate)) * up)


class InPlaceProduct(Cut):
    def forward(self, x):
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        h = self.act(gate)
        h *= up
        return self.down(h)


class WrittenOut(Cut):
    def forward(self, x):
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down(gate * torch.sigmoid(gate) * up)


class WrittenOutWithSlope(Cut):
    def forward(self, x):
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        glu = gate * torch.sigmoid(gate * 1.702)
        return self.down(up * glu)


class OwnOperator(Cut):
    def forward(self, x):
        return self.down(F.glu(self.gate_up(x), dim=-1))


class GatesMore(Cut):
    def forward(self, x):
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        scanned = torch.cumsum(up, 1) + up
        return self.down(self.act(gate) * scanned)


class ScaledByAnInput(Cut):
    def forward(self, x, scale=1.0):
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down(self.act(gate * scale) * up)


@pytest.mark.parametrize(
    ("cls", "reason", "why"),
    [
        (Interleaved, "not-this-function", "columns of gate_up are interleaved"),
        (OneHalfTwice, "not-this-function", "is not cut along its columns into gate and up"),
        (Overlapping, "not-this-function", "is not cut along its columns into gate and up"),
        (UnequalWidths, "not-this-function", "different sizes"),
        (AlongTheSequence, "not-this-function", "is not cut along its columns"),
        (FromTheFront, "layout", "counts the dimension from the front"),
        (BothActivated, "not-this-function", "both factors are activated"),
        (OneActivationForBoth, "not-this-function", "both factors are activated|before the product"),
        (Clamped, "not-this-function", "limits a factor"),
        (ClampedAfter, "not-this-function", "limits a factor"),
        (UpPlusOne, "not-this-function", r"up \+ 1 comes before the product"),
        (OnePlusTanh, "not-this-function", "comes between the activation and the product"),
        (Sum, "not-this-function", "is a sum"),
        (ThirdFactor, "not-this-function", "is a third factor"),
        (DropoutBetween, "not-this-function", "draws random numbers"),
        (InPlaceProduct, "not-this-function", "writes the product into a factor"),
        (WrittenOut, "not-this-function", "written out"),
        (WrittenOutWithSlope, "not-this-function", "written out"),
        (OwnOperator, "not-this-function", "one operator already"),
        (GatesMore, "not-this-function", "no slice of it"),
        (ScaledByAnInput, "not-this-function", "comes before the product"),
    ],
)
def test_what_only_looks_like_a_gated_product_says_why(cls, reason, why):
    plan = fk.plan(cls())
    assert plan.sites == ()
    (refusal,) = plan.refusals
    assert refusal.fusion == "glu" and refusal.parts == ("gate_up",) and refusal.line
    assert re.fullmatch(reason, refusal.reason), refusal
    assert re.search(why, refusal.message), refusal.message


class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(8, 12)
        self.up = nn.Linear(8, 12)
        self.third = nn.Linear(8, 12)
        self.down = nn.Linear(12, 8)
        self.act = nn.GELU()
        self.drop = nn.Dropout(0.5)
        self.by = 0.3
        self.gates = nn.Parameter(torch.rand(12))
        self.ups = nn.Parameter(torch.rand(1))


class ScaledPair(Pair):
    def forward(self, x):
        return self.down(self.up(x) * self.act(self.gate(x) * self.by))


class ScaledByParameters(Pair):
    def forward(self, x):
        gate = self.gate(x) * (self.gates * self.ups)
        up = self.ups * self.up(x)
        return self.down(self.act(gate) * up)


class CastPair(Pair):
    def forward(self, x):
        gate = self.gate(x)
        up = self.up(x)
        # the product is taken in float32
        return self.down((self.act(gate.float()) * up.float()).to(gate.dtype))


class ProductScaled(Pair):
    def forward(self, x):
        return self.down(self.act(self.gate(x)) * self.up(x) * self.by)


class UpScaledInside(Pair):
    def forward(self, x):
        return self.down(self.act(self.gate(x)) * (2 * self.up(x)))


@pytest.mark.parametrize("cls", [ScaledPair, ScaledByParameters, CastPair, ProductScaled, UpScaledInside])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_scalings_and_casts_of_two_linears_stay_where_they_are(cls, dtype):
    module, x = cls().to(dtype), torch.randn(2, 5, 8, dtype=dtype)
    want = module(x)
    plan = fk.plan(module)
    assert [(site.fusion, site.parts) for site in plan.sites] == [("glu", ("gate", "up"))]
    assert plan.refusals == ()
    with plan.apply():
        torch.testing.assert_close(module(x), want)


class DifferentInputs(Pair):
    def forward(self, x, y):
        return self.down(torch.sigmoid(self.gate(x)) * self.up(y))


class ThreeLinears(Pair):
    def forward(self, x):
        return self.down(self.up(x) * self.third(x) * self.act(self.gate(x)))


class Reshaped(Pair):
    def forward(self, x):
        gate = self.gate(x).view(*x.shape[:-1], 3, 4)
        return self.down((self.act(gate) * self.up(x).view(*x.shape[:-1], 3, 4)).flatten(-2))


class SumOfTwo(Pair):
    def forward(self, x):
        return self.down(self.act(self.gate(x)) + self.up(x))


class DropoutOnUp(Pair):
    def forward(self, x):
        return self.down(self.act(self.gate(x)) * self.drop(self.up(x)))


@pytest.mark.parametrize(
    ("cls", "reason", "why", "sites"),
    [
        (DifferentInputs, "different-inputs", "gate and up read different values", []),
        (ThreeLinears, "not-this-function", "has three factors", [("columns", ("up", "third", "gate"))]),
        (Reshaped, "not-this-function", "cuts or reshapes", [("columns", ("gate", "up"))]),
        (SumOfTwo, "not-this-function", "is a sum", [("columns", ("gate", "up"))]),
        (DropoutOnUp, "not-this-function", "draws random numbers", [("columns", ("gate", "up"))]),
    ],
)
def test_two_linears_that_are_no_gated_product_say_why_and_merge(cls, reason, why, sites):
    module = cls().eval()
    plan = fk.plan(module)
    (refusal,) = [refusal for refusal in plan.refusals if refusal.fusion == "glu"]
    assert refusal.reason == reason and re.search(why, refusal.message), refusal.message
    assert [(site.fusion, site.parts) for site in plan.sites] == sites
    inputs = [torch.randn(2, 5, 8) for _ in range(2 if cls is DifferentInputs else 1)]
    want = module(*inputs)
    with plan.apply():
        torch.testing.assert_close(module(*inputs), want)


class SqueezeAndExcite(Pair):
    def __init__(self):
        super().__init__()
        self.squeeze = nn.Linear(12, 12)

    def forward(self, x):
        y = self.gate(x)
        return self.down(y * torch.sigmoid(self.squeeze(y)))


class OwnSilu(Pair):
    def forward(self, x):
        y = self.gate(x)
        return self.down(y * torch.sigmoid(y))


class Residual(Pair):
    def forward(self, x):
        return self.down(self.gate(x)) + x


class GatedAttention(Cut):
    def forward(self, x):
        q, gate = self.gate_up(x).chunk(2, dim=-1)
        seen = F.scaled_dot_product_attention(q[:, None], q[:, None], q[:, None])[:, 0]
        return self.down(seen * torch.sigmoid(gate))


@pytest.mark.parametrize("cls", [SqueezeAndExcite, OwnSilu, Residual, GatedAttention])
def test_what_nobody_would_call_a_gated_product_is_not_spoken_of(cls):
    plan = fk.plan(cls())
    assert [refusal for refusal in plan.refusals if refusal.fusion == "glu"] == []
    assert plan.sites == ()
