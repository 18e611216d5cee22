"""A fused module trains as the unfused one: gradients, optimizers, freezing, writing in place."""

import copy

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

import fusekit as fk


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q = nn.Linear(8, 8)
        self.k = nn.Linear(8, 4, bias=False)
        self.v = nn.Linear(8, 4)
        self.gate = nn.Linear(8, 12, bias=False)
        self.up = nn.Linear(8, 12)
        self.act = nn.SiLU()
        self.down = nn.Linear(12, 8)

    def forward(self, x):
        q = self.q(x).unflatten(-1, (2, 4)).transpose(-2, -3)
        k = self.k(x).unflatten(-1, (1, 4)).transpose(-2, -3)
        v = self.v(x).unflatten(-1, (1, 4)).transpose(-2, -3)
        y = (q @ k.transpose(-1, -2)).softmax(-1) @ v
        y = y.transpose(-2, -3).flatten(-2)
        return x + y + self.down(self.act(self.gate(y)) * self.up(y))


@pytest.fixture
def pair():
    model = Attention()
    twin = copy.deepcopy(model)
    assert sorted(site.fusion for site in fk.fuse(model).sites) == ["columns", "glu"]
    return model, twin


def loss(one, x):
    return one(x).square().mean()


def assert_same_parameters(model, twin, grad=False):
    for (name, own), other in zip(model.named_parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(own, other, msg=name)
        if grad:
            assert (own.grad is None) == (other.grad is None), name
            if own.grad is not None:
                torch.testing.assert_close(own.grad, other.grad, msg=name)


OPTIMIZERS = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, foreach=False),
    "SGD foreach": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, foreach=True),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1, foreach=False),
    "AdamW foreach": lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1, foreach=True),
}


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_optimizer_takes_the_same_three_steps(make, when):
    model = Attention()
    twin = copy.deepcopy(model)
    if when == "before":
        optimizers = [make(one.parameters()) for one in (model, twin)]
        fused = fk.fuse(model)
    else:
        fused = fk.fuse(model)
        optimizers = [make(one.parameters()) for one in (model, twin)]
    for step in range(3):
        x = torch.randn(2, 5, 8)
        for one, optimizer in zip((model, twin), optimizers, strict=True):
            optimizer.zero_grad()
            loss(one, x).backward()
            optimizer.step()
        assert_same_parameters(model, twin, grad=True)
        if step == 1:
            fused.revert()  # and it goes on
    assert torch.equal(model.q.weight, model.state_dict()["q.weight"])


@pytest.mark.parametrize("frozen", [["q.weight"], ["k.weight", "v.weight"], ["q.bias"], ["gate.weight"], []])
def test_frozen_parameters_get_no_gradient(pair, frozen):
    x = torch.randn(2, 5, 8)
    for one in pair:
        for name in frozen:
            one.get_parameter(name).requires_grad_(False)
        loss(one, x).backward()
    assert_same_parameters(*pair, grad=True)
    assert all(pair[0].get_parameter(name).grad is None for name in frozen)


def test_all_frozen_but_the_input(pair):
    x = torch.randn(2, 5, 8)
    grads = []
    for one in pair:
        one.requires_grad_(False)
        leaf = x.clone().requires_grad_()
        loss(one, leaf).backward()
        grads.append(leaf.grad)
    torch.testing.assert_close(*grads)


def test_gradients_accumulate(pair):
    for _ in range(3):
        x = torch.randn(2, 5, 8)
        for one in pair:
            loss(one, x).backward()
    assert_same_parameters(*pair, grad=True)


def test_double_backward(pair):
    x = torch.randn(2, 5, 8, dtype=torch.float64)
    results = []
    for one in pair:
        one.double()
        leaf = x.clone().requires_grad_()
        grads = torch.autograd.grad(loss(one, leaf), [leaf, *one.parameters()], create_graph=True)
        penalty = sum(grad.square().sum() for grad in grads)
        results.append(torch.autograd.grad(penalty, [leaf, *one.parameters()], allow_unused=True))
    torch.testing.assert_close(*results)


@pytest.mark.parametrize("cached", [True, False])
def test_autocast(pair, cached):
    x = torch.randn(2, 5, 8)
    outputs = []
    for one in pair:
        with torch.autocast("cpu", torch.bfloat16, cache_enabled=cached):
            outputs.append(one(x))
        outputs[-1].float().square().mean().backward()
    assert outputs[0].dtype == outputs[1].dtype
    torch.testing.assert_close(*outputs)
    assert_same_parameters(*pair)
    for own, other in zip(pair[0].parameters(), pair[1].parameters(), strict=True):
        assert own.grad.dtype == other.grad.dtype
        torch.testing.assert_close(own.grad, other.grad, rtol=0.02, atol=1e-3)


@pytest.mark.parametrize("reentrant", [True, False])
def test_gradient_checkpointing(pair, reentrant):
    x = torch.randn(2, 5, 8)
    grads = []
    for one in pair:
        leaf = x.clone().requires_grad_()
        checkpoint(one, leaf, use_reentrant=reentrant).square().mean().backward()
        grads.append(leaf.grad)
    torch.testing.assert_close(*grads)
    assert_same_parameters(*pair, grad=True)


def test_saved_tensor_hooks(pair):
    x = torch.randn(2, 5, 8)
    for one in pair:
        with torch.autograd.graph.save_on_cpu():
            out = loss(one, x)
        out.backward()
    assert_same_parameters(*pair, grad=True)


class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.q = nn.Linear(8, 8)
        self.k = nn.Linear(8, 8)

    def forward(self, x):
        q, k = self.q(x), self.k(x)
        return q * 1, k * 1


def attempt(action):
    try:
        action()
    except RuntimeError as error:
        assert "modified by an inplace operation" in str(error)
        return "raised"
    return "passed"


@pytest.mark.parametrize("of_input", [True, False], ids=["input grad", "no input grad"])
@pytest.mark.parametrize("frozen", [True, False], ids=["frozen", "trained"])
@pytest.mark.parametrize("output", [0, 1])
@pytest.mark.parametrize("by_data", [True, False], ids=["by data", "in place"])
def test_weight_written_between_forward_and_backward_raises_where_it_did(of_input, frozen, output, by_data):
    module = Two()
    if frozen:
        module.k.weight.requires_grad_(False)
    twin = copy.deepcopy(module)
    fk.fuse(module)
    x = torch.randn(3, 8)
    outcomes = []
    for one in (module, twin):
        leaf = x.clone().requires_grad_(of_input)
        out = one(leaf)[output].sum()
        with torch.no_grad():
            (one.k.weight.data if by_data else one.k.weight).mul_(2)
        wanted = [leaf] if of_input else [one.q.weight if output == 0 else one.k.bias]
        outcomes.append(attempt(lambda: torch.autograd.grad(out, wanted)))
    assert outcomes[0] == outcomes[1] == ("raised" if of_input and output and not by_data else "passed")


class WritesOutputs(Two):
    def forward(self, x):
        q = self.q(x)
        k = self.k(x)
        squared = k * k  # saves k for backward
        q.mul_(2)
        q += 1
        q[..., 0] = 3
        k.add_(q)
        return q, k + squared.detach(), squared if False else k


def test_outputs_may_be_written_in_place():
    module = WritesOutputs()
    twin = copy.deepcopy(module)
    (site,) = fk.fuse(module).sites
    assert site.fusion == "columns"
    x = torch.randn(3, 8)
    for one in (module, twin):
        sum(out.square().sum() for out in one(x)).backward()
    assert_same_parameters(module, twin, grad=True)


class SavesThenWrites(Two):
    def forward(self, x):
        q = self.q(x)
        k = self.k(x)
        squared = k * k
        q.mul_(2)
        return q, squared


def test_writing_one_output_does_not_spoil_what_was_saved_of_another():
    # Views of one tensor share a version counter; the outputs of two linears do not.
    module = SavesThenWrites()
    twin = copy.deepcopy(module)
    assert fk.fuse(module).sites
    x = torch.randn(3, 8)
    for one in (module, twin):
        q, squared = one(x)
        (q.sum() + squared.sum()).backward()
    assert_same_parameters(module, twin, grad=True)


def test_unused_output_gives_no_wrong_gradient():
    module = Two()
    twin = copy.deepcopy(module)
    fk.fuse(module)
    x = torch.randn(3, 8)
    for one in (module, twin):
        one(x)[0].sum().backward()
    for own, other in zip(module.parameters(), twin.parameters(), strict=True):
        want = other.grad if other.grad is not None else torch.zeros_like(other)
        got = own.grad if own.grad is not None else torch.zeros_like(own)
        torch.testing.assert_close(got, want)


def test_requires_grad_switched_between_calls(pair):
    x = torch.randn(2, 5, 8)
    for state in (False, True):
        for one in pair:
            one.k.requires_grad_(state)
            one.zero_grad()
            loss(one, x).backward()
        assert_same_parameters(*pair, grad=True)


def test_loss_that_sees_a_parameter_directly(pair):
    for one in pair:
        (loss(one, torch.ones(1, 2, 8)) + F.mse_loss(one.q.weight, torch.zeros(8, 8))).backward()
    assert_same_parameters(*pair, grad=True)


@pytest.mark.parametrize("frozen", [True, False])
def test_slices_are_written_and_saved_apart_from_each_other(frozen):
    # What no trace sees (a cache, a test that went the other way) may still write into a slice.
    module, x = Two(), torch.randn(2, 3, 8)
    if frozen:
        module.requires_grad_(False)
    twin = copy.deepcopy(module)
    fk.fuse(module)
    assert not module.merged_q_k.copied
    scale = torch.randn(8, requires_grad=True)
    grads = []
    for q, k in (module.merged_q_k(x), (twin.q(x), twin.k(x))):
        squared = k * scale  # saves k for backward
        q.mul_(2)
        q[..., 0] = 3
        loss = (squared + q).square().sum()
        grads.append(torch.autograd.grad(loss, [scale]))
    torch.testing.assert_close(*grads)


def test_part_whose_output_goes_nowhere_gets_no_gradient():
    # An optimizer passes over a parameter without one; with one of zeros it would decay it.
    class Sometimes(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
            self.both = False

        def forward(self, x):
            a, b = self.a(x), self.b(x)
            return a + b if self.both else a

    module = Sometimes()
    fk.fuse(module)
    module(torch.randn(2, 4)).sum().backward()
    assert module.a.weight.grad is not None and module.b.weight.grad is None and module.b.bias.grad is None
    module.both = True
    module(torch.randn(2, 4)).sum().backward()
    assert module.b.weight.grad is not None and module.b.bias.grad is not None


def test_each_of_two_passes_back_gives_gradients_to_its_own_part():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x):
            return self.a(x), self.b(x)

    module, x = Two(), torch.randn(2, 4)
    want = [
        torch.autograd.grad(out.sum(), part.weight)[0]
        for out, part in zip(module(x), (module.a, module.b), strict=True)
    ]
    fk.fuse(module)
    a, b = module(x)
    a.sum().backward(retain_graph=True)
    assert module.b.weight.grad is None
    b.sum().backward()
    torch.testing.assert_close([module.a.weight.grad, module.b.weight.grad], want)
