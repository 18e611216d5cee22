"""Made-up inputs: likely shapes, each said."""

import pytest
import torch
import torch.nn as nn

from fusekit.tracing.inputs import made_up_inputs, reference_weight


def made(module, conventional=False):
    return made_up_inputs(module, type(module).forward, conventional)


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


def test_conventions_make_up_the_optional_ones_that_forwards_need():
    values, said = made(A(), conventional=True)
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
