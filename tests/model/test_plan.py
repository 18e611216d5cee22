"""What a plan says, of which part of a model, and on which inputs."""

import pytest
import torch
import torch.nn as nn
from transformers import LlamaConfig, LlamaForCausalLM

import fusekit as fk


@pytest.fixture
def llama() -> LlamaForCausalLM:
    config = LlamaConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=60,
        eos_token_id=None,
        bos_token_id=None,
    )
    with torch.device("meta"):
        return LlamaForCausalLM(config)


def names(plan):
    return [(site.name, site.fusion) for site in plan.sites]


def test_a_part_of_a_plan_is_what_lies_under_a_path(llama):
    plan = fk.plan(llama)
    assert names(plan["model.layers.1"]) == [
        ("model.layers.1.self_attn", "qkv"),
        ("model.layers.1.mlp", "glu"),
        ("model.layers.1.input_layernorm", "rms_norm"),
        ("model.layers.1.post_attention_layernorm", "rms_norm"),
    ]
    assert plan["model.layers.1"].scope == "model.layers.1"
    assert names(plan[""]) == names(plan)
    assert names(plan["lm_head"]) == []


def test_a_path_that_does_not_exist_names_the_nearest(llama):
    with pytest.raises(fk.FusekitError, match=r"no module 'model.layer.1'.*did you mean 'model.layers.1'"):
        fk.plan(llama)["model.layer.1"]


def test_only_exclude_and_layers_choose(llama):
    assert {fusion for _, fusion in names(fk.plan(llama, only="glu"))} == {"glu"}
    assert {fusion for _, fusion in names(fk.plan(llama, only=["glu", "qkv"], exclude="qkv"))} == {"glu"}
    assert {fusion for _, fusion in names(fk.plan(llama, exclude=["rms_norm"]))} == {"glu", "qkv"}
    chosen = fk.plan(llama, layers="model.layers.[02]", only="qkv")
    assert names(chosen) == [("model.layers.0.self_attn", "qkv"), ("model.layers.2.self_attn", "qkv")]


def test_a_plan_of_a_submodule_names_it_with_the_empty_path(llama):
    assert names(fk.plan(llama.model.layers[0].mlp)) == [("", "glu")]


def test_to_frame_has_a_row_for_each_site_and_refusal(llama):
    llama.model.layers[1].self_attn.k_proj.register_forward_hook(lambda *_: None)
    frame = fk.plan(llama).to_frame()
    assert list(frame.columns) == "name type fusion parts roles state reason message path line".split()
    refused = frame[frame.state == "refused"]
    assert list(refused.name) == ["model.layers.1.self_attn"] and list(refused.reason) == ["hooked"]
    assert (frame.state == "site").sum() == 2 + 3 + 7
    assert frame[frame.fusion == "qkv"].parts.unique().tolist() == ["q_proj, k_proj, v_proj"]
    assert frame.path.str.endswith("modeling_llama.py").all() and (frame.line > 0).all()


def test_to_html_writes_one_file_that_needs_nothing_else(llama, tmp_path):
    path = fk.plan(llama).to_html(tmp_path / "plan.html")
    text = path.read_text()
    assert "model.layers.0-2.self_attn" in text and text.lstrip().lower().startswith("<!doctype html")
    assert "<script" not in text and "http" not in text


def test_the_diff_of_a_site_is_a_unified_diff_of_that_site_alone(llama):
    plan = fk.plan(llama)
    text = str(plan["model.layers.0.mlp"].sites[0].diff)
    removed = [line for line in text.splitlines() if line.startswith("-") and not line.startswith("---")]
    assert removed == [
        "-        down_proj = self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))"
    ]


class Wide(nn.Module):
    """Merges only where its input is wide: the size decides a branch."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        if x.shape[1] > 8:
            return self.a(x) + self.b(x)
        return self.a(x)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.wide = Wide()

    def forward(self, x, *, extra=None):
        return self.wide(x if extra is None else x + extra)


def test_with_inputs_each_module_is_looked_at_with_what_it_would_be_called_with():
    assert fk.plan(Model()).sites == ()  # made-up inputs are 7 long
    for inputs in ({"x": torch.ones(2, 9, 4)}, (torch.ones(2, 9, 4),), torch.ones(2, 9, 4)):
        assert names(fk.plan(Model(), inputs)) == [("wide", "columns")]
    assert fk.plan(Model(), torch.ones(2, 5, 4)).sites == ()
    given = fk.plan(Model(), {"x": torch.ones(2, 9, 4), "extra": torch.ones(4)})
    assert [item.text for item in given.assumptions] == ["Wide: x.shape[1] > 8 was true"]


def test_what_is_assumed_of_one_length_is_not_remembered_for_another():
    model = Model()
    for _ in range(2):
        assert len(fk.plan(model, torch.ones(1, 9, 4)).sites) == 1
        assert len(fk.plan(model, torch.ones(1, 3, 4)).sites) == 0


class Reads(nn.Module):
    """What `width` is matters only to instances that take the branch."""

    def __init__(self, cut, width):
        super().__init__()
        self.cut, self.width = cut, width
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        a, b = self.a(x), self.b(x)
        if self.cut:
            a = a.view(-1, self.width)
        return a.sum() + b.sum()


def test_instances_that_read_other_values_are_decided_apart():
    assert len(fk.plan(Reads(False, 3)).sites) == 1
    assert len(fk.plan(Reads(True, 4)).sites) == 1
    broken = fk.plan(Reads(True, 3))  # 56 numbers are no rows of 3
    assert broken.sites == () and broken.refusals[0].reason == "trace-stopped"
    assert len(fk.plan(Reads(False, 3)).sites) == 1


class Cross(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(8, 8) for _ in range(3))

    def forward(self, x, context=None):
        context = x if context is None else context
        k, v = self.k(context), self.v(context)
        return nn.functional.scaled_dot_product_attention(self.q(x), k, v)


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.cross = Cross()

    def forward(self, x, context):
        return self.cross(x, context=context)


def test_a_plan_made_with_inputs_is_applied_verified_and_reverted():
    model, inputs = Decoder(), {"x": torch.randn(2, 3, 8), "context": torch.randn(2, 5, 8)}
    plan = fk.plan(model, inputs)
    assert [(site.name, site.fusion, site.parts) for site in plan.sites] == [("cross", "kv", ("k", "v"))]
    assert plan.verify(inputs, skip=("top-1", "generation")).ok
    want = model(**inputs)
    fused = plan.apply()
    torch.testing.assert_close(model(**inputs), want)
    for again in (fk.plan(model), fk.plan(model, inputs)):
        assert [(site.name, site.fusion) for site in again.applied] == [("cross", "kv")]
        assert again.sites == ()
    fused.revert()
    assert type(model.cross) is Cross


@pytest.mark.parametrize(
    ("inputs", "message"),
    [({"y": torch.ones(2, 8)}, "cannot be called with these inputs: missing.*'x'"), (3, "takes a dict.*int")],
)
def test_inputs_that_the_model_cannot_be_called_with_are_an_error(inputs, message):
    with pytest.raises(fk.FusekitError, match=message):
        fk.plan(Model(), inputs)
