"""Gated products: which fuse, and which are refused."""

import copy
import functools
import operator
import re

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.functional import silu

import fusekit as fk


class Gated(nn.Module):
    def __init__(self, act=None, bias=True):
        super().__init__()
        self.gate = nn.Linear(8, 12, bias=bias)
        self.up = nn.Linear(8, 12, bias=bias)
        self.down = nn.Linear(12, 8)
        self.act = act or nn.SiLU()

    def forward(self, x):
        return self.down(self.act(self.gate(x)) * self.up(x))


class UpFirst(Gated):
    def forward(self, x):
        return self.down(self.up(x) * self.act(self.gate(x)))


class SeveralLines(Gated):
    def forward(self, x):
        gate = self.act(self.gate(x))
        up = self.up(x)
        return self.down(gate * up)


class WritesBetween(Gated):
    def forward(self, x):
        return self.down(self.act(self.gate(x)) * (x.mul_(2), self.up(x))[1])


class TwoProducts(nn.Module):
    """Two gated products in one forward, and a part whose name the rewrite also wants."""

    def __init__(self):
        super().__init__()
        self.kernels = nn.Linear(8, 12)
        self.up = nn.Linear(8, 12)
        self.gate2 = nn.Linear(8, 12)
        self.up2 = nn.Linear(8, 12)
        self.act = nn.GELU()

    def forward(self, x):
        y = self.act(self.kernels(x)) * self.up(x)
        return y - self.act(self.gate2(x)) * self.up2(x)


@pytest.mark.parametrize("cls", [Gated, UpFirst])
@pytest.mark.parametrize("act", [nn.SiLU(), nn.GELU(), nn.GELU("tanh"), nn.ReLU(), nn.Identity()])
def test_both_orders_of_the_product_fuse_and_equal(cls, act):
    module, x = cls(act), torch.randn(3, 8)
    want = module(x)
    (site,) = fk.plan(module).sites
    assert (site.fusion, site.parts) == ("glu", ("gate", "up"))
    with fk.fuse(module):
        assert "act_and_mul" in fk.source(module).text
        torch.testing.assert_close(module(x), want)


def test_two_products_of_one_forward_have_a_storage_each():
    module, x = TwoProducts(), torch.randn(3, 8)
    want = module(x)
    plan = fk.plan(module)
    assert [site.parts for site in plan.sites] == [("kernels", "up"), ("gate2", "up2")]
    with plan.apply():
        torch.testing.assert_close(module(x), want)
    for site in plan.sites:
        with fk.plan(module).apply() if site is plan.sites[0] else fk.fuse(module):
            torch.testing.assert_close(module(x), want)


def test_activation_with_a_hook_is_refused():
    module = Gated()
    module.act.register_forward_hook(lambda module, args, output: output * 2)
    (refusal,) = fk.plan(module).refusals
    assert refusal.reason == "input-may-be-written" and "act runs" in refusal.message
    assert "carries hooks" in refusal.message and refusal.line


def test_hook_put_on_the_activation_afterwards_is_called():
    module, x = Gated(), torch.randn(3, 8)
    with fk.fuse(module):
        module.act.register_forward_hook(lambda module, args, output: output * 2)
        fused = module(x)
    torch.testing.assert_close(fused, module(x))


def test_activation_replaced_afterwards_is_used():
    module, x = Gated(), torch.randn(3, 8)
    with fk.fuse(module):
        module.act = nn.Tanh()
        fused = module(x)
    torch.testing.assert_close(fused, module(x))


class Unknown(nn.Module):
    def forward(self, x):
        return F.silu(x) + 1


@pytest.mark.parametrize("act", [Unknown(), nn.SiLU(inplace=True), nn.Dropout(0.5), nn.Softmax(-1)])
def test_unknown_or_inplace_activation_is_never_a_glu(act):
    module = Gated(act)
    plan = fk.plan(module)
    assert "glu" not in [site.fusion for site in plan.sites]
    assert plan.sites or plan.refusals


def test_activation_moves_from_its_line_into_the_product():
    module, x = SeveralLines(), torch.randn(3, 8)
    want = module(x)
    plan = fk.plan(module)
    assert [(site.fusion, site.parts) for site in plan.sites] == [("glu", ("gate", "up"))]
    assert plan.refusals == ()
    with plan.apply():
        text = fk.source(module).text
        assert "gate = gate_" in text and "kernels.act_and_mul(gate, up, self.act)" in text
        torch.testing.assert_close(module(x), want)


@pytest.mark.parametrize(
    ("act", "reason"),
    [
        (nn.SiLU(inplace=True), "input-written"),
        (nn.ReLU(inplace=True), "input-written"),
        (Unknown(), "not-this-function"),
    ],
)
def test_an_unknown_activation_on_a_line_of_its_own_moves_nowhere_and_the_linears_are_merged(act, reason):
    module, x = SeveralLines(act), torch.randn(3, 8)
    want = module(x)
    want.sum().backward()
    gradient = module.gate.weight.grad.clone()
    plan = fk.plan(module)
    assert [(site.fusion, site.parts) for site in plan.sites] == [("columns", ("gate", "up"))]
    (refusal,) = plan.refusals
    assert (refusal.fusion, refusal.reason, refusal.parts) == ("glu", reason, ("gate", "up"))
    with plan.apply():
        module.zero_grad()
        got = module(x)
        got.sum().backward()
        torch.testing.assert_close((got, module.gate.weight.grad), (want, gradient))


def test_a_softmax_on_a_line_of_its_own_moves_nowhere():
    plan = fk.plan(SeveralLines(nn.Softmax(-1)))
    assert "glu" not in {site.fusion for site in plan.sites}
    assert "glu" in {refusal.fusion for refusal in plan.refusals}


def test_hook_of_one_instance_decides_for_that_instance_alone():
    model = nn.Sequential(Gated(), Gated(), SeveralLines(), SeveralLines())
    for hooked in (model[0], model[2]):
        hooked.act.register_forward_hook(lambda module, args, output: output * 2)
    plan = fk.plan(model)
    assert [(site.name, site.fusion) for site in plan.sites] == [("1", "glu"), ("3", "glu")]


def test_write_between_gate_and_up_is_refused():
    plan = fk.plan(WritesBetween())
    assert plan.sites == () and plan.refusals


def test_gate_and_up_of_different_widths_are_refused_or_equal():
    # Broadcasting [.., 1] against [.., 12] is legal in a product, not in act_and_mul.
    module, x = Gated(), torch.randn(3, 8)
    module.gate = nn.Linear(8, 1)
    want = module(x)
    plan = fk.plan(module)
    with plan.apply():
        torch.testing.assert_close(module(x), want)
    assert "glu" not in [site.fusion for site in plan.sites]


# -- activations that are functions ------------------------------------------------------------


class Function(Gated):
    def forward(self, x):
        return self.down(F.silu(self.gate(x)) * self.up(x))


class FunctionOfTorch(Gated):
    def forward(self, x):
        return self.down(self.up(x) * torch.sigmoid(self.gate(x)))


class FunctionByItsName(Gated):
    def forward(self, x):
        return self.down(silu(self.gate(x)) * self.up(x))


class FunctionThatCallsAMethod(Gated):
    def forward(self, x):
        return self.down(nn.functional.tanh(self.gate(x)) * self.up(x))


class FunctionHeld(Gated):
    def __init__(self, act=F.gelu):
        super().__init__()
        del self.act
        self.act = act


class Approximate(Gated):
    def forward(self, x):
        return self.down(F.gelu(self.gate(x), approximate="tanh") * self.up(x))


class NotApproximate(Gated):
    def forward(self, x):
        return self.down(F.gelu(self.gate(x), approximate="none") * self.up(x))


class Method(Gated):
    def forward(self, x):
        return self.down(self.gate(x).sigmoid() * self.up(x))


class MethodOfAName(Gated):
    def forward(self, x):
        gate_values = self.gate(x)
        return self.down(self.up(x) * gate_values.tanh())


@pytest.mark.parametrize(
    ("cls", "callee"),
    [
        (Approximate, '"gelu_pytorch_tanh"'),
        (NotApproximate, '"gelu"'),
        (Method, '"sigmoid"'),
        (Function, "F.silu"),
        (FunctionOfTorch, "torch.sigmoid"),
        (FunctionByItsName, "silu"),
        (FunctionThatCallsAMethod, "nn.functional.tanh"),
        (FunctionHeld, "self.act"),
    ],
)
def test_activation_that_is_a_function_fuses_and_equals(cls, callee):
    module, x = cls(), torch.randn(3, 8)
    want = module(x)
    wanted = torch.autograd.grad(want.sum(), list(module.parameters()))
    plan = fk.plan(module)
    assert [(site.fusion, site.parts) for site in plan.sites] == [("glu", ("gate", "up"))]
    assert plan.refusals == ()
    with plan.apply():
        assert f"kernels.act_and_mul(gate, up, {callee})" in fk.source(module).text
        torch.testing.assert_close(module(x), want)
        torch.testing.assert_close(torch.autograd.grad(module(x).sum(), list(module.parameters())), wanted)


def test_method_of_a_name_fuses_and_equals():
    module, x = MethodOfAName(), torch.randn(3, 8)
    want = module(x)
    with fk.fuse(module):
        assert 'kernels.act_and_mul(gate_values, up, "tanh")' in fk.source(module).text
        torch.testing.assert_close(module(x), want)


def test_like_instances_with_other_functions_are_told_apart():
    x = torch.randn(3, 8)
    for act, fuses in ((F.silu, True), (F.softplus, False), (torch.relu, True), (torch.relu_, False)):
        module = FunctionHeld(act)
        want = module(x)
        plan = fk.plan(module)
        assert ("glu" in [site.fusion for site in plan.sites]) is fuses
        with plan.apply():
            torch.testing.assert_close(module(x), want)


def test_function_replaced_afterwards_is_used():
    module, x = FunctionHeld(), torch.randn(3, 8)
    with fk.fuse(module):
        module.act = torch.tanh
        fused = module(x)
    torch.testing.assert_close(fused, module(x))


class ByKeyword(Gated):
    def forward(self, x):
        return self.down(F.silu(input=self.gate(x)) * self.up(x))


class Slope(Gated):
    def forward(self, x):
        return self.down(F.leaky_relu(self.gate(x), 0.3) * self.up(x))


class Softplus(Gated):
    def forward(self, x):
        return self.down(F.softplus(self.gate(x)) * self.up(x))


class Local(Gated):
    def forward(self, x):
        f = F.silu
        return self.down(f(self.gate(x)) * self.up(x))


class ShadowedModule(Gated):
    def forward(self, x, F=F):
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Partial(FunctionHeld):
    def __init__(self):
        super().__init__(functools.partial(F.gelu, approximate="tanh"))


@pytest.mark.parametrize(
    ("cls", "why"),
    [
        (ByKeyword, "is not called with one value"),
        (Slope, "is not called with one value"),
        (Softplus, "F.softplus is no activation that act_and_mul knows"),
        (Local, "f is a local name"),
        (Partial, "self.act is a partial"),
    ],
)
def test_almost_a_glu_says_why_and_merges_its_linears(cls, why):
    module, x = cls(), torch.randn(3, 8)
    want = module(x)
    plan = fk.plan(module)
    (refusal,) = plan.refusals
    assert refusal.fusion == "glu" and set(refusal.parts) == {"gate", "up"} and refusal.line
    assert re.search(why, refusal.message), refusal.message
    assert [site.fusion for site in plan.sites] == ["columns"]
    with plan.apply():
        torch.testing.assert_close(module(x), want)


class Functions:
    def __init__(self, x):
        self.x = x

    def silu(self, gate):
        self.x.zero_()
        return F.silu(gate)


def test_function_of_what_a_caller_passes_may_write_the_input():
    module, x = ShadowedModule(), torch.randn(3, 8)
    plan = fk.plan(module)
    (refusal,) = plan.refusals
    assert not plan.sites and refusal.fusion == "glu"
    assert "F.silu is a local name or belongs to an object" in refusal.message
    (refusal,) = fk.plan(module, only="columns").refusals
    assert refusal.reason == "input-may-be-written" and "F.silu" in refusal.message
    module(x, Functions(x))
    assert not x.any()


def quick_gelu(x):
    return x * torch.sigmoid(1.702 * x)


class OwnFunction(Gated):
    def forward(self, x):
        return self.down(quick_gelu(self.gate(x)) * self.up(x))


class InPlace(Gated):
    def forward(self, x):
        return self.down(F.silu(self.gate(x), inplace=True) * self.up(x))


@pytest.mark.parametrize("cls", [OwnFunction, InPlace])
def test_linears_around_a_function_that_writes_nothing_of_theirs_are_merged(cls):
    module, x = cls(), torch.randn(3, 8)
    want, plan = module(x), fk.plan(module)
    assert [(site.fusion, site.parts) for site in plan.sites] == [("columns", ("gate", "up"))]
    assert [(no.fusion, no.reason) for no in plan.refusals] == [("glu", "not-this-function")]
    with plan.apply():
        torch.testing.assert_close(module(x), want)


class Opaque(Gated):
    def forward(self, x):
        return self.down(sigmoid(self.gate(x)) * self.up(x))


sigmoid = operator.methodcaller("sigmoid")  # written in C: it has no text


class WritesTheInputToo(Gated):
    def forward(self, x):
        return self.down(written(self.gate(x), x) * self.up(x))


def written(gate, x):
    return F.silu(gate) * x.neg_().mean()


def test_function_that_writes_the_input_is_refused_for_both():
    plan = fk.plan(WritesTheInputToo())
    assert plan.sites == () and plan.refusals
    assert {no.fusion for no in plan.refusals} <= {"glu", "columns"}


# -- local names -------------------------------------------------------------------------------


class T5(Gated):
    def forward(self, x):
        gelu = self.act(self.gate(x))
        linear = self.up(x)
        x = gelu * linear
        return self.down(x)


class OutputNamedLikeTheInput(Gated):
    def forward(self, x):
        score = self.act(self.gate(x))
        x = self.up(x)

        x = score * x
        return self.down(x)


class GateNamedLikeTheOutput(Gated):
    def forward(self, x):
        h = self.act(self.gate(x))
        h = self.up(x) * h
        return self.down(h + h)


class InOneStatement(Gated):
    def forward(self, x):
        g, u = F.silu(self.gate(x)), self.up(x)
        return self.down(torch.mul(u, g))


class OverSeveralLines(Gated):
    def forward(self, x):
        g = self.act(  # the gate
            self.gate(x) * 0.5
        )
        return self.down(
            g.mul(
                # and what it lets through
                self.up(x)
            )
        )


class InABranch(Gated):
    def forward(self, x):
        if x.dim() > 1:
            g = self.act(self.gate(x))
            y = g * self.up(x)
            return self.down(y)
        return x


@pytest.mark.parametrize(
    "cls", [T5, OutputNamedLikeTheInput, GateNamedLikeTheOutput, InOneStatement, OverSeveralLines, InABranch]
)
@pytest.mark.parametrize("act", [nn.GELU(), nn.ReLU()])
def test_activated_gate_in_a_local_name_fuses_and_equals(cls, act):
    module, x = cls(act), torch.randn(3, 8)
    want = module(x)
    wanted = torch.autograd.grad(want.sum(), list(module.parameters()))
    plan = fk.plan(module)
    assert [(site.fusion, site.parts) for site in plan.sites] == [("glu", ("gate", "up"))]
    assert plan.refusals == ()
    with plan.apply():
        torch.testing.assert_close(module(x), want)
        torch.testing.assert_close(torch.autograd.grad(module(x).sum(), list(module.parameters())), wanted)


class GateReturned(Gated):
    def forward(self, x):
        g = self.act(self.gate(x))
        return self.down(g * self.up(x)), g


class GateReadBetween(Gated):
    def forward(self, x):
        g = self.act(self.gate(x))
        scale = g + 1
        return self.down(g * self.up(x)) + scale[..., :8]


class GateTwiceInTheProduct(Gated):
    def forward(self, x):
        g = self.act(self.gate(x))
        return self.down(g * self.up(x) + g)


class GateInAClosure(Gated):
    def forward(self, x):
        g = self.act(self.gate(x))
        h = g * self.up(x)
        return self.down(h) + (lambda: g[..., :8])()


class GateRead(Gated):
    """In the branch that is not taken."""

    def forward(self, x, deep=False):
        g = self.act(self.gate(x))
        h = g * self.up(x)
        if deep:
            return g
        return self.down(h)


class GateReadInTheNextRound(Gated):
    def forward(self, x):
        last = x.new_zeros(12)
        for first in (True, False):
            if not first:
                last = last + g  # noqa: F821
            g = self.act(self.gate(x))
            h = g * self.up(x)
        return self.down(h + last)


class GateWrittenAfterwards(Gated):
    def forward(self, x):
        g = self.act(self.gate(x))
        h = g * self.up(x)
        g.zero_()
        return self.down(h)


class GateIncreasedAfterwards(Gated):
    def forward(self, x):
        gate = self.gate(x)
        g = self.act(gate)
        h = g * self.up(x)
        g += 1
        return self.down(h + gate)


class GateByAnotherName(Gated):
    def forward(self, x):
        g = self.act(self.gate(x))
        same = g
        return self.down(same * self.up(x))


class InTheProductByWalrus(Gated):
    def forward(self, x):
        h = (g := self.act(self.gate(x))) * self.up(x)
        return self.down(h + g)


class GateOnSelf(Gated):
    def forward(self, x):
        self.last = self.act(self.gate(x))
        return self.down(self.last * self.up(x))


class OfTheRoundBefore(Gated):
    def forward(self, x):
        g = self.act(self.up(x))
        for _ in range(3):
            h = g * self.up(x)
            g = self.act(self.gate(x))
        return self.down(h)


class UpReadTwice(Gated):
    def forward(self, x):
        g = self.act(self.gate(x))
        u = self.up(x)
        return self.down(g * u + u)


READ = [
    GateReturned,
    GateReadBetween,
    GateTwiceInTheProduct,
    GateInAClosure,
    GateRead,
    GateReadInTheNextRound,
]
READ += [GateWrittenAfterwards, GateByAnotherName, InTheProductByWalrus, GateOnSelf, OfTheRoundBefore]


@pytest.mark.parametrize("cls", READ)
def test_activated_gate_that_others_see_is_never_taken_from_them(cls):
    module, x = cls(), torch.randn(3, 8)

    def run():
        out = module(x)
        return out if isinstance(out, tuple) else (out,)

    want = run()
    plan = fk.plan(module)
    assert "glu" not in [site.fusion for site in plan.sites]
    assert [refusal for refusal in plan.refusals if refusal.fusion == "glu" and refusal.line]
    with plan.apply():
        torch.testing.assert_close(run(), want)


def test_up_may_be_read_elsewhere_too():
    module, x = UpReadTwice(), torch.randn(3, 8)
    want = module(x)
    with fk.fuse(module) as fused:
        assert [site.fusion for site in fused.sites] == ["glu"]
        torch.testing.assert_close(module(x), want)


class WrittenBeforeTheProduct(Gated):
    def forward(self, x):
        gate, up = self.gate(x), self.up(x)
        g = self.act(gate)
        gate.mul_(2)
        return self.down(g * up)


class CastBetween(Gated):
    def forward(self, x):
        g = self.act(self.gate(x))
        with torch.no_grad():
            h = g * self.up(x)
        return self.down(h)


class IfBetween(Gated):
    def forward(self, x, wide=False):
        g = self.act(self.gate(x))
        u = self.up(x)
        if wide:
            u = u[..., :1]
        return self.down(g * u)


@pytest.mark.parametrize("wide", [False, True])
def test_an_if_between_leaves_the_factors_alone(wide):
    module, x = IfBetween(), torch.randn(3, 8)
    if wide:
        module.down = nn.Identity()
    unfused = copy.deepcopy(module)
    plan = fk.plan(module)
    assert "glu" in [site.fusion for site in plan.sites]
    plan.apply()
    torch.testing.assert_close(module(x, wide), unfused(x, wide))


@pytest.mark.parametrize("cls", [WrittenBeforeTheProduct, CastBetween])
def test_what_comes_between_the_activation_and_the_product_refuses_the_move(cls):
    module, x = cls(), torch.randn(3, 8)
    want = module(x)
    plan = fk.plan(module)
    assert "glu" not in [site.fusion for site in plan.sites]
    assert "glu" in [refusal.fusion for refusal in plan.refusals]
    with plan.apply():
        torch.testing.assert_close(module(x), want)


class OneGateForTwo(Gated):
    def __init__(self):
        super().__init__()
        self.other = nn.Linear(8, 12)

    def forward(self, x):
        gate = self.gate(x)
        y = self.act(gate) * self.up(x)
        return self.down(y + self.act(gate) * self.other(x))


def test_one_gate_of_two_products_is_merged_once():
    module, x = OneGateForTwo(), torch.randn(3, 8)
    want = module(x)
    plan = fk.plan(module)
    assert [site.parts for site in plan.sites] == [("gate", "up")]
    assert ["gate is taken by the gated product" in refusal.message for refusal in plan.refusals] == [True]
    with plan.apply():
        torch.testing.assert_close(module(x), want)


class InOneExpression(Gated):
    def forward(self, x):
        return self.down(self.act(self.gate(x + 0)) * self.up(x))


def test_one_place_has_one_refusal():
    for module in (WritesBetween(), Gated(Unknown()), InOneExpression(), OwnFunction(), Opaque()):
        assert [refusal.fusion for refusal in fk.plan(module).refusals] == ["glu"]
    (refusal,) = fk.plan(Opaque(), only="columns").refusals
    assert refusal.reason == "input-may-be-written" and "sigmoid(self.gate(x))" in refusal.message


def test_a_part_of_another_width_put_in_later_broadcasts_as_it_would():
    model = Gated()
    twin = copy.deepcopy(model)
    x = torch.randn(2, 5, 8)
    fk.fuse(model)
    model.up = twin.up = nn.Linear(8, 1)
    torch.testing.assert_close(model(x), twin(x))
