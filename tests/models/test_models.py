"""Small models of fourteen architectures: the plan is as expected, and the fused model is the unfused one.

`expected.csv` holds the sites and refusals of each, by the path of their modules; the mark
`chosen-by-the-call` stands at refusals of parts that read one value in some calls and two in others.
`conftest.py` prints it anew.
"""

import copy

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.pytorch_utils import Conv1D

import fusekit as fk
from fusekit.model.runs import generated, next_logits
from fusekit.tracing.inputs import inputs_of_modules

GENERATING = [
    "llama", "llama-bias", "mistral", "qwen3", "qwen3-bias", "olmo2", "olmo2-bias",
    "gemma3", "phi3", "mixtral", "deepseek_v3", "gpt2", "t5", "whisper",
]  # fmt: skip
READING = [*GENERATING[:-1], "bert", "clip"]  # text, with a mask over it
EXPERTS = ["mixtral", "deepseek_v3"]
LAYERS = {
    "gpt2": "transformer.h.1",
    "bert": "bert.encoder.layer.1",
    "t5": "decoder.block.1",
    "vit": "vit.layers.1",
    "whisper": "model.decoder.layers.1",
    "clip": "text_model.encoder.layers.1",
}
NO_CACHE = {"use_cache": False}


def tensors(value):
    """The floating tensors in what a model returns, caches left out."""
    if isinstance(value, torch.Tensor):
        return [value] if value.is_floating_point() else []
    values = value.values() if isinstance(value, dict) else value if isinstance(value, (tuple, list)) else ()
    return [tensor for item in values for tensor in tensors(item)]


def as_dtype(inputs, dtype):
    return {name: value.to(dtype) if value.is_floating_point() else value for name, value in inputs.items()}


def close(got, want, **options):
    got, want = tensors(got), tensors(want)
    assert len(got) == len(want) > 0
    for mine, his in zip(got, want, strict=True):
        torch.testing.assert_close(mine, his, **options)


def ones_own(state):
    """A state dict without the second name of tied weights."""
    seen, kept = set(), {}
    for name, value in state.items():
        if value.data_ptr() not in seen:
            seen.add(value.data_ptr())
            kept[name] = value
    return kept


def test_plan_is_as_expected(name, model, expected, counted):
    plan = fk.plan(model)
    rows = [row for row in expected if row["model"] == name.removesuffix("-bias")]
    assert plan.applied == ()
    keys = ("state", "pattern", "fusion", "parts", "reason")
    assert counted(plan) == {tuple(row[key] for key in keys): int(row["count"]) for row in rows}


def test_what_calls_two_linears_is_traced_to_its_end_without_inputs(model):
    found = {}
    for module in model.modules():
        linears = [one for one in module.children() if isinstance(one, (torch.nn.Linear, Conv1D))]
        if len(linears) >= 2:
            found.setdefault(type(module).__name__, fk.trace(module))
    assert found and {name: trace.stopped for name, trace in found.items() if trace.stopped} == {}


def test_given_inputs_reach_every_linear_and_find_the_same(name, model, inputs, ids, counted):
    linears = {path for path, module in model.named_modules() if isinstance(module, torch.nn.Linear)}
    # CLIP's own forward would go on only once the text model has looked at the values of the mask.
    mask = {"attention_mask": torch.ones_like(ids)} if name in READING and name != "clip" else {}
    without = counted(fk.plan(model))
    for given in (inputs, inputs | mask, inputs | (NO_CACHE if name in GENERATING else {})):
        assert linears <= inputs_of_modules(model, (), given).keys()
        assert counted(fk.plan(model, given)) == without


def test_marks_stand_at_refusals(expected):
    assert {(row["state"], row["mark"]) for row in expected if row["mark"]} <= {
        ("refused", "chosen-by-the-call")
    }
    assert all(row["reason"] in fk.REASONS for row in expected if row["state"] == "refused")


def test_verify_runs_without_inputs(name, model):
    plan = fk.plan(model)
    generates, chooses = name in GENERATING, name != "clip"
    report = plan.verify(tokens=8, generate=4)
    if not plan.sites:
        assert "fuses nothing" in report.not_run[-1].reason
        return
    assert report.ok, report
    kinds = {"outputs", "gradients", "state dict", "site"}
    kinds |= {"generation"} if generates else set()
    kinds |= {"top-1"} if chooses else set()
    kinds |= {"routing"} if name in EXPERTS else set()
    assert {check.what for check in report.checks} == kinds
    assert sum(check.what == "site" for check in report.checks) == len(plan.sites)


def test_slices_are_copied_only_where_a_projection_is_handed_out(name, model):
    # Attention over an encoder's states may keep its keys and values in a cache as they are, and
    # DeepSeek's fills its keys in place.
    copied = {site.fusion for site in fk.plan(model).sites if site.match.copied}
    assert copied == {"t5": {"kv"}, "whisper": {"kv"}, "deepseek_v3": {"mla"}}.get(name, set())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("training", [False, True])
def test_outputs_and_every_gradient(model, twin, inputs, wanted, dtype, training):
    results = []
    fk.fuse(model)
    given = as_dtype(inputs, dtype)
    for one in (model, twin):
        one.to(dtype).train(training)
        out = one(**given, **wanted, output_hidden_states=True)
        out.loss.backward()
        results.append((out, {name: p.grad for name, p in one.named_parameters()}))
    (got, grads), (want, his) = results
    # Other kernels may round elsewhere: a few units in the last place of the largest value.
    room = 16 * torch.finfo(dtype).eps
    for mine, other in zip(tensors(got), tensors(want), strict=True):
        assert (mine - other).abs().max() <= room * other.abs().max()
    assert grads.keys() == his.keys()
    largest = max(grad.abs().max() for grad in his.values() if grad is not None)
    for name, other in his.items():
        assert (grads[name] is None) is (other is None), name
        if other is not None:
            # A gradient that is zero but for rounding, of a key's bias, has no size of its own.
            size = torch.maximum(other.abs().max(), 2**-6 * largest)
            assert grads[name].dtype == other.dtype
            assert (grads[name] - other).abs().max() <= 4 * room * size, name


def test_gradients_in_float64(name, model, twin, inputs, wanted):
    # In double precision nothing hides behind rounding; the norms keep computing in float32.
    fk.fuse(model)
    for one in (model, twin):
        if name in EXPERTS:  # PyTorch multiplies in groups up to float32 only
            one.set_experts_implementation("eager")
        one.double()
        one(**as_dtype(inputs, torch.float64), **wanted).loss.backward()
    for (path, own), other in zip(model.named_parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(own.grad, other.grad, rtol=1e-5, atol=1e-7, msg=path)


@pytest.mark.parametrize("name", GENERATING)
def test_generation_with_a_cache_gives_the_same_tokens(model, twin, inputs):
    fk.fuse(model)
    given = {key: value for key, value in inputs.items() if key != "decoder_input_ids"}
    options = dict(max_new_tokens=12, do_sample=False, use_cache=True, repetition_penalty=1.5)
    want = twin.generate(**given, **options)
    assert len(want) == 2 and want.shape[1] >= 12 and len(want[0, -12:].unique()) > 1
    assert torch.equal(model.generate(**given, **options), want)


@pytest.mark.parametrize("name", ["gpt2", "t5", "whisper"])
def test_logits_that_judge_a_fork_are_those_of_generate(model, inputs):
    ids = generated(model, inputs, 5).ids
    for row in (0, 1):
        found = [int(next_logits(model, inputs, row, ids[row, :end]).argmax()) for end in range(-5, 0)]
        assert found == ids[row, -5:].tolist()


@pytest.mark.parametrize("name", READING)
def test_padded_batch(model, twin, ids, inputs):
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    fk.fuse(model)
    close(*(one(**inputs, attention_mask=mask) for one in (model, twin)))


def test_state_dict_is_the_same_in_every_bit_and_after_revert_too(model, twin, inputs):
    fused = fk.fuse(model)
    for _ in range(2):
        own, other = model.state_dict(), twin.state_dict()
        assert list(own) == list(other)
        assert all(torch.equal(own[key], other[key]) for key in own)
        if not fused.reverted and fused.sites:
            fused.revert()
    assert [type(module) for module in model.modules()] == [type(module) for module in twin.modules()]
    close(model(**inputs), twin(**inputs), rtol=0, atol=0)


def test_saved_fused_and_loaded_unfused(model, twin, inputs, tmp_path):
    fk.fuse(model)
    model.save_pretrained(tmp_path)
    loaded = type(twin).from_pretrained(tmp_path, dtype=torch.float32).eval()
    assert list(loaded.state_dict()) == list(twin.state_dict())
    close(loaded(**inputs), twin(**inputs), rtol=0, atol=0)
    size = sum(path.stat().st_size for path in tmp_path.glob("*.safetensors"))
    assert size < 1.2 * sum(p.numel() * p.element_size() for p in twin.parameters()) + 20_000


@pytest.mark.parametrize("assign", [False, True])
def test_unfused_checkpoint_loaded_into_a_fused_model(model, twin, inputs, assign):
    other = copy.deepcopy(twin)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    state = {name: value.clone() for name, value in ones_own(other.state_dict()).items()}
    fused = fk.fuse(model)
    for one in (model, twin):
        result = one.load_state_dict(state, assign=assign, strict=False)
        assert set(result.missing_keys) == set(other.state_dict()) - set(state)
    close(model(**inputs), twin(**inputs))
    if fused.sites:
        fused.revert()
    close(model(**inputs), twin(**inputs), rtol=0, atol=0)


def test_safetensors_of_the_state_dict(model, twin, tmp_path):
    fk.fuse(model)
    save_file(ones_own(model.state_dict()), tmp_path / "state.safetensors")
    loaded = load_file(tmp_path / "state.safetensors")
    assert loaded.keys() == ones_own(twin.state_dict()).keys()
    assert all(torch.equal(loaded[key], twin.state_dict()[key]) for key in loaded)


def test_partly_planned_by_path_and_by_fusion(name, model, twin, inputs):
    layer = LAYERS.get(name, "model.layers.1")
    whole = [site.title for site in fk.plan(model)[layer].sites if site.fusion != "rms_norm"]
    plan = fk.plan(model, exclude=["rms_norm"], layers=layer)
    assert [site.title for site in plan.sites] == whole
    with plan.apply():
        left = fk.plan(model)[layer]
        assert [site.title for site in left.applied] == whole
        assert all(site.fusion == "rms_norm" for site in left.sites)
        close(model(**inputs), twin(**inputs))


def test_deep_copy_and_other_dtypes(model, twin, inputs):
    sites = fk.fuse(model).sites
    made = copy.deepcopy(model)
    with torch.no_grad():
        for site in sites:
            for parameter in site.module.parameters():
                parameter.zero_()
    close(made(**inputs), twin(**inputs))
    given = as_dtype(inputs, torch.float16)
    half, want = made.half()(**given), twin.half()(**given)
    assert {tensor.dtype for tensor in tensors(half)} == {tensor.dtype for tensor in tensors(want)}
    assert torch.float16 in {tensor.dtype for tensor in tensors(half)}
    close(half, want, rtol=0.01, atol=0.02)


def test_gradient_checkpointing_of_the_model(model, twin, inputs, wanted):
    fk.fuse(model)
    for one in (model, twin):
        one.train()
        one.gradient_checkpointing_enable()
        one(**inputs, **wanted).loss.backward()
    for (name, own), other in zip(model.named_parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(own.grad, other.grad, rtol=1e-4, atol=1e-6, msg=name)


def test_hooks_that_transformers_puts_on_its_layers(model, twin, inputs):
    fk.fuse(model)
    for one in (model, twin):
        one.set_attn_implementation("eager")
    results = [one(**inputs, output_attentions=True, output_hidden_states=True) for one in (model, twin)]
    close(*results)


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_compiles_as_a_whole(name, model, twin, inputs, implementation):
    torch._dynamo.reset()
    for one in (model, twin):
        one.set_attn_implementation(implementation)
    fk.fuse(model)
    more = NO_CACHE if name in GENERATING else {}
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    with torch.no_grad():
        close(compiled(**inputs, **more), twin(**inputs, **more))
    torch._dynamo.reset()
