"""A model from a config: the class that the config means, without weights, and no code of its own."""

import json
import logging
import os
import subprocess
import sys
import warnings

import pytest
import torch
import transformers
from transformers import BertConfig, LlamaConfig, T5Config, WhisperConfig

import fusekit as fk
from fusekit.model.build import from_config
from tests.noise import without_noise

SMALL = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, vocab_size=60)


def written(folder, config, **more):
    """A folder with the config, changed."""
    config.save_pretrained(folder)
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | more))
    return folder


LLAMA, BERT = LlamaConfig(**SMALL), BertConfig(**SMALL)
T5 = T5Config(vocab_size=60, d_model=32, d_kv=8, d_ff=48, num_layers=1)
WHISPER = WhisperConfig(
    d_model=32, encoder_layers=1, decoder_layers=1, encoder_attention_heads=4, decoder_attention_heads=4
)


@pytest.mark.parametrize(
    "config, named, want",
    [
        (LLAMA, None, "LlamaForCausalLM"),
        (LLAMA, "LlamaModel", "LlamaModel"),
        (LLAMA, "LlamaForTokenClassification", "LlamaForTokenClassification"),
        (BERT, None, "BertForMaskedLM"),
        (T5, None, "T5ForConditionalGeneration"),
        (WHISPER, None, "WhisperForConditionalGeneration"),
    ],
)
def test_the_class_is_the_one_in_architectures_else_that_of_the_auto_model(tmp_path, config, named, want):
    built = from_config(written(tmp_path, config, architectures=named and [named]))
    assert type(built.model).__name__ == want and built.remarks == ()
    assert all(parameter.is_meta for parameter in built.model.parameters()) and not built.model.training


def test_the_file_itself_may_be_named_and_needs_no_model_type(tmp_path):
    written(tmp_path, LlamaConfig(**SMALL), architectures=["LlamaModel"], model_type="")
    os.rename(tmp_path / "config.json", tmp_path / "small.json")
    assert type(from_config(tmp_path / "small.json").model).__name__ == "LlamaModel"


def test_a_class_of_another_config_is_not_taken(tmp_path):
    built = from_config(written(tmp_path, LlamaConfig(**SMALL), architectures=["BertForMaskedLM"]))
    assert type(built.model).__name__ == "LlamaForCausalLM"
    assert "BertForMaskedLM is no class" in built.remarks[0]


def test_a_class_that_transformers_lacks_is_replaced_by_that_of_its_task_and_told(tmp_path):
    folder = written(tmp_path, LlamaConfig(**SMALL), architectures=["MineForSequenceClassification"])
    built = from_config(folder)
    assert type(built.model).__name__ == "LlamaForSequenceClassification"
    (remark,) = built.remarks
    assert "MineForSequenceClassification" in remark and "planned is LlamaForSequenceClassification" in remark


def test_quantization_is_left_out_and_told(tmp_path):
    folder = written(tmp_path, LlamaConfig(**SMALL), quantization_config={"quant_method": "fp8"})
    built = from_config(folder)
    assert "planned without quantization" in built.remarks[0]
    assert len(fk.plan(built.model).sites) == 2 + 2 + 5


def test_numbers_that_json_lacks_are_read_as_transformers_writes_them(tmp_path):
    config = transformers.BambaConfig(**SMALL, num_key_value_heads=2, mamba_n_heads=8, mamba_d_head=8)
    assert '"__float__"' in (written(tmp_path, config) / "config.json").read_text()
    assert type(from_config(tmp_path).model).__name__ == "BambaForCausalLM"


def test_nothing_is_said_and_logging_is_as_before(tmp_path, caplog, capfd):
    level = logging.getLogger("transformers").level
    # a token outside of the vocabulary: Transformers warns
    folder = written(tmp_path, LlamaConfig(**SMALL), bos_token_id=9999)
    with warnings.catch_warnings(record=True) as caught:
        from_config(folder)
    assert caught == [] and capfd.readouterr() == ("", "")
    assert logging.getLogger("transformers").level == level


REMOTE = {
    "configuration_mine.py": """
import os, pathlib
from transformers import PretrainedConfig
pathlib.Path(os.environ["MARKER"]).touch()
class MineConfig(PretrainedConfig):
    model_type = "mine"
    def __init__(self, width=8, **fields):
        self.width = width
        super().__init__(**fields)
""",
    "modeling_mine.py": """
import os, pathlib
import torch.nn as nn
from transformers import PreTrainedModel
from .configuration_mine import MineConfig
pathlib.Path(os.environ["MARKER"]).touch()
class Attention(nn.Module):
    def __init__(self, n):
        super().__init__()
        self.q, self.k, self.v = nn.Linear(n, n), nn.Linear(n, n), nn.Linear(n, n)
    def forward(self, x):
        q, k, v = self.q(x), self.k(x), self.v(x)
        return nn.functional.scaled_dot_product_attention(q, k, v)
class MineModel(PreTrainedModel):
    config_class = MineConfig
    def __init__(self, config):
        super().__init__(config)
        self.layers = nn.ModuleList(Attention(config.width) for _ in range(2))
        self.post_init()
    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x
""",
}
AUTO_MAP = {
    "AutoConfig": "configuration_mine.MineConfig",
    "AutoModel": "modeling_mine.MineModel",
    "AutoModelForCausalLM": "modeling_mine.MineModel",
}


@pytest.fixture
def remote(tmp_path):
    """(a folder with a config and code of its own, the file that the code writes when it runs)."""
    folder = tmp_path / "mine"
    folder.mkdir()
    for name, text in REMOTE.items():
        (folder / name).write_text(text)
    config = {"model_type": "mine", "architectures": ["MineModel"], "auto_map": AUTO_MAP, "width": 8}
    (folder / "config.json").write_text(json.dumps(config))
    return folder, tmp_path / "marker"


def command(folder, marker, *options):
    """`python -m fusekit plan` in a process of its own."""
    env = os.environ | {"MARKER": str(marker), "HF_MODULES_CACHE": str(marker.parent / "modules")}
    words = [sys.executable, "-m", "fusekit", "plan", str(folder), *options]
    return subprocess.run(words, capture_output=True, text=True, env=env)


def test_code_beside_a_config_runs_only_where_it_is_trusted(remote):
    folder, marker = remote
    done = command(folder, marker)
    assert done.returncode == 2 and done.stdout == "" and not marker.exists()
    assert done.stderr.startswith("fusekit: ") and done.stderr.count("\n") == 1
    assert "does not know the model type 'mine'" in done.stderr and "--trust-remote-code" in done.stderr
    kept = marker.parent / "plan.json"
    done = command(folder, marker, "--trust-remote-code", "--save", str(kept))
    assert (done.returncode, without_noise(done.stderr)) == (0, "") and marker.exists()
    assert done.stdout.startswith("MineModel: 2 sites (2 qkv), 0 refusals")
    assert fk.load_plan(kept).sites[0].path.startswith("transformers_modules/mine/")


def test_a_known_type_is_built_from_transformers_and_its_code_left_alone(remote, monkeypatch):
    folder, marker = remote
    monkeypatch.setenv("MARKER", str(marker))
    config = LlamaConfig(**SMALL).to_dict()
    for more in ({"auto_map": AUTO_MAP}, {"auto_map": {"AutoModel": "../modeling_mine.MineModel"}}):
        (folder / "config.json").write_text(json.dumps(config | more | {"architectures": ["MineModel"]}))
        built = from_config(folder)
        assert type(built.model).__name__ == "LlamaForCausalLM" and "auto_map" not in vars(built.model.config)
        (remark,) = built.remarks
        assert "code of its own, which was not run" in remark and "planned is LlamaForCausalLM" in remark
    assert not marker.exists()


def test_code_that_a_part_of_a_config_names_is_left_alone(remote, monkeypatch):
    """A composite model builds its parts by AutoModel, which would ask for the code of a part."""
    folder, marker = remote
    monkeypatch.setenv("MARKER", str(marker))
    vision = dict(SMALL, image_size=16, patch_size=8)
    config = transformers.LlavaConfig(
        text_config=LlamaConfig(**SMALL), vision_config=transformers.CLIPVisionConfig(**vision)
    ).to_dict()
    config["text_config"]["auto_map"] = AUTO_MAP
    config["text_config"]["_name_or_path"] = str(folder)
    config["text_config"]["_attn_implementation"] = "someone/kernel"
    (folder / "config.json").write_text(json.dumps(config))
    built = from_config(folder)
    assert type(built.model).__name__ == "LlavaForConditionalGeneration" and not marker.exists()
    part = built.model.config.text_config
    assert "auto_map" not in vars(part) and part._attn_implementation != "someone/kernel"
    config["text_config"]["model_type"] = "mine"
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(fk.FusekitError):
        from_config(folder)
    assert not marker.exists()


def test_trusted_code_that_fails_is_an_error_of_one_line(remote):
    folder, marker = remote
    (folder / "modeling_mine.py").write_text("raise ValueError('not today')\n")
    done = command(folder, marker, "--trust-remote-code")
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert "the code that comes with" in done.stderr and "not today" in done.stderr


@pytest.mark.parametrize(
    "text, says",
    [
        ("{", r"config.json is not JSON .*name a config.json"),
        ("[]", r"no config of a Transformers model"),
        ('{"a": 1}', r"has neither model_type nor architectures"),
        ('{"fusekit_plan": 1}', r"is a saved plan, not a config: give it as --expect"),
        ('{"model_type": "mine"}', r"does not know the model type 'mine': upgrade Transformers"),
        ('{"architectures": ["Mine", 3]}', r"does not know the architectures \['Mine'\]"),
        ('{"model_type": ["llama"]}', r"does not know the model type \['llama'\]"),
        ('{"model_type": "llama", "hidden_size": "wide"}', r"does not fit LlamaConfig: "),
        ('{"model_type": "esm", "vocab_size": null}', r"EsmForMaskedLM cannot be built from .*: TypeError"),
        ('{"model_type": "align_text_model"}', r"has no model for AlignTextConfig"),
    ],
)
def test_a_config_that_will_not_do_is_named(tmp_path, text, says):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(fk.FusekitError, match=says) as error:
        from_config(tmp_path)
    assert str(tmp_path) in str(error.value)


def test_what_is_not_there_is_named(tmp_path, monkeypatch):
    with pytest.raises(fk.FusekitError, match=r"no config.json in the folder"):
        from_config(tmp_path)
    with pytest.raises(fk.FusekitError, match=r"no file or folder meta-llama/.*nothing is downloaded"):
        from_config("meta-llama/Llama-3.1-8B")
    written(tmp_path, LlamaConfig(**SMALL))
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(fk.FusekitError, match=r"cannot be imported .*pip install 'transformers>=5'"):
        from_config(tmp_path)


def test_no_weights_are_read(tmp_path):
    folder = written(tmp_path, LlamaConfig(**SMALL))
    (folder / "model.safetensors").write_bytes(b"no weights")
    assert isinstance(from_config(folder).model, torch.nn.Module)
