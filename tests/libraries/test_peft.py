"""peft's LoRA: adapters put on before fusing, after it, merged, saved and loaded."""

import copy
import warnings

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model, inject_adapter_in_model
from peft.utils import get_peft_model_state_dict

import fusekit as fk

PARTS = ["q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"]
TARGETS = [["q_proj", "v_proj"], ["up_proj"], PARTS, "all-linear"]


def adapted(model, targets=("q_proj", "v_proj"), **options):
    """`model` with adapters that act from the start, the same for the same targets."""
    torch.manual_seed(5)
    config = LoraConfig(r=4, target_modules=targets, init_lora_weights=False, **options)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a second adapter on one model
        return get_peft_model(model, config)


def by_fusion(places):
    return sorted({place.fusion for place in places})


@pytest.mark.parametrize("targets", TARGETS, ids=str)
def test_adapter_put_on_before_fusing_is_refused(model, twin, ids, targets, assert_same):
    one, other = adapted(model, targets), adapted(twin, targets)
    plan = fk.plan(one)
    at_layers = [r for r in plan.refusals if r.name.endswith(("self_attn", "mlp"))]
    wrapped = {"qkv": "q_proj", "glu": "up_proj"}
    for fusion, part in wrapped.items():
        is_wrapped = targets == "all-linear" or part in targets
        refused = [r for r in at_layers if r.fusion == fusion]
        assert {r.reason for r in refused} == ({"adapter"} if is_wrapped else set())
        assert len(refused) == (2 if is_wrapped else 0)
        assert (fusion in by_fusion(plan.sites)) != is_wrapped
        assert all("merge the adapter first" in r.message for r in refused)
    with plan.apply():
        assert_same(one, other, ids)
    assert_same(one, other, ids)


def test_base_model_on_meta_with_an_adapter_is_refused_too(build):
    with torch.device("meta"):
        model = adapted(build())
    assert "adapter" in {refusal.reason for refusal in fk.plan(model).refusals}


@pytest.mark.parametrize("targets", TARGETS, ids=str)
def test_adapter_put_on_after_fusing_acts(model, twin, ids, targets, fuse_all, assert_same):
    fused, plain = fuse_all(model), twin(ids).logits
    one, other = adapted(model, targets), adapted(twin, targets)
    assert not torch.allclose(other(ids).logits, plain)
    assert_same(one, other, ids)
    names = [name for name, parameter in one.named_parameters() if parameter.grad is not None]
    assert names and all("lora_" in name for name in names)
    with one.disable_adapter(), other.disable_adapter():
        torch.testing.assert_close(one(ids).logits, other(ids).logits)
        torch.testing.assert_close(one(ids).logits, plain)
    fused.revert()
    assert_same(one, other, ids)


def test_adapter_put_on_after_fusing_trains(model, twin, ids, fuse_all, assert_same):
    fused = fuse_all(model)
    pair = [adapted(one, PARTS) for one in (model, twin)]
    optimizers = [
        torch.optim.AdamW([p for p in one.parameters() if p.requires_grad], lr=0.05) for one in pair
    ]
    for step in range(4):
        for one, optimizer in zip(pair, optimizers, strict=True):
            optimizer.zero_grad()
            one(input_ids=ids, labels=ids).loss.backward()
            optimizer.step()
        if step == 1:
            fused.revert()
        with torch.no_grad():
            torch.testing.assert_close(pair[0](ids).logits, pair[1](ids).logits, rtol=1e-4, atol=1e-4)


def test_fused_after_merge_and_unload(model, twin, ids, fuse_all, assert_same):
    merged, other = (adapted(one, PARTS).merge_and_unload() for one in (model, twin))
    for one in (merged, other):
        one.requires_grad_(True)
    with fuse_all(merged):
        assert_same(merged, other, ids)
    assert_same(merged, other, ids)


def test_fused_before_and_merged_later(model, twin, ids, fuse_all, assert_same):
    fused, plain = fuse_all(model), twin(ids).logits
    merged, other = (adapted(one, PARTS).merge_and_unload() for one in (model, twin))
    for one in (merged, other):
        one.requires_grad_(True)
    assert not torch.allclose(other(ids).logits, plain)
    assert_same(merged, other, ids)
    assert len(fk.plan(merged).applied) == 9
    assert merged.model.layers[0].self_attn.merged_qkv.is_tied()
    fused.revert()
    assert_same(merged, other, ids)


def test_merged_and_unmerged_in_place_on_a_fused_model(model, twin, ids, fuse_all):
    fuse_all(model)
    pair = [adapted(one, PARTS) for one in (model, twin)]
    for change in ("merge_adapter", "unmerge_adapter"):
        for one in pair:
            getattr(one, change)()
        torch.testing.assert_close(pair[0](ids).logits, pair[1](ids).logits)


def test_unloaded_without_merging_the_fused_model_is_as_before(model, ids, fuse_all):
    fused, plain = fuse_all(model), copy.deepcopy(model)(ids).logits
    unloaded = adapted(model, PARTS).unload()
    torch.testing.assert_close(unloaded(ids).logits, plain)
    assert unloaded.model.layers[0].self_attn.merged_qkv.is_tied()
    fused.revert()
    torch.testing.assert_close(unloaded(ids).logits, plain)


def test_second_adapter_and_switching(model, twin, ids, fuse_all):
    fused = fuse_all(model)
    pair = [adapted(one) for one in (model, twin)]
    for one in pair:
        torch.manual_seed(6)
        one.add_adapter(
            "other", LoraConfig(r=2, target_modules=["up_proj", "k_proj"], init_lora_weights=False)
        )
    results = []
    for name in ("default", "other"):
        for one in pair:
            one.set_adapter(name)
        results.append(pair[1](ids).logits)
        torch.testing.assert_close(pair[0](ids).logits, results[-1])
    assert not torch.allclose(*results)
    fused.revert()
    torch.testing.assert_close(pair[0](ids).logits, results[-1])


@pytest.mark.parametrize("to_fused", [True, False], ids=["into the fused", "from the fused"])
def test_saved_adapter_loaded_into_the_other(model, twin, build, ids, tmp_path, to_fused, fuse_all):
    saved, base = (twin, model) if to_fused else (model, twin)
    fuse_all(model)
    saved = adapted(saved, PARTS)
    saved.save_pretrained(tmp_path)
    loaded = PeftModel.from_pretrained(base, tmp_path)
    own, other = get_peft_model_state_dict(loaded), get_peft_model_state_dict(saved)
    assert own.keys() == other.keys() and len(own) == 2 * 2 * len(PARTS)
    assert all(torch.equal(own[name], other[name]) for name in own)
    torch.testing.assert_close(loaded(ids).logits, saved(ids).logits)
    assert not torch.allclose(loaded(ids).logits, build()(ids).logits)


def test_adapter_put_in_without_a_wrapper(model, twin, ids, fuse_all):
    fused = fuse_all(model)
    for one in (model, twin):
        torch.manual_seed(5)
        inject_adapter_in_model(LoraConfig(r=4, target_modules=PARTS, init_lora_weights=False), one)
    torch.testing.assert_close(model(ids).logits, twin(ids).logits)
    assert list(model.state_dict()) == list(twin.state_dict())
    fused.revert()
    assert {r.reason for r in fk.plan(model).refusals if r.fusion in ("qkv", "glu")} == {"adapter"}


def test_modules_to_save_and_trained_biases(model, twin, ids, build, assert_same):
    one, other = (build(attention_bias=True, mlp_bias=True) for _ in range(2))
    fk.fuse(one)
    pair = [adapted(each, bias="all", modules_to_save=["lm_head", "up_proj"]) for each in (one, other)]
    assert_same(*pair, ids)
    assert any(name.endswith("k_proj.bias") and p.grad is not None for name, p in pair[0].named_parameters())


@pytest.mark.parametrize("use_dora", [True, False])
def test_adapter_with_dropout_in_training(model, twin, ids, fuse_all, use_dora):
    fuse_all(model)
    pair = [adapted(one, PARTS, lora_dropout=0.3, use_dora=use_dora).train() for one in (model, twin)]
    results = []
    for one in pair:
        torch.manual_seed(9)
        results.append(one(ids).logits)
    torch.testing.assert_close(*results)
