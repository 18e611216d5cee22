"""Made-up inputs: likely shapes, each said."""

import pytest
import torch
import torch.nn as nn

from fusekit.tracing import trace
from fusekit.tracing.inputs import Guess, guesses, inputs_of_modules, made_up_inputs, reference_weight


def made(module, **guess):
    return made_up_inputs(module, type(module).forward, Guess(**guess))


class A(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up = nn.LayerNorm(6), nn.Linear(6, 9, dtype=torch.bfloat16)
        self.head_dim = 3

    def forward(self, hidden_states, position_embeddings=None, attention_mask=None, *args, other, **kwargs):
        return hidden_states


def test_required_parameters_get_tensors_of_the_hidden_size_and_dtype():
    values, said = made(A())
    assert list(values) == ["hidden_states", "other"]
    assert values["other"].shape == (2, 7, 6) and values["other"].dtype == torch.bfloat16
    assert values["other"].is_meta and values["other"] is not values["hidden_states"]
    assert said == [
        "hidden_states is a made-up bfloat16 tensor [2, 7, 6]",
        "position_embeddings is left out: None",
        "attention_mask is left out: None",
        "other is a made-up bfloat16 tensor [2, 7, 6]",
    ]


def test_a_guess_makes_up_optional_ones_too():
    values, said = made(A(), optional=frozenset({"position_embeddings"}))
    assert [t.shape for t in values["position_embeddings"]] == [(2, 7, 3), (2, 7, 3)]
    assert "position_embeddings is 2 of these: a made-up bfloat16 tensor [2, 7, 3]" in said


def test_first_parameter_is_given_where_none_is_required():
    class Optional(nn.Module):
        def forward(self, input_ids=None, mask=None):
            return input_ids

    values, _ = made(Optional())
    assert list(values) == ["input_ids"] and values["input_ids"].dtype == torch.long


def test_embedding_gets_ids():
    assert made(nn.Embedding(5, 3))[0]["input"].dtype == torch.long


@pytest.mark.parametrize(
    ("module", "hidden"),
    [(nn.Linear(3, 5), 3), (nn.LayerNorm(4), 4), (nn.Sequential(nn.LayerNorm(4), nn.Linear(6, 5)), 6)],
)
def test_reference_weight_has_the_hidden_size_last(module, hidden):
    assert reference_weight(module).shape[-1] == hidden


def test_reference_weight_of_conv1d_is_turned():
    from transformers.pytorch_utils import Conv1D

    assert reference_weight(Conv1D(12, 4)).shape == (12, 4)


def test_module_without_parameters_has_no_reference_weight():
    assert reference_weight(nn.GELU()) is None and made(nn.GELU())[0]["input"].shape == (2, 7, 16)


# -- rotary tables -----------------------------------------------------------------------------


class Config:
    def __init__(self, **settings):
        self.__dict__.update(settings)


class Rotary(nn.Module):
    """Turns the first `turned` features of each head."""

    def __init__(self, turned, settings=(), **attributes):
        super().__init__()
        self.__dict__.update(attributes)
        self.proj, self.config, self.turned = nn.Linear(48, 48), Config(**dict(settings)), turned

    def forward(self, hidden_states, position_embeddings: tuple[torch.Tensor, torch.Tensor]):
        cos, sin = position_embeddings
        heads = self.proj(hidden_states).view(2, 7, 4, 12).transpose(1, 2)[..., : self.turned]
        return heads * cos.unsqueeze(1) + heads * sin.unsqueeze(1)


@pytest.mark.parametrize(
    ("turned", "settings", "attributes"),
    [
        (12, {}, {"head_dim": 12}),
        (12, {"num_attention_heads": 4}, {}),
        (6, {"partial_rotary_factor": 0.5}, {"head_dim": 12}),
        (3, {"rope_parameters": {"partial_rotary_factor": 0.25}}, {"head_size": 12}),
        (4, {"partial_rotary_factor": 0.5}, {"head_dim": 12, "rotary_ndims": 4}),
        (4, {"qk_rope_head_dim": 4, "head_dim": 12}, {}),
        (8, {"head_dim": 12}, {"qk_rope_head_dim": 8, "head_dim": 12}),
    ],
)
def test_rotary_width_is_that_of_the_part_of_a_head_that_is_turned(turned, settings, attributes):
    module = Rotary(turned, settings, **attributes)
    assert [t.shape for t in made(module)[0]["position_embeddings"]] == [(2, 7, turned)] * 2
    assert trace(module).complete


def test_a_table_may_have_no_batch_or_half_the_angles_or_be_added():
    class Flat(Rotary):
        def forward(self, hidden_states, position_embeddings=None):
            cos, sin = position_embeddings
            assert cos.dim() == 2
            return self.proj(hidden_states).view(2, 7, 4, 12).transpose(1, 2) * cos + sin

    class Half(Rotary):
        def forward(self, hidden_states, position_embeddings=None):
            cos, sin = (t.repeat_interleave(2, -1).unsqueeze(2) for t in position_embeddings)
            return self.proj(hidden_states).view(2, 7, 4, 12) * cos + sin

    class Added(Rotary):
        def forward(self, hidden_states, position_embeddings: torch.Tensor | None = None):
            return self.proj(hidden_states + position_embeddings)

    for cls in (Flat, Half, Added):
        found = trace(cls(12, head_dim=12))
        assert found.complete, found.stopped
    assert len(list(guesses(Added.forward))) == len(list(guesses(Half.forward))) > 3


def test_states_of_an_encoder_are_given_where_a_forward_reads_them():
    class Cross(nn.Module):
        def __init__(self):
            super().__init__()
            self.query, self.config = nn.Linear(8, 8), Config(cross_attention_hidden_size=6)
            self.key, self.value = nn.Linear(6, 8), nn.Linear(6, 8)

        def forward(self, hidden_states, encoder_hidden_states=None):
            shape = encoder_hidden_states.shape
            return self.query(hidden_states), self.key(encoder_hidden_states), shape

    found = trace(Cross())
    assert found.complete, found.stopped
    assert "encoder_hidden_states is a made-up float32 tensor [2, 9, 6]" in [
        a.text for a in found.assumptions
    ]


# -- what goes into whole models ---------------------------------------------------------------


def test_images_and_spectrograms_have_the_sizes_of_the_configuration():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.proj = nn.Linear(4, 4)
            self.config = Config(
                vision_config=VisionConfig(image_size=[8, 6], num_channels=1),
                num_mel_bins=5, max_source_positions=20,
            )  # fmt: skip

        def forward(self, pixel_values, input_features, decoder_input_ids, past_key_values):
            return self.proj(input_features)

    class VisionConfig(Config):
        pass

    values, _ = made(Model())
    assert values["pixel_values"].shape == (2, 1, 8, 6)
    assert values["input_features"].shape == (2, 5, 40)
    assert values["decoder_input_ids"].dtype == torch.long
    assert values["past_key_values"] is None


def test_a_plain_forward_has_one_guess():
    assert list(guesses(nn.Linear.forward)) == [Guess()]
    assert [guess.optional for guess in guesses(A.forward)][:2] == [set(), {"position_embeddings"}]


# -- what modules are called with --------------------------------------------------------------


def test_tests_of_values_go_the_usual_way_and_experts_have_a_shape():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.some, self.every, self.last = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(4, 4)
            self.experts = nn.Parameter(torch.randn(3, 8, 4))

        def forward(self, x, mask):
            if (mask > 1).any():
                x = self.some(x)
            if (mask == 1).all() and torch.all(mask == 1, -1).all():
                x = self.every(x)
            return self.last(nn.functional.grouped_mm(x, self.experts, offs=mask.int()))

    given = torch.randn(6, 8), torch.ones(3)
    found = inputs_of_modules(Model(), given, {})
    assert list(found) == ["", "every", "last"]
    assert found["last"][0][0].shape == (6, 4) and found["last"][0][0].is_meta


def test_a_test_of_a_number_ends_the_search():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x):
            y = self.first(x)
            return self.last(y) if x.sum().item() > 0 else y

    assert list(inputs_of_modules(Model(), (torch.randn(2, 8),), {})) == ["", "first"]


def test_a_module_is_said_to_be_called_with_what_a_cache_held_then():
    class Reads(nn.Module):
        def __init__(self):
            super().__init__()
            self.proj = nn.Linear(8, 8)

        def forward(self, x, cache):
            cache.append(self.proj(x))
            return cache[0]

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList([Reads(), Reads()])

        def forward(self, x):
            cache = []
            for layer in self.layers:
                x = layer(x, cache)
            return x

    found = inputs_of_modules(Model(), (torch.randn(2, 8),), {})
    assert [len(found[f"layers.{index}"][0][1]) for index in (0, 1)] == [0, 1]
