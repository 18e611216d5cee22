"""What `verify` runs a model on when nothing is given."""

import pytest
import torch
import torch.nn as nn
from transformers import T5Config, T5ForConditionalGeneration, WhisperConfig, WhisperForConditionalGeneration

import fusekit as fk
from fusekit.model.inputs import describe, made_up_inputs, missing_inputs

NO_TEXT = ("top-1", "generation")


class Config:
    def __init__(self, **settings):
        self.__dict__.update(settings)


class Seen(nn.Module):
    """A model of two towers; `fits` says which inputs it takes together."""

    main_input_name = "input_ids"

    def __init__(self, fits=lambda ids, pixels: True):
        super().__init__()
        self.config = Config(vocab_size=11, image_size=4, num_channels=3, max_position_embeddings=9)
        self.embed, self.a, self.b = nn.Embedding(11, 6), nn.Linear(6, 5), nn.Linear(6, 7)
        self.fits = fits

    def forward(self, input_ids=None, pixel_values=None, labels=None, inputs_embeds=None):
        if not self.fits(input_ids, pixel_values):
            raise ValueError("not so")
        x = self.embed(input_ids)
        return self.a(x), self.b(x)


def test_everything_a_model_declares_of_text_and_images_is_tried_first():
    most, least = made_up_inputs(Seen(), 16)
    assert list(most) == ["input_ids", "pixel_values"] and list(least) == ["input_ids"]
    assert most["input_ids"].shape == (2, 9) and most["input_ids"].max() < 11
    assert most["pixel_values"].shape == (2, 3, 4, 4) and most["pixel_values"].std() > 0.5


@pytest.mark.parametrize(
    ("fits", "used"),
    [
        (lambda ids, pixels: pixels is not None, "random input_ids [2, 9], pixel_values [2, 3, 4, 4]"),
        (lambda ids, pixels: pixels is None, "random input_ids [2, 9]"),
    ],
)
def test_what_the_model_runs_on_is_used_and_said(fits, used):
    report = fk.plan(Seen(fits)).verify(skip=NO_TEXT)
    assert report.ok and report.inputs == used, report


def test_a_model_that_runs_on_neither_says_why():
    report = fk.plan(Seen(lambda ids, pixels: ids.is_meta)).verify(skip=NO_TEXT)
    assert "the unfused model fails on these inputs: ValueError: not so" in [n.reason for n in report.not_run]


def test_floats_have_the_dtype_of_the_model():
    (_, least), pixels = made_up_inputs(Seen().half(), 4), made_up_inputs(Seen().half(), 4)[0]["pixel_values"]
    assert pixels.dtype == torch.float16 and least["input_ids"].dtype == torch.long


def test_required_arguments_are_named_where_their_meaning_is_not_known():
    class Own(nn.Module):
        def forward(self, left, right, scale=1.0):
            return left

    class Optional(nn.Module):
        def forward(self, x=None, y=None):
            return x

    assert made_up_inputs(Own(), 4) == [] == made_up_inputs(Optional(), 4)
    assert missing_inputs(Own()) == 'verify(inputs={"left": ..., "right": ...})'
    assert missing_inputs(Optional()) == 'verify(inputs={"x": ...})'


def test_a_required_mask_is_none_and_positions_count_up():
    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.proj, self.head_dim = nn.Linear(8, 8), 4

        def forward(
            self, hidden_states, attention_mask, position_ids, position_embeddings=None, use_cache=None
        ):
            return hidden_states

    most, least = made_up_inputs(Layer(), 5)
    assert list(least) == ["hidden_states", "attention_mask", "position_ids", "use_cache"]
    assert least["attention_mask"] is None and least["use_cache"] is False
    assert least["position_ids"].tolist() == [[0, 1, 2, 3, 4]] * 2
    assert [table.shape for table in most["position_embeddings"]] == [(2, 5, 4)] * 2
    assert describe(most) == "hidden_states [2, 5, 8], position_ids [2, 5], position_embeddings [2, 5, 4]"


def test_an_encoder_and_its_decoder_get_one_each():
    with torch.device("meta"):
        model = T5ForConditionalGeneration(T5Config(vocab_size=20, d_model=8, d_kv=4, d_ff=8, num_layers=1))
    (inputs,) = made_up_inputs(model, 6)
    assert describe(inputs) == "input_ids [2, 6], decoder_input_ids [2, 6]"


def test_whisper_gets_exactly_the_frames_that_it_insists_on():
    sizes = dict(d_model=8, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2, pad_token_id=0)
    more = dict(
        decoder_attention_heads=2, encoder_ffn_dim=8, decoder_ffn_dim=8, vocab_size=20, num_mel_bins=6
    )
    ends = dict(bos_token_id=1, eos_token_id=2, decoder_start_token_id=1)
    config = WhisperConfig(**sizes, **more, **ends, max_source_positions=10, max_target_positions=4)
    (inputs,) = made_up_inputs(WhisperForConditionalGeneration(config), 16)
    assert describe(inputs) == "input_features [2, 6, 20], decoder_input_ids [2, 4]"
