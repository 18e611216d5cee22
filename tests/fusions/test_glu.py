"""Gated products: which fuse, and which are refused."""

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F

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
    assert refusal.reason == "not-this-function" and "act" in refusal.message


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


def test_several_lines_are_refused_with_the_line():
    module = SeveralLines()
    (refusal,) = fk.plan(module).refusals
    assert (refusal.fusion, refusal.reason) == ("glu", "different-branches")


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
    assert not plan.sites
