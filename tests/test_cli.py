"""The command line: what it prints, what it writes, and its exit status."""

import json
import subprocess
import sys

import pytest
from transformers import GPT2Config, LlamaConfig

import fusekit as fk
from fusekit.cli import main
from tests.noise import without_noise


@pytest.fixture
def config(tmp_path):
    folder = tmp_path / "llama"
    small = LlamaConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, vocab_size=60
    )
    small.save_pretrained(folder)
    return folder


def run(capsys, *words):
    """(exit status, stdout, stderr)"""
    status = main(["plan", *map(str, words)])
    return status, *capsys.readouterr()


def expected(config, tmp_path, capsys, change):
    """A saved plan of the config, changed."""
    file = tmp_path / "plan.json"
    assert run(capsys, config, "--save", file)[0] == 0
    data = json.loads(file.read_text())
    change(data)
    file.write_text(json.dumps(data))
    return file


def test_the_plan_is_printed_saved_and_written(config, tmp_path, capsys):
    file, page = tmp_path / "plan.json", tmp_path / "plan.html"
    status, out, err = run(capsys, config / "config.json", "--save", file, "--html", page)
    assert (status, err) == (0, "")
    assert out.startswith("LlamaForCausalLM: 9 sites (5 rms_norm, 2 qkv, 2 glu), 0 refusals")
    assert f"saved to {file}" in out and f"written to {page}" in out
    assert len(fk.load_plan(file).sites) == 9
    assert page.read_text().startswith("<!doctype html") and "model.layers.0-1.mlp" in page.read_text()


def test_a_plan_as_expected_is_status_0(config, tmp_path, capsys):
    file = expected(config, tmp_path, capsys, lambda data: None)
    status, out, err = run(capsys, config, "--expect", file)
    assert (status, err) == (0, "")
    assert "no change: 9 sites and 0 refusals as before" in out and "--save" not in out


def test_a_site_that_is_gone_is_status_1_with_the_command_that_accepts_it(config, tmp_path, capsys):
    def change(data):
        data["sites"].append(dict(data["sites"][0], modules=["model.layers.{0-1}.extra"]))

    file = expected(config, tmp_path, capsys, change)
    status, out, err = run(capsys, config, "--expect", file)
    assert (status, err) == (1, "")
    assert "LlamaForCausalLM: 2 sites disappeared" in out and "model.layers.0-1.extra" in out
    (accept,) = [line for line in out.splitlines() if "--save" in line]
    assert accept.endswith(f"python -m fusekit plan {config} --save {file}")
    assert main(accept.partition("python -m fusekit ")[2].split()) == 0
    assert run(capsys, config, "--expect", file)[0] == 0


def test_new_sites_are_status_0_and_told(config, tmp_path, capsys):
    def change(data):
        data["sites"] = [entry for entry in data["sites"] if entry["fusion"] != "glu"]

    file = expected(config, tmp_path, capsys, change)
    status, out, _ = run(capsys, config, "--expect", file)
    assert status == 0 and "no site disappeared, 2 appeared" in out
    assert f"python -m fusekit plan {config} --save {file}" in out


def test_options_narrow_what_is_expected_too(config, tmp_path, capsys):
    file = expected(config, tmp_path, capsys, lambda data: None)
    for words, number in [
        (["--only", "glu,qkv"], 4),
        (["--only", "glu", "--only", "qkv"], 4),
        (["--exclude", "rms_norm"], 4),
        (["--layers", "model.layers.1"], 4),
        (["--layers", "model.layers.0", "--layers", "model.nor*"], 5),
    ]:
        status, out, _ = run(capsys, config, "--expect", file, *words)
        assert status == 0 and f"no change: {number} sites" in out, words
    status, out, _ = run(capsys, config, "--layers", "model.layers.1", "--only", "glu")
    assert out.startswith("LlamaForCausalLM: 1 site (1 glu)")


def test_the_command_that_accepts_keeps_what_was_not_compared(config, tmp_path, capsys):
    def change(data):
        data["sites"] = [entry for entry in data["sites"] if entry["fusion"] != "glu"]

    file = expected(config, tmp_path, capsys, change)
    _, out, _ = run(capsys, config, "--expect", file, "--only", "glu")
    assert "2 appeared" in out and out.rstrip().endswith(f"{config} --save {file}")
    expected(config, tmp_path, capsys, lambda data: data.update(sites=[]))
    _, out, _ = run(capsys, config, "--expect", file, "--only", "glu")
    assert out.rstrip().endswith(f"{config} --save {file} --only glu")


def test_the_file_is_read_before_it_is_written_anew(config, tmp_path, capsys):
    def change(data):
        data["sites"].append(dict(data["sites"][0], modules=["gone"]))

    file = expected(config, tmp_path, capsys, change)
    assert run(capsys, config, "--expect", file, "--save", file)[0] == 1
    assert run(capsys, config, "--expect", file)[0] == 0


def test_a_model_of_which_nothing_is_fused_says_so(tmp_path, capsys):
    GPT2Config(n_embd=32, n_layer=1, n_head=4, vocab_size=60).save_pretrained(tmp_path)
    status, out, _ = run(capsys, tmp_path)
    assert status == 0 and "nothing to fuse in GPT2LMHeadModel" in out and "Conv1D" in out


@pytest.mark.parametrize(
    "words, says",
    [
        (["{config}/none"], "there is no file or folder"),
        (["{config}", "--expect", "{config}/none.json"], "there is no file"),
        (["{config}", "--expect", "{config}/config.json"], "no plan of fusekit"),
        (["{config}", "--save", "{config}/none/plan.json"], "the plan cannot be written"),
        (["{config}", "--html", "{config}/none/plan.html"], "the page cannot be written"),
        (["{config}", "--only", "glue"], "there is no fusion 'glue' (did you mean 'glu'?)"),
        (["{config}", "--layers", "model.layer.0"], "layers='model.layer.0' matches no module"),
    ],
)
def test_an_error_is_status_2_and_one_line_on_stderr(config, capsys, words, says):
    status, _, err = run(capsys, *(word.format(config=config) for word in words))
    assert status == 2 and err.startswith("fusekit: ") and err.count("\n") == 1 and says in err


def test_a_fault_of_fusekit_is_status_2_and_not_1(config, capsys, monkeypatch):
    def broken(*_, **__):
        raise KeyError("a fault")

    monkeypatch.setattr("fusekit.model.plan", broken)
    status, out, err = run(capsys, config)
    assert (status, out) == (2, "") and "KeyError: 'a fault' (this should not happen" in err
    status, _, err = run(capsys, config, "--debug")
    assert status == 2 and "Traceback" in err


@pytest.mark.parametrize("words", [[], ["plan"], ["plan", "x", "--what"], ["survey"]])
def test_wrong_words_are_status_2(words, capsys):
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 2 and capsys.readouterr().err.startswith("usage: python -m fusekit")


def test_help_and_version(capsys):
    for words, says in [
        (["--help"], "plan a model from its config"),
        (["--version"], f"fusekit {fk.__version__}"),
    ]:
        with pytest.raises(SystemExit) as ended:
            main(words)
        assert ended.value.code == 0 and says in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main(["plan", "--help"])
    assert "1  with --expect, a site of the file is gone" in capsys.readouterr().out


def test_as_a_process_it_is_quiet_and_its_status_is_the_shells(config, tmp_path, capsys):
    def change(data):
        data["sites"].append(dict(data["sites"][0], modules=["gone"]))

    file = expected(config, tmp_path, capsys, change)
    words = [sys.executable, "-m", "fusekit", "plan", str(config), "--expect", str(file)]
    done = subprocess.run(words, capture_output=True, text=True, env=None)
    assert (done.returncode, without_noise(done.stderr)) == (1, "") and "1 site disappeared" in done.stdout


def test_help_does_not_import_transformers():
    code = (
        "import sys, contextlib, io; from fusekit.cli import main\n"
        "with contextlib.suppress(SystemExit), contextlib.redirect_stdout(io.StringIO()): main(['--help'])\n"
        "print('transformers' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
