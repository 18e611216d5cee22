"""torchao: weights quantized before fusing are refused, after fusing the parts run as they are."""

import copy

import pytest
import torch
import torch.nn as nn
from torchao.quantization import (
    Float8WeightOnlyConfig,
    Int8DynamicActivationInt8WeightConfig,
    Int8WeightOnlyConfig,
    quantize_,
)

import fusekit as fk

CONFIGS = [Int8WeightOnlyConfig, Int8DynamicActivationInt8WeightConfig, Float8WeightOnlyConfig]


@pytest.fixture(params=CONFIGS, ids=lambda config: config.__name__)
def config(request):
    return request.param()


def test_quantized_before_fusing(model, twin, ids, config, assert_same):
    for one in (model, twin):
        quantize_(one, config)
    plan = fk.plan(model)
    assert {site.fusion for site in plan.sites} == {"rms_norm"}
    assert [(refusal.fusion, refusal.reason) for refusal in plan.refusals] == [
        ("qkv", "quantized"),
        ("glu", "quantized"),
    ] * 2
    assert "q_proj.weight is a" in plan.refusals[0].message
    with plan.apply():
        assert_same(model, twin, ids, grads=False, state=False)
    assert type(model.model.norm) is type(twin.model.norm)


@torch.no_grad()
def test_quantized_after_fusing(model, twin, ids, config, fuse_all):
    fused = fuse_all(model)
    for one in (model, twin):
        quantize_(one, config)
    want = twin(ids).logits
    assert torch.equal(model(ids).logits, want)
    assert torch.equal(copy.deepcopy(model)(ids).logits, want)
    own, other = model.state_dict(), twin.state_dict()
    assert list(own) == list(other)
    assert {type(value) for value in own.values()} == {type(value) for value in other.values()}
    model.load_state_dict(other, assign=True)
    assert torch.equal(model(ids).logits, want)
    fused.revert()
    assert torch.equal(model(ids).logits, want)
    assert type(model.model.layers[0].mlp.up_proj) is nn.Linear


def test_what_was_merged_is_let_go_once_all_of_it_is_quantized(model, ids, fuse_all):
    fuse_all(model)
    first, second = (layer.self_attn for layer in model.model.layers)
    chosen = [f"model.layers.0.self_attn.{name}_proj" for name in "qkv"] + ["model.layers.1.self_attn.q_proj"]
    quantize_(model, Int8WeightOnlyConfig(), filter_fn=lambda _, path: path in chosen)
    model(ids)
    assert first.merged_qkv.weight is None
    assert second.merged_qkv.holds(second.k_proj.weight)


@torch.no_grad()
def test_part_of_a_merge_is_quantized(model, twin, ids, fuse_all):
    fused = fuse_all(model)
    for one in (model, twin):
        quantize_(one, Int8WeightOnlyConfig(), filter_fn=lambda _, path: path.endswith("k_proj"))
    torch.testing.assert_close(model(ids).logits, twin(ids).logits)
    fused.revert()
    torch.testing.assert_close(model(ids).logits, twin(ids).logits)
    (first, second) = fk.plan(model).refusals
    assert first.reason == second.reason == "quantized" and "k_proj.weight is a" in first.message


class Packed(torch.Tensor):
    """A weight that has no memory of its own, cannot be concatenated, and multiplies only by a linear."""

    @staticmethod
    def __new__(cls, of):
        return torch.Tensor._make_wrapper_subclass(cls, of.shape, dtype=of.dtype, device=of.device)

    def __init__(self, of):
        self.packed = (of * 8).round().to(torch.int8)

    def data_ptr(self):
        raise RuntimeError("this tensor has no memory of its own")

    def untyped_storage(self):
        raise RuntimeError("this tensor has no storage of its own")

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        if function is nn.functional.linear:
            x, weight, *bias = args
            return nn.functional.linear(x, weight.packed.to(x.dtype) / 8, *bias)
        return super().__torch_function__(function, types, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        if function in (torch.ops.aten.detach.default, torch.ops.aten.alias.default):
            made = cls(args[0].packed.to(args[0].dtype))
            made.packed = args[0].packed
            return made
        raise NotImplementedError(f"{function} of a packed weight")


def pack(model):
    for module in model.modules():
        if type(module) is nn.Linear:
            module.weight = nn.Parameter(Packed(module.weight.detach()), requires_grad=False)


@torch.no_grad()
def test_weight_that_has_no_memory_of_its_own(model, twin, ids, fuse_all):
    pack(twin)
    want = twin(ids).logits
    plan = fk.plan(twin)
    assert {(refusal.fusion, refusal.reason) for refusal in plan.refusals} == {
        ("qkv", "quantized"),
        ("glu", "quantized"),
    }
    with plan.apply():
        torch.testing.assert_close(twin(ids).logits, want)
    fused = fuse_all(model)
    pack(model)
    torch.testing.assert_close(model(ids).logits, want)
    assert list(model.state_dict()) == list(twin.state_dict())
    fused.revert()
    torch.testing.assert_close(model(ids).logits, want)
