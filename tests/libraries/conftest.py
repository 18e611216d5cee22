"""A small real Llama and its twin, and what it means that two models are the same."""

import copy

import pytest
import torch
import transformers

import fusekit as fk
from tests.sizes import SIZES

FUSIONS = ["glu", "glu", "qkv", "qkv", *["rms_norm"] * 5]


def build(**options):
    """A Llama of two layers in float32, its norm weights and biases random so that they count."""
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES | options))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(1, 0.3) if parameter.dim() == 1 else parameter.normal_(0, 0.15)
    return model.eval()


def token_ids(seed=1):
    return torch.randint(2, 64, (2, 9), generator=torch.Generator().manual_seed(seed))


def fuse_all(model):
    """Fuse every site of the Llama `model`; it has them all."""
    fused = fk.fuse(model)
    assert sorted(site.fusion for site in fused.sites) == FUSIONS
    return fused


def train_step(model, ids):
    """Gradients of a loss, none left from before."""
    model.zero_grad()
    model(input_ids=ids, labels=ids).loss.backward()


def assert_same(model, twin, ids, grads=True, state=True):
    """Outputs, gradients by name and state dict of `model` are those of `twin`."""
    with torch.no_grad():
        torch.testing.assert_close(model(input_ids=ids).logits, twin(input_ids=ids).logits)
    if grads:
        for one in (model, twin):
            train_step(one, ids)
        own, other = dict(model.named_parameters()), dict(twin.named_parameters())
        assert list(own) == list(other)
        assert any(parameter.grad is not None for parameter in other.values())
        for name, parameter in own.items():
            grad, want = parameter.grad, other[name].grad
            assert (grad is None) == (want is None), name
            if want is not None:
                torch.testing.assert_close(grad, want, rtol=1e-4, atol=1e-6, msg=name)
    if state:
        assert_same_state(model.state_dict(), twin.state_dict())


def assert_same_state(own, other):
    assert list(own) == list(other)
    for name, value in other.items():
        assert type(own[name]) is type(value), name
        torch.testing.assert_close(own[name], value, rtol=0, atol=0, msg=name)


@pytest.fixture
def model():
    return build()


@pytest.fixture
def twin(model):
    """The same model, never fused."""
    return copy.deepcopy(model)


@pytest.fixture
def ids():
    return token_ids()


@pytest.fixture(name="fuse_all")
def _fuse_all():
    return fuse_all


@pytest.fixture(name="assert_same")
def _assert_same():
    return assert_same


@pytest.fixture(name="build")
def _build():
    return build
