"""A real pretrained Llama: fused, it says the same, token for token."""

import torch

import fusekit as fk

QUESTIONS = ("What is the capital of France?", "Name the planets that are closest to the sun.")


def answer(model, tokenizer, question):
    chat = [{"role": "user", "content": question}]
    prompt = tokenizer.apply_chat_template(
        chat, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    with torch.no_grad():
        tokens = model.generate(**prompt, max_new_tokens=24, do_sample=False)
    return tokens[0, prompt["input_ids"].shape[1] :]


def test_fused_it_gives_the_same_answers_token_for_token(fresh_smollm2):
    model, tokenizer = fresh_smollm2
    before = [answer(model, tokenizer, question) for question in QUESTIONS]
    assert "Paris" in tokenizer.decode(before[0])
    with fk.plan(model).apply() as fused:
        assert len(fused.sites) == 30 * 4 + 1
        after = [answer(model, tokenizer, question) for question in QUESTIONS]
    assert all(torch.equal(old, new) for old, new in zip(before, after, strict=True))
    assert torch.equal(answer(model, tokenizer, QUESTIONS[0]), before[0])


def test_every_site_of_it_is_what_the_source_says(smollm2):
    model, _ = smollm2
    plan = fk.plan(model)
    counts = {}
    for site in plan.sites:
        counts[site.fusion, site.parts] = counts.get((site.fusion, site.parts), 0) + 1
    assert counts == {
        ("qkv", ("q_proj", "k_proj", "v_proj")): 30,
        ("glu", ("gate_proj", "up_proj")): 30,
        ("rms_norm", ()): 61,
    }
    assert plan.refusals == ()


def test_tied_embeddings_stay_tied_while_fused(fresh_smollm2):
    model, _ = fresh_smollm2
    with fk.plan(model).apply():
        assert model.lm_head.weight is model.model.embed_tokens.weight
