"""Every module of small real models: traced, or stopped with a sentence."""

import pytest
import torch
import torch.nn as nn
import transformers

from fusekit.tracing import is_leaf_call, trace

SMALL = {
    "vocab_size": 50, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 4, "max_position_embeddings": 32,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
MODELS = {
    "Llama": ("LlamaConfig", "LlamaForCausalLM", {}),
    "Mistral": ("MistralConfig", "MistralForCausalLM", {}),
    "Qwen3": ("Qwen3Config", "Qwen3ForCausalLM", {}),
    "Olmo2": ("Olmo2Config", "Olmo2ForCausalLM", {}),
    "Gemma": ("GemmaConfig", "GemmaForCausalLM", {}),
    "BERT": ("BertConfig", "BertForMaskedLM", {}),
    "T5": (
        "T5Config", "T5ForConditionalGeneration",
        {"d_model": 16, "d_kv": 4, "d_ff": 32, "num_layers": 2, "num_heads": 4},
    ),
    "GPT2": ("GPT2Config", "GPT2LMHeadModel", {"n_embd": 16, "n_layer": 2, "n_head": 4, "n_positions": 32}),
}  # fmt: skip
# Classes that cannot be traced without inputs, and a word of the reason.
STOPS = {
    "ModuleList": "missing the required",  # it has no forward
    "BertOutput": "broadcast",  # two inputs of unlike widths
    # Without a cache, which a decorator would have made, the mask asks whether sequences are packed.
    **dict.fromkeys(
        ("LlamaModel", "MistralModel", "Qwen3Model", "Olmo2Model", "GemmaModel", "GPT2Model"), "item()"
    ),
}


def build(name, **more):
    config, cls, settings = MODELS[name]
    settings = settings if settings else SMALL
    settings = {**settings, "vocab_size": 50, **more}
    with torch.device("meta"):
        return getattr(transformers, cls)(getattr(transformers, config)(**settings)).eval()


@pytest.mark.parametrize("name", MODELS)
def test_every_module_of_a_model_is_traced_or_says_why_not(name):
    for module in {type(m): m for m in build(name).modules()}.values():
        found = trace(module)
        word = STOPS.get(type(module).__name__)
        assert found.complete is (word is None), (type(module).__name__, found.stopped)
        if found.stopped:
            assert word in found.stopped.message and found.stopped.line > 0 and found.stopped.path
        for node in found.graph.nodes:
            if node.op.startswith("call"):
                given = node.args and getattr(node.args[0], "op", "") == "placeholder"
                assert "val" in node.meta and (node.meta["span"] or given), node


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("name", ["Llama", "Qwen3", "Mistral", "Olmo2", "Gemma", "BERT"])
def test_attention_is_one_leaf_that_reads_query_key_and_value(name, attention):
    model = build(name, attn_implementation=attention)
    module = next(
        m
        for m in model.modules()
        if type(m).__name__.endswith(("Attention", "SelfAttention"))
        and any(isinstance(c, nn.Linear) for c in m.children())
    )
    found = trace(module)
    assert found.complete, found.stopped
    (leaf,) = [node for node in found.graph.nodes if is_leaf_call(node)]
    assert leaf.target.attention and leaf.target.__name__ == f"{attention}_attention_forward"
    assert len(leaf.args) == 3 and leaf.meta["val"][0].shape[:2] == (2, 7)
