"""Small models of real architectures, their norm weights and biases random so that they count.

Run as a script it prints `expected.csv` for the code as it is; its diff is to be read before it is kept:

    python tests/models/conftest.py > /tmp/expected.csv && mv /tmp/expected.csv tests/models/expected.csv
"""

import collections
import copy
import csv
import re
import sys
from pathlib import Path

import pytest
import torch
import transformers

import fusekit as fk
from tests.sizes import SIZES

ENCODER = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4)
TEXT = dict(ENCODER, vocab_size=64, max_position_embeddings=64)
IMAGE = dict(ENCODER, image_size=16, patch_size=8)
# Dropout draws other numbers where fewer calls draw them; training is compared without.
STEADY = dict(dropout=0.0, attention_dropout=0.0, activation_dropout=0.0)

CONFIGS = {
    "llama": lambda: transformers.LlamaConfig(**SIZES),
    "llama-bias": lambda: transformers.LlamaConfig(**SIZES, attention_bias=True, mlp_bias=True),
    "mistral": lambda: transformers.MistralConfig(**SIZES, sliding_window=None),
    "qwen3": lambda: transformers.Qwen3Config(**SIZES, head_dim=16),
    "qwen3-bias": lambda: transformers.Qwen3Config(**SIZES, head_dim=16, attention_bias=True),
    "olmo2": lambda: transformers.Olmo2Config(**SIZES),
    "olmo2-bias": lambda: transformers.Olmo2Config(**SIZES, attention_bias=True),
    "gemma3": lambda: transformers.Gemma3TextConfig(
        **SIZES, head_dim=16, sliding_window=8, layer_types=["sliding_attention", "full_attention"]
    ),
    "phi3": lambda: transformers.Phi3Config(**SIZES),
    "mixtral": lambda: transformers.MixtralConfig(**SIZES, num_local_experts=4),
    "deepseek_v3": lambda: transformers.DeepseekV3Config(
        **SIZES | {"num_key_value_heads": 4},
        q_lora_rank=24,
        kv_lora_rank=16,
        qk_rope_head_dim=8,
        qk_nope_head_dim=8,
        v_head_dim=8,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_group=2,
        topk_group=1,
        n_shared_experts=1,
        moe_intermediate_size=24,
        first_k_dense_replace=1,
    ),
    "gpt2": lambda: transformers.GPT2Config(
        vocab_size=64,
        n_embd=32,
        n_layer=2,
        n_head=4,
        n_positions=64,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=None,
        resid_pdrop=0.0,
        attn_pdrop=0.0,
        embd_pdrop=0.0,
    ),
    "bert": lambda: transformers.BertConfig(
        **TEXT, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0
    ),
    "t5": lambda: transformers.T5Config(
        vocab_size=64,
        d_model=32,
        d_kv=8,
        d_ff=48,
        num_layers=2,
        num_heads=4,
        feed_forward_proj="gated-gelu",
        dropout_rate=0.0,
        decoder_start_token_id=0,
        eos_token_id=None,
    ),
    "vit": lambda: transformers.ViTConfig(**IMAGE),
    "whisper": lambda: transformers.WhisperConfig(
        vocab_size=64,
        d_model=32,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=48,
        decoder_ffn_dim=48,
        num_mel_bins=8,
        max_source_positions=16,
        max_target_positions=32,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=None,
        decoder_start_token_id=1,
        suppress_tokens=None,
        begin_suppress_tokens=None,
        **STEADY,
    ),
    "clip": lambda: transformers.CLIPConfig(
        text_config=dict(TEXT, bos_token_id=1, eos_token_id=2, pad_token_id=0, projection_dim=16),
        vision_config=dict(IMAGE, projection_dim=16),
        projection_dim=16,
    ),
}
CLASSES = {
    "bert": transformers.BertForMaskedLM,
    "t5": transformers.T5ForConditionalGeneration,
    "vit": transformers.ViTForImageClassification,
    "whisper": transformers.WhisperForConditionalGeneration,
    "clip": transformers.CLIPModel,
}  # the others are causal language models


def build(name):
    """The model called `name` in float32, in eval mode."""
    torch.manual_seed(0)
    make = CLASSES[name] if name in CLASSES else transformers.AutoModelForCausalLM.from_config
    model = make(CONFIGS[name]())
    with torch.no_grad():
        for path, parameter in model.named_parameters():
            if path.endswith("bias"):
                parameter.normal_(0, 0.3)
            elif parameter.dim() == 1 and re.search("norm|ln_", path.lower()):
                parameter.normal_(1, 0.3)
            else:
                parameter.normal_(0, 0.15)
    return model.eval()


_built = {}


@pytest.fixture(params=CONFIGS)
def name(request):
    return request.param


@pytest.fixture
def model(name):
    """A model of its own for each test."""
    if name not in _built:
        _built[name] = build(name)
    return copy.deepcopy(_built[name])


@pytest.fixture
def twin(name, model):
    """The same model, never fused."""
    return copy.deepcopy(_built[name])


@pytest.fixture
def ids():
    return torch.randint(2, 64, (2, 9), generator=torch.Generator().manual_seed(1))


@pytest.fixture
def inputs(name, ids):
    """What the model is called with."""
    generator = torch.Generator().manual_seed(2)
    pixels = torch.randn(2, 3, 16, 16, generator=generator)
    sound = torch.randn(2, 8, 32, generator=generator)
    given = {
        "t5": {"input_ids": ids, "decoder_input_ids": ids[:, 2:].contiguous()},
        "vit": {"pixel_values": pixels},
        "whisper": {"input_features": sound, "decoder_input_ids": ids},
        "clip": {"input_ids": ids, "pixel_values": pixels},
    }
    return given.get(name, {"input_ids": ids})


@pytest.fixture
def wanted(name, inputs):
    """What makes the model return a loss too."""
    if name == "clip":
        return {"return_loss": True}
    if name == "vit":
        return {"labels": torch.tensor([0, 1])}
    return {"labels": inputs.get("decoder_input_ids", inputs.get("input_ids"))}


# -- what is expected of a plan ----------------------------------------------------------------

KEYS = ("state", "pattern", "fusion", "parts", "reason")
COLUMNS = ("model", *KEYS, "count", "mark")


def counted(plan):
    """Sites and refusals of a plan by `KEYS`, layers of one path counted together."""
    found = collections.Counter()
    for state, places in (("site", plan.sites), ("refused", plan.refusals)):
        for place in places:
            pattern = re.sub(r"\b\d+\b", "*", place.name)
            found[state, pattern, place.fusion, " ".join(place.parts), getattr(place, "reason", "")] += 1
    return found


def expected():
    """The rows of expected.csv. A `mark` is put there by hand."""
    with (Path(__file__).parent / "expected.csv").open(newline="") as file:
        return list(csv.DictReader(file))


@pytest.fixture(name="counted")
def _counted():
    return counted


@pytest.fixture(scope="session", name="expected")
def _expected():
    return expected()


if __name__ == "__main__":
    marks = {tuple(row[key] for key in ("model", *KEYS)): row["mark"] for row in expected()}
    writer = csv.writer(sys.stdout, lineterminator="\n")
    writer.writerow(COLUMNS)
    for model_name in CONFIGS:
        if not model_name.endswith("-bias"):
            for key, count in counted(fk.plan(build(model_name))).items():
                row = (model_name, *key)
                writer.writerow((*row, count, marks.get(row, "")))
