"""Small models of real architectures, their norm weights and biases random so that they count."""

import copy

import pytest
import torch
import transformers

SIZES = dict(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=64,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=None,
)

CONFIGS = {
    "llama": lambda: transformers.LlamaConfig(**SIZES),
    "llama-bias": lambda: transformers.LlamaConfig(**SIZES, attention_bias=True, mlp_bias=True),
    "mistral": lambda: transformers.MistralConfig(**SIZES, sliding_window=None),
    "qwen3": lambda: transformers.Qwen3Config(**SIZES, head_dim=16),
    "qwen3-bias": lambda: transformers.Qwen3Config(**SIZES, head_dim=16, attention_bias=True),
    "olmo2": lambda: transformers.Olmo2Config(**SIZES),
    "olmo2-bias": lambda: transformers.Olmo2Config(**SIZES, attention_bias=True),
}


def build(name):
    """The model called `name` in float32, in eval mode."""
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(CONFIGS[name]())
    with torch.no_grad():
        for path, parameter in model.named_parameters():
            if "norm" in path:
                parameter.normal_(1, 0.3)
            elif path.endswith("bias"):
                parameter.normal_(0, 0.3)
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
