"""Latent attention of real architectures: the down-projections merge, before the `if` one stands in."""

import copy

import pytest
import torch
import transformers as t

import fusekit as fk

SMALL = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 64,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "head_dim": 8,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "first_k_dense_replace": 1,
}
CONFIGS = {"deepseek_v3": t.DeepseekV3Config, "minicpm3": t.MiniCPM3Config, "youtu": t.YoutuConfig}


def build(name, rank):
    torch.manual_seed(0)
    model = t.AutoModelForCausalLM.from_config(CONFIGS[name](**SMALL, q_lora_rank=rank)).eval()
    with torch.no_grad():
        for path, parameter in model.named_parameters():
            parameter.normal_(1.0 if "norm" in path else 0.0, 0.2)
    return model


@pytest.mark.parametrize("rank, query", [(24, "q_a_proj"), (None, "q_proj")])
@pytest.mark.parametrize("name", CONFIGS)
def test_down_projections_merge(name, rank, query):
    model, ids = build(name, rank), torch.randint(3, 64, (2, 6))
    twin = copy.deepcopy(model)
    plan = fk.plan(model, inputs={"input_ids": ids}, only="mla")
    (site,) = plan.sites
    assert site.parts == (query, "kv_a_proj_with_mqa")
    assert site.diff.after.index("self.merged_mla(") < site.diff.after.index("if self.q_lora_rank is None")
    plan.apply()
    for training in (False, True):
        results = []
        for one in (model, twin):
            one.train(training).zero_grad()
            out = one(input_ids=ids, labels=ids)
            out.loss.backward()
            results.append([out.logits, *(p.grad for p in one.parameters() if p.grad is not None)])
        torch.testing.assert_close(*results, rtol=1e-4, atol=1e-5)
    cached = [
        one.generate(ids, max_new_tokens=4, do_sample=False, eos_token_id=None) for one in (model, twin)
    ]
    assert torch.equal(*cached)
    names = [*twin.state_dict()]
    assert [*model.state_dict()] == names
