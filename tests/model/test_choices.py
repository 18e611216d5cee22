"""Routers: all runs follow one set of picks, and picks that float64 tells apart must be the same."""

import pytest
import torch
import torch.nn as nn

import fusekit as fk
from fusekit import kernels
from fusekit.model.choices import Choice, Choices, Choosing, routing_check


class Router(nn.Module):
    """A norm, a router that picks one of two experts which do opposite things, by scores almost equal."""

    def __init__(self, width=16):
        super().__init__()
        self.norm, self.gate = Norm(width), nn.Linear(width, 2, bias=False)
        self.experts = nn.ModuleList([nn.Linear(width, width) for _ in range(2)])
        with torch.no_grad():
            self.gate.weight[1] = self.gate.weight[0] * (1 + 2**-23)
            self.gate.weight[1, 0] -= self.gate.weight[0, 0] * 2**-20

    def forward(self, x):
        y = self.norm(x)
        scores, picked = self.gate(y).topk(1, -1)
        outs = torch.stack([expert(y) for expert in self.experts], -1)
        return scores * outs.gather(-1, picked[..., None].expand(*y.shape, 1)).squeeze(-1)


class Norm(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.rand(width) + 0.5)

    def forward(self, x):
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))


def checks(report, what):
    return [check for check in report.checks if check.what == what]


def verified(model):
    x = torch.randn(64, 16)
    return fk.plan(model).verify({"x": x}, skip=("top-1", "generation"))


def test_a_router_that_float64_would_route_otherwise_leaves_the_errors_small():
    report = verified(Router())
    assert report.ok, report
    (check,) = checks(report, "routing")
    assert not check.detail.endswith("64 with float64")  # else this shows nothing
    assert checks(report, "outputs")[0].unfused_max < 1e-5


def test_scores_that_the_fused_model_gets_wrong_fail(monkeypatch):
    right = kernels.rms_norm
    monkeypatch.setattr(kernels, "rms_norm", lambda x, *a, **form: right(x, *a, **form) * 1.001)
    (check,) = checks(verified(Router()), "routing")
    assert not check.ok


def test_a_model_that_picks_nothing_has_no_such_check():
    model = nn.Sequential(Norm(16), nn.Linear(16, 16))
    report = fk.plan(model).verify({"input": torch.randn(4, 16)}, skip=("top-1", "generation"))
    assert report.ok and not checks(report, "routing")


# -- following ---------------------------------------------------------------------------------


@pytest.mark.parametrize("call", [lambda x: x.topk(2, 0), lambda x: torch.topk(input=x, k=2, dim=0)])
def test_topk_gives_its_own_scores_of_the_positions_that_were_picked(call):
    first, second = torch.randn(5, 3), torch.randn(5, 3, requires_grad=True)
    with Choosing() as before:
        picked = call(first).indices
    with Choosing(before.found) as after:
        values, indices = call(second)
    assert torch.equal(indices, picked) and torch.equal(values, second.gather(0, picked))
    values.sum().backward()
    assert torch.equal(second.grad, torch.zeros(5, 3).scatter(0, picked, 1.0))
    assert torch.equal(after.found.made[0].picked, second.topk(2, 0).indices) and not after.found.strayed


@pytest.mark.parametrize("keepdim", [False, True])
def test_argmax_follows_and_a_flat_one_is_no_choice(keepdim):
    first, second = torch.randn(4, 6), torch.randn(4, 6)
    with Choosing() as before:
        picked = first.argmax(-1, keepdim)
        first.argmax()
        torch.tensor([3, 1]).argmax(0)
    assert len(before.found.made) == 1
    with Choosing(before.found):
        assert torch.equal(torch.argmax(second, dim=-1, keepdim=keepdim), picked)


def test_another_number_of_choices_is_not_followed():
    with Choosing() as before:
        torch.randn(4, 6).topk(2)
    other = torch.randn(4, 6)
    with Choosing(before.found) as after:
        assert torch.equal(other.topk(3)[1], torch.topk(other, 3)[1])
    assert after.found.strayed


# -- the verdict -------------------------------------------------------------------------------


def one(scores, picked):
    return Choices([Choice(torch.tensor([scores]), torch.tensor([picked]), -1)])


EXACT = [0.5, 0.3, 0.3000001, 0.1]


def verdict(unfused, fused, picked=([0, 2], [0, 1])):
    exact = Choices([Choice(torch.tensor([EXACT], dtype=torch.float64), torch.tensor([[0, 2]]), -1)])
    return routing_check(one(unfused, picked[0]), one(fused, picked[1]), exact, dtype=torch.float32)


def test_picks_that_rounding_turns_round_are_as_good():
    off = [0.5, 0.3000002, 0.3000001, 0.1]
    assert verdict(EXACT, off).ok and not verdict(EXACT, off).same_bits
    assert verdict(EXACT, EXACT, ([0, 2], [2, 0])).same_bits  # the order says nothing


def test_picks_that_float64_tells_apart_fail():
    assert not verdict(EXACT, EXACT, ([0, 2], [0, 3])).ok


def test_scores_further_off_than_rounding_fail_and_excuse_no_pick():
    assert not verdict(EXACT, [0.5, 0.6, 0.3, 0.1]).ok
    assert not verdict(EXACT, [0.5, 0.3, 0.3, 0.3], ([0, 2], [0, 3])).ok


def test_masked_scores_are_no_errors():
    exact = Choices([Choice(torch.tensor([[0.5, -torch.inf]], dtype=torch.float64), torch.tensor([[0]]), -1)])
    same = one([0.5, -torch.inf], [0])
    assert routing_check(same, same, exact, dtype=torch.float32).ok


def test_fewer_choices_fail():
    check = routing_check(one(EXACT, [0]), Choices(), one(EXACT, [0]), dtype=torch.float32)
    assert not check.ok and "fused chooses 0 times, unfused 1" in check.detail
