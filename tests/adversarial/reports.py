"""What the tests of the field reports share: two projections of one input, and when two modules are equal."""

import copy

import torch
import torch.nn as nn

import fusekit as fk


class Attention(nn.Module):
    """Two projections of one input, as in most of the reports."""

    def __init__(self):
        super().__init__()
        self.q_proj, self.k_proj = nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x):
        return self.q_proj(x), self.k_proj(x)


PARTS = [("q_proj", "k_proj")]


def parts(plan):
    return [site.parts for site in plan.sites]


def pair():
    """(a fused module, its unfused twin)."""
    module = Attention()
    twin = copy.deepcopy(module)
    assert parts(fk.fuse(module)) == PARTS
    return module, twin


def assert_equal(module, twin, x=None):
    """Results, gradients and states of both are the same."""
    x = torch.randn(2, 3, 8) if x is None else x
    x = x.to(next(twin.parameters()).dtype)
    found = []
    for one in (module, twin):
        leaf = x.clone().requires_grad_()
        one.zero_grad()
        results = one(leaf)
        ends = [result for result in results if result.requires_grad]
        if ends:
            sum(result.square().sum() for result in ends).backward()
        found.append((results, leaf.grad, {name: p.grad for name, p in one.named_parameters()}))
    torch.testing.assert_close(*found)
    torch.testing.assert_close(dict(module.state_dict()), dict(twin.state_dict()), rtol=0, atol=0)


def refused(module, *reasons):
    """The one refusal of a module whose parts are not fused, for one of `reasons`; calls go on as ever."""
    twin = copy.deepcopy(module)
    plan = fk.plan(module)
    assert "" not in {site.name for site in plan.sites}
    (no,) = [no for no in plan.refusals if no.name == ""]
    assert no.reason in reasons, (no.reason, no.message)
    x = torch.randn(2, 8)
    with plan.apply():
        torch.testing.assert_close(module(x), twin(x))
    return no
