"""Small Llama, Mistral, Qwen3 and Olmo2: the plan is as expected, and the fused model is the unfused one.

`expected.csv` was written from reading the sources of Transformers.
"""

import copy
import csv
import fnmatch
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import fusekit as fk

EXPECTED = list(csv.DictReader((Path(__file__).parent / "expected.csv").open()))


def test_plan_is_as_expected(name, model):
    rows = [row for row in EXPECTED if row["model"] == name.removesuffix("-bias")]
    assert rows
    plan = fk.plan(model)
    assert plan.refusals == () and plan.applied == ()
    left = list(plan.sites)
    for row in rows:
        found = [
            site
            for site in left
            if fnmatch.fnmatchcase(site.name, row["pattern"])
            and site.name.count(".") == row["pattern"].count(".")
            and site.fusion == row["fusion"]
            and site.parts == tuple(row["parts"].split())
        ]
        assert len(found) == int(row["count"]), row
        left = [site for site in left if site not in found]
    assert left == []


def test_slices_are_not_copied(model):
    # Nothing in these forwards hands a projection out, so none needs a copy of its own.
    assert not any(site.match.copied for site in fk.plan(model).sites)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("training", [False, True])
def test_outputs_and_every_gradient(model, twin, ids, dtype, training):
    results = []
    fk.fuse(model)
    for one in (model, twin):
        one.to(dtype).train(training)
        out = one(input_ids=ids, labels=ids, output_hidden_states=True)
        out.loss.backward()
        results.append((out, {name: p.grad for name, p in one.named_parameters()}))
    (got, grads), (want, wanted) = results
    # Other kernels may round elsewhere: a few units in the last place of the largest value.
    room = 16 * torch.finfo(dtype).eps
    for mine, his in zip((got.logits, *got.hidden_states), (want.logits, *want.hidden_states), strict=True):
        assert (mine - his).abs().max() <= room * his.abs().max()
    assert grads.keys() == wanted.keys()
    for name, his in wanted.items():
        assert grads[name] is not None and grads[name].dtype == his.dtype
        assert (grads[name] - his).abs().max() <= 4 * room * his.abs().max(), name


def test_gradients_in_float64(model, twin, ids):
    # In double precision nothing hides behind rounding; the norms keep computing in float32.
    fk.fuse(model)
    for one in (model, twin):
        one.double()
        one(input_ids=ids, labels=ids).loss.backward()
    for (name, own), other in zip(model.named_parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(own.grad, other.grad, rtol=1e-5, atol=1e-7, msg=name)


def test_generation_with_a_cache_gives_the_same_tokens(model, twin, ids):
    fk.fuse(model)
    options = dict(max_new_tokens=12, do_sample=False, use_cache=True, repetition_penalty=1.5)
    want = twin.generate(ids, **options)
    assert want.shape == (2, 21) and len(want[0, 9:].unique()) > 1
    assert torch.equal(model.generate(ids, **options), want)


def test_padded_batch(model, twin, ids):
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    fk.fuse(model)
    results = [one(input_ids=ids, attention_mask=mask).logits for one in (model, twin)]
    torch.testing.assert_close(*results)


def test_state_dict_is_the_same_in_every_bit_and_after_revert_too(model, twin):
    fused = fk.fuse(model)
    for _ in range(2):
        own, other = model.state_dict(), twin.state_dict()
        assert list(own) == list(other)
        assert all(torch.equal(own[key], other[key]) for key in own)
        if not fused.reverted:
            fused.revert()
    assert [type(module) for module in model.modules()] == [type(module) for module in twin.modules()]


def test_saved_fused_and_loaded_unfused(model, twin, ids, tmp_path):
    fk.fuse(model)
    model.save_pretrained(tmp_path)
    loaded = type(twin).from_pretrained(tmp_path, dtype=torch.float32).eval()
    assert list(loaded.state_dict()) == list(twin.state_dict())
    assert torch.equal(loaded(ids).logits, twin(ids).logits)
    size = sum(path.stat().st_size for path in tmp_path.glob("*.safetensors"))
    assert size < 1.2 * sum(p.numel() * p.element_size() for p in twin.parameters()) + 10_000


@pytest.mark.parametrize("assign", [False, True])
def test_unfused_checkpoint_loaded_into_a_fused_model(model, twin, ids, assign, tmp_path):
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    twin.save_pretrained(tmp_path)
    fk.fuse(model)
    state = load_file(tmp_path / "model.safetensors")
    result = model.load_state_dict(state, assign=assign, strict=False)
    assert set(result.missing_keys) <= {"lm_head.weight"} and not result.unexpected_keys
    torch.testing.assert_close(model(ids).logits, twin(ids).logits)
    fk.revert(model)
    assert torch.equal(model(ids).logits, twin(ids).logits)


def test_safetensors_of_the_state_dict(model, twin, tmp_path):
    fk.fuse(model)
    save_file(model.state_dict(), tmp_path / "state.safetensors")
    loaded = load_file(tmp_path / "state.safetensors")
    assert all(torch.equal(loaded[key], value) for key, value in twin.state_dict().items())


def test_partly_planned_by_path_and_by_fusion(model, twin, ids):
    plan = fk.plan(model, only=["qkv", "glu"], layers="model.layers.1")
    assert {site.name for site in plan.sites} == {"model.layers.1.self_attn", "model.layers.1.mlp"}
    with plan.apply():
        torch.testing.assert_close(model(ids).logits, twin(ids).logits)
    assert not fk.plan(model)["model.layers.1.mlp"].sites[1:]


def test_deep_copy_and_other_dtypes(model, twin, ids):
    fk.fuse(model)
    made = copy.deepcopy(model)
    with torch.no_grad():
        model.get_parameter("model.layers.0.self_attn.q_proj.weight").zero_()
    torch.testing.assert_close(made(ids).logits, twin(ids).logits)
    half, want = made.half()(ids).logits, twin.half()(ids).logits
    assert half.dtype == torch.float16
    torch.testing.assert_close(half, want, rtol=0.01, atol=0.02)


def test_gradient_checkpointing_of_the_model(model, twin, ids):
    fk.fuse(model)
    for one in (model, twin):
        one.train()
        one.gradient_checkpointing_enable()
        one(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    for (name, own), other in zip(model.named_parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(own.grad, other.grad, rtol=1e-4, atol=1e-6, msg=name)


def test_hooks_that_transformers_puts_on_its_layers(model, twin, ids):
    fk.fuse(model)
    options = dict(output_attentions=True, output_hidden_states=True)
    for one in (model, twin):
        one.set_attn_implementation("eager")
    got, want = model(ids, **options), twin(ids, **options)
    torch.testing.assert_close(got.attentions, want.attentions)
    torch.testing.assert_close(got.hidden_states, want.hidden_states)


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_compiles_as_a_whole(model, twin, ids, implementation):
    torch._dynamo.reset()
    model.set_attn_implementation(implementation)
    twin.set_attn_implementation(implementation)
    fk.fuse(model)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    with torch.no_grad():
        torch.testing.assert_close(compiled(ids, use_cache=False).logits, twin(ids, use_cache=False).logits)
    torch._dynamo.reset()
