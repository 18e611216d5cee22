"""What other libraries save of a fused model is the model: every tensor, no more bytes, loadable unfused."""

import copy
import io

import pytest
import safetensors.torch
import torch
import torch.nn as nn
from accelerate import Accelerator
from huggingface_hub import save_torch_model

import fusekit as fk


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.v = nn.Linear(8, 8, bias=False), nn.Linear(8, 4), nn.Linear(8, 4)

    def forward(self, x):
        q, k, v = self.q(x), self.k(x), self.v(x)
        return q + torch.cat([k, v], -1)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = Attention(), Attention()

    def forward(self, x):
        return self.second(self.first(x))


@pytest.fixture
def fused():
    model = Model()
    fk.fuse(model)
    return model


def loaded(state):
    model = Model()
    model.load_state_dict(state)
    return model


def assert_same(model, fused):
    x = torch.randn(3, 8)
    torch.testing.assert_close(model(x), fused(x))


def test_accelerate_saves_every_tensor(fused, tmp_path):
    Accelerator(cpu=True).save_model(fused, tmp_path)
    assert_same(loaded(safetensors.torch.load_file(tmp_path / "model.safetensors")), fused)


def test_safetensors_saves_the_model(fused, tmp_path):
    safetensors.torch.save_model(fused, str(tmp_path / "m.safetensors"))
    model = Model()
    safetensors.torch.load_model(model, str(tmp_path / "m.safetensors"))
    assert_same(model, fused)


def test_the_hub_library_saves_the_model(fused, tmp_path):
    save_torch_model(fused, tmp_path)
    assert_same(loaded(safetensors.torch.load_file(tmp_path / "model.safetensors")), fused)


def test_torch_saves_no_more_bytes_than_unfused(fused):
    sizes = []
    for model in (fused, Model()):
        file = io.BytesIO()
        torch.save(model.state_dict(), file)
        sizes.append(file.tell())
    assert sizes[0] <= sizes[1] * 1.01


def test_the_state_dict_is_the_memory_that_the_model_computes_with(fused):
    state = fused.state_dict(prefix="p.")
    assert list(state) == ["p." + name for name in Model().state_dict()]
    storages = {tensor.untyped_storage().data_ptr() for tensor in state.values()}
    assert len({tensor.untyped_storage()._cdata for tensor in state.values()}) == len(state) == len(storages)
    x = torch.randn(3, 8)
    before = fused(x)
    with torch.no_grad():
        state["p.second.k.weight"].add_(1)
    assert not torch.equal(fused(x), before)
    assert_same(loaded({name[2:]: tensor for name, tensor in state.items()}), fused)


def test_kept_variables_are_the_parameters_themselves(fused):
    state = fused.state_dict(keep_vars=True)
    assert all(state[name] is parameter for name, parameter in fused.named_parameters())


def test_reverted_the_state_dict_is_a_plain_one(fused):
    want = copy.deepcopy(fused.state_dict())
    fk.revert(fused)
    assert "state_dict" not in fused.first.__dict__
    got = fused.state_dict()
    assert all(torch.equal(got[name], tensor) for name, tensor in want.items())


def test_an_output_of_frozen_parameters_asks_for_no_gradient():
    class Heads(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(4, 2), nn.Linear(4, 3)

        def forward(self, x):
            return self.a(x) * 1, self.b(x) * 1

    for compiled in (False, True):
        model = Heads()
        model.a.requires_grad_(False)
        fk.fuse(model)
        call = torch.compile(model, backend="aot_eager", fullgraph=True) if compiled else model
        a, b = call(torch.randn(2, 4))
        assert [a.requires_grad, b.requires_grad] == [False, True]
        b.sum().backward()
        assert model.a.weight.grad is None and model.b.weight.grad.abs().sum() > 0
        assert all(output.requires_grad for output in call(torch.randn(2, 4, requires_grad=True)))


def test_a_weight_that_is_not_contiguous_is_refused():
    model = Attention()
    model.k.weight = nn.Parameter(torch.randn(8, 4).t())
    plan = fk.plan(model)
    assert plan.sites == () and plan.refusals[0].reason == "layout" and "k.weight" in plan.refusals[0].message
