"""A real pretrained BERT: fused, it gives the same embeddings."""

import copy

import pytest
import torch

import fusekit as fk

SENTENCES = [
    "A cat sits on the mat.",
    "There is a kitten on the carpet.",
    "The stock market fell sharply today.",
]


def embeddings(model, tokenizer):
    """Of unit length, shape [3, 384]: the mean of the last hidden states over each sentence's tokens."""
    batch = tokenizer(SENTENCES, padding=True, return_tensors="pt")
    mask = batch["attention_mask"].unsqueeze(-1)
    assert not mask.all()  # the shorter sentences are padded
    with torch.no_grad():
        states = model(**batch).last_hidden_state
    return torch.nn.functional.normalize((states * mask).sum(1) / mask.sum(1), dim=-1)


@pytest.fixture
def fresh(minilm):
    model, tokenizer = minilm
    return copy.deepcopy(model), tokenizer


def test_it_knows_which_sentences_are_alike(minilm):
    found = embeddings(*minilm)
    alike = found @ found.T
    assert alike[0, 1] > 0.5 > 0.2 > alike[0, 2]


def test_every_site_of_it_is_what_the_source_says(minilm):
    plan = fk.plan(minilm[0])
    names = {f"encoder.layer.{index}.attention.self" for index in range(6)}
    assert {site.name for site in plan.sites if site.parts == ("query", "key", "value")} == names
    assert {site.fusion for site in plan.sites} == {"qkv"} and len(plan.sites) == 6
    assert plan.refusals == ()


def test_fused_it_gives_the_same_embeddings_and_reverted_the_same_bits(fresh):
    model, tokenizer = fresh
    before = embeddings(model, tokenizer)
    with fk.plan(model).apply():
        torch.testing.assert_close(embeddings(model, tokenizer), before, rtol=0, atol=1e-6)
    assert torch.equal(embeddings(model, tokenizer), before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_is_verified_without_inputs(fresh, dtype):
    report = fk.plan(fresh[0].to(dtype)).verify(tokens=8, skip=("top-1", "generation"))
    assert report.ok, report
    gradients = {check.name for check in report.checks if check.what == "gradients"}
    assert gradients == {name for name, _ in fresh[0].named_parameters()}
