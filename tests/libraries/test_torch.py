"""What PyTorch itself does to a model: parametrizations, tied weights, checkpointing, autocast, and more.

Each before and after fusing, on a small Llama: the same as unfused, or refused.
"""

import copy

import pytest
import torch
import torch.nn as nn
from torch.nn.utils import parametrizations, parametrize, prune

import fusekit as fk

# -- parametrizations --------------------------------------------------------------------------


class Scaled(nn.Module):
    def forward(self, weight):
        return weight * 1.5


def scale(linear):
    return parametrize.register_parametrization(linear, "weight", Scaled())


PARAMETRIZATIONS = {
    "own": scale,
    "weight_norm": parametrizations.weight_norm,
    "spectral_norm": parametrizations.spectral_norm,
    "orthogonal": parametrizations.orthogonal,
}


@pytest.fixture(params=PARAMETRIZATIONS)
def parametrized(request):
    """Puts a parametrization on a query and an up projection of a model."""

    def put(model):
        torch.manual_seed(3)
        PARAMETRIZATIONS[request.param](model.model.layers[0].self_attn.q_proj)
        PARAMETRIZATIONS[request.param](model.model.layers[1].mlp.up_proj)

    return put


def test_parametrized_before_fusing(model, twin, ids, parametrized, assert_same):
    for one in (model, twin):
        parametrized(one)
    plan = fk.plan(model)
    assert [(r.name, r.fusion, r.reason) for r in plan.refusals] == [
        ("model.layers.0.self_attn", "qkv", "parametrized"),
        ("model.layers.1.mlp", "glu", "parametrized"),
    ]
    with plan.apply():
        assert_same(model, twin, ids)
    assert_same(model, twin, ids)


def test_parametrized_after_fusing(model, twin, ids, parametrized, fuse_all, assert_same):
    fused = fuse_all(model)
    for one in (model, twin):
        parametrized(one)
    assert_same(model, twin, ids)
    fused.revert()
    assert_same(model, twin, ids)


@pytest.mark.parametrize("leave", [True, False], ids=["with its value", "with the original"])
def test_parametrization_taken_off_again(model, twin, ids, leave, fuse_all, assert_same):
    fused = fuse_all(model)
    for one in (model, twin):
        query = one.model.layers[0].self_attn.q_proj
        scale(query)
        parametrize.remove_parametrizations(query, "weight", leave_parametrized=leave)
    assert_same(model, twin, ids)
    fused.revert()
    assert_same(model, twin, ids)
    fuse_all(model)
    assert_same(model, twin, ids)


def test_pruned_before_and_after_fusing(model, twin, ids, fuse_all, assert_same):
    fused = fuse_all(model)
    for one in (model, twin):
        prune.l1_unstructured(one.model.layers[0].self_attn.k_proj, "weight", amount=0.4)
    assert_same(model, twin, ids)
    fused.revert()
    (refusal,) = fk.plan(model).refusals
    assert (refusal.fusion, refusal.reason) == ("qkv", "hooked")
    with fk.fuse(model):
        assert_same(model, twin, ids)
    for one in (model, twin):
        prune.remove(one.model.layers[0].self_attn.k_proj, "weight")
    with fuse_all(model):
        assert_same(model, twin, ids)


# -- tied weights ------------------------------------------------------------------------------


def tie(model):
    first, second = (layer.self_attn for layer in model.model.layers)
    second.k_proj.weight = first.k_proj.weight


def test_tied_before_fusing(model, twin, ids, assert_same):
    for one in (model, twin):
        tie(one)
    plan = fk.plan(model)
    assert [(r.name, r.reason) for r in plan.refusals] == [
        ("model.layers.0.self_attn", "tied"),
        ("model.layers.1.self_attn", "tied"),
    ]
    assert "model.layers.1.self_attn.k_proj.weight" in plan.refusals[0].message
    with plan.apply():
        assert_same(model, twin, ids)
    assert_same(model, twin, ids)


def test_tied_after_fusing(model, twin, ids, fuse_all, assert_same):
    fused = fuse_all(model)
    for one in (model, twin):
        tie(one)
    assert_same(model, twin, ids)
    fused.revert()
    assert_same(model, twin, ids)
    assert model.model.layers[1].self_attn.k_proj.weight is model.model.layers[0].self_attn.k_proj.weight


def test_head_tied_to_the_embedding(build, ids, fuse_all, assert_same):
    model, twin = (build(tie_word_embeddings=True) for _ in range(2))
    assert model.lm_head.weight is model.model.embed_tokens.weight
    with fuse_all(model):
        assert_same(model, twin, ids)
        model.tie_weights()
        assert_same(model, twin, ids)
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_one_layer_used_twice(model, twin, ids, assert_same):
    for one in (model, twin):
        one.model.layers[1] = one.model.layers[0]
    plan = fk.plan(model)
    assert {site.fusion for site in plan.sites} == {"qkv", "glu", "rms_norm"}
    with plan.apply():
        assert_same(model, twin, ids)
    assert_same(model, twin, ids)


# -- gradient checkpointing and autocast -------------------------------------------------------


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "not reentrant"])
def test_gradient_checkpointing(model, twin, ids, when, reentrant, fuse_all, assert_same):
    if when == "after":
        fused = fuse_all(model)
    for one in (model, twin):
        one.train()
        one.gradient_checkpointing_enable({"use_reentrant": reentrant})
    if when == "before":
        fused = fuse_all(model)
    assert_same(model, twin, ids)
    fused.revert()
    assert_same(model, twin, ids)


def test_reverted_between_forward_and_recomputation(model, twin, ids, fuse_all):
    fused = fuse_all(model)
    losses = []
    for one in (model, twin):
        one.train()
        one.gradient_checkpointing_enable({"use_reentrant": True})
        losses.append(one(input_ids=ids, labels=ids).loss)
    fused.revert()
    for loss in losses:
        loss.backward()
    for (name, own), other in zip(model.named_parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(own.grad, other.grad, rtol=1e-4, atol=1e-6, msg=name)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("checkpointed", [True, False], ids=["checkpointed", "plain"])
def test_autocast(model, twin, ids, dtype, checkpointed, fuse_all):
    fused = fuse_all(model)
    for one in (model, twin):
        one.train()
        if checkpointed:
            one.gradient_checkpointing_enable()
    for _ in range(2):
        results = []
        for one in (model, twin):
            one.zero_grad()
            with torch.autocast("cpu", dtype):
                results.append(one(input_ids=ids, labels=ids))
            results[-1].loss.backward()
        assert results[0].logits.dtype == results[1].logits.dtype == dtype
        torch.testing.assert_close(results[0].logits, results[1].logits, rtol=0.03, atol=0.06)
        for (name, own), other in zip(model.named_parameters(), twin.named_parameters(), strict=True):
            error = (own.grad - other[1].grad).norm() / other[1].grad.norm()
            assert error < 0.03, name
        if not fused.reverted:
            fused.revert()


# -- torch.compile -----------------------------------------------------------------------------


@pytest.mark.parametrize("when", ["before", "after"])
def test_compile_before_and_after_fusing(model, twin, ids, when, fuse_all, assert_same):
    torch._dynamo.reset()
    if when == "after":
        fused = fuse_all(model)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    with torch.no_grad():
        torch.testing.assert_close(compiled(ids).logits, twin(ids).logits)
    if when == "before":
        fused = fuse_all(model)
        assert len(fk.plan(compiled).applied) == 9
    assert_same(compiled, twin, ids, grads=False, state=False)
    for one in (compiled, twin):
        one(input_ids=ids, labels=ids).loss.backward()
    for (name, own), other in zip(model.named_parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(own.grad, other.grad, rtol=1e-4, atol=1e-6, msg=name)
    fused.revert()
    with torch.no_grad():
        torch.testing.assert_close(compiled(ids).logits, twin(ids).logits)
    torch._dynamo.reset()


def test_module_compiled_in_place(model, twin, ids, fuse_all, assert_same):
    torch._dynamo.reset()
    for layer in model.model.layers:
        layer.compile(backend="eager")
    fused = fuse_all(model)
    assert_same(model, twin, ids)
    fused.revert()
    assert_same(model, twin, ids)
    torch._dynamo.reset()


# -- torch.func --------------------------------------------------------------------------------


def test_functional_call_with_other_parameters(model, twin, ids, fuse_all):
    fused = fuse_all(model)
    other = {name: value.detach() * 1.1 for name, value in twin.named_parameters()}
    before = twin(ids).logits
    for _ in range(2):
        want = torch.func.functional_call(twin, other, (ids,)).logits
        torch.testing.assert_close(torch.func.functional_call(model, other, (ids,)).logits, want)
        torch.testing.assert_close(model(ids).logits, before)
        assert not torch.allclose(want, before)
        if not fused.reverted:
            assert model.model.layers[0].self_attn.merged_qkv.is_tied()
            fused.revert()


def test_gradient_of_a_functional_call(model, twin, ids, fuse_all):
    fuse_all(model)
    parameters = {name: value.detach() for name, value in twin.named_parameters()}

    def gradients(one):
        def loss(parameters):
            return torch.func.functional_call(one, parameters, (ids,), {"labels": ids}).loss

        return torch.func.grad(loss)(parameters)

    own, other = gradients(model), gradients(twin)
    for name, want in other.items():
        torch.testing.assert_close(own[name], want, rtol=1e-4, atol=1e-6, msg=name)


def test_ensemble_by_vmap(model, twin, ids, fuse_all):
    fuse_all(model)
    members = [copy.deepcopy(twin) for _ in range(3)]
    for factor, member in enumerate(members):
        with torch.no_grad():
            for parameter in member.parameters():
                parameter.mul_(1 + factor / 10)
    parameters, buffers = torch.func.stack_module_state(members)

    def of(one):
        def call(parameters, buffers, x):
            return torch.func.functional_call(one, (parameters, buffers), (x,), {"use_cache": False}).logits

        return torch.func.vmap(call, (0, 0, None), randomness="same")(parameters, buffers, ids[:1])

    torch.testing.assert_close(of(model), of(twin), rtol=1e-4, atol=1e-5)
