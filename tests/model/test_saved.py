"""A plan as a file: what is in it, that it comes back the same, and what a broken one says."""

import json
import os
import re

import pytest
import torch
import torch.nn as nn
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig, LlamaForCausalLM

import fusekit as fk
from fusekit.fusions import Refusal
from fusekit.model.saved import SavedRefusal, SavedSite, as_json, folded, portable, saved, unfolded


def llama(layers=3):
    config = LlamaConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=layers, num_attention_heads=4, vocab_size=60
    )
    with torch.device("meta"):
        return LlamaForCausalLM(config)


@pytest.fixture
def hooked():
    """A model with sites, a refusal and an applied site."""
    model = llama()
    model.model.layers[1].self_attn.k_proj.register_forward_hook(lambda *_: None)
    fk.plan(model, only="glu", layers="model.layers.2").apply()
    return model


def test_a_plan_comes_back_as_it_was(hooked, tmp_path):
    plan = fk.plan(hooked)
    path = plan.save(tmp_path / "plan.json")
    kept = fk.load_plan(path)
    assert kept == saved(plan) and as_json(kept) == path.read_text()
    assert kept.model_name == "LlamaForCausalLM" and kept.fusions == plan.fusions

    def places(items):
        return sorted((one.name, one.fusion, one.parts) for one in items)

    for name in ("sites", "refusals", "applied"):
        assert places(getattr(kept, name)) == places(getattr(plan, name)) != []
    (refusal,), (mine,) = kept.refusals, plan.refusals
    assert (refusal.reason, refusal.message, refusal.line) == (mine.reason, mine.message, mine.line)
    assert refusal.type_name == "LlamaAttention" and kept.applied[0].applied


def test_the_frame_of_a_saved_plan_is_that_of_the_plan(hooked, tmp_path):
    plan = fk.plan(hooked)
    by = ["name", "fusion"]
    frame = plan.to_frame().drop(columns="roles").sort_values(by, ignore_index=True)
    kept = fk.load_plan(plan.save(tmp_path / "p.json")).to_frame().sort_values(by, ignore_index=True)
    assert list(kept.columns) == list(frame.columns)
    assert kept.drop(columns="path").equals(frame.drop(columns="path"))
    assert set(kept.path) == {"transformers/models/llama/modeling_llama.py"}


def test_the_file_names_format_versions_and_model_and_nothing_of_the_machine(hooked, tmp_path):
    import transformers

    text = fk.plan(hooked).save(str(tmp_path / "p.json")).read_text()
    data = json.loads(text)
    assert data["fusekit_plan"] == 1 and data["fusekit"] == fk.__version__
    assert data["torch"] == torch.__version__ and data["transformers"] == transformers.__version__
    assert data["model"] == "LlamaForCausalLM"
    assert os.path.expanduser("~") not in text and "site-packages" not in text and "0x" not in text


def test_equal_layers_share_an_entry(tmp_path):
    few, many = (fk.plan(llama(n)).save(tmp_path / f"{n}.json").read_text() for n in (2, 40))
    assert len(many) < len(few) + 40 and len(many) < 2000
    entries = json.loads(many)["sites"]
    assert [entry["fusion"] for entry in entries] == ["rms_norm", "glu", "qkv"]
    assert entries[1]["modules"] == ["model.layers.{0-39}.mlp"]
    assert entries[0]["modules"][-1] == "model.norm"


def test_one_layer_that_differs_is_few_lines_of_diff(tmp_path):
    import difflib

    model = llama(12)
    before = fk.plan(model).save(tmp_path / "a.json").read_text().splitlines()
    model.model.layers[7].self_attn.k_proj.register_forward_hook(lambda *_: None)
    after = fk.plan(model).save(tmp_path / "b.json").read_text().splitlines()
    lines = [line for line in difflib.ndiff(before, after) if line.startswith("- ")]
    assert [line.strip(' -,"') for line in lines] == ["model.layers.{0-11}.self_attn", 'refusals": []']
    assert any("{0-6,8-11}" in line for line in after)


def test_the_same_plan_gives_the_same_bytes_whatever_its_order(tmp_path):
    plan = fk.plan(llama())
    turned = type(plan)(plan.model, plan.sites[::-1], plan.refusals, plan.applied)
    assert as_json(saved(plan)) == as_json(saved(turned))


def test_a_part_of_a_plan_and_a_model_of_one_module_are_saved(tmp_path):
    model = llama()
    part = fk.load_plan(fk.plan(model)["model.layers.1"].save(tmp_path / "a.json"))
    assert part.scope == "model.layers.1" and {site.name.split(".")[2] for site in part.sites} == {"1"}
    alone = fk.load_plan(fk.plan(model.model.layers[0].mlp).save(tmp_path / "b.json"))
    assert [site.name for site in alone.sites] == [""] and alone.sites[0].type_name == "LlamaMLP"


def test_an_address_in_a_message_is_left_out_and_the_path_in_it_is_shortened(tmp_path):
    path = f"{tmp_path}/deep/m.py"
    told = Refusal("0", "qkv", "no-source", f"0: <f at 0x7f00aa> of {path} fails", path, 3)
    model = nn.Sequential(nn.Linear(2, 2))
    kept = saved(fk.Plan(model, (), (told,), ()))
    assert kept.refusals[0].message == "0: <f> of m.py fails" and kept.refusals[0].path == "m.py"


def test_a_path_begins_at_its_outermost_package(tmp_path):
    package = tmp_path / "outer" / "inner"
    package.mkdir(parents=True)
    for folder in (package, package.parent):
        (folder / "__init__.py").touch()
    assert portable(str(package / "m.py")) == "outer/inner/m.py"
    assert portable(str(tmp_path / "alone.py")) == "alone.py"
    assert portable("/home/me/v/lib/python3.12/site-packages/transformers/m.py") == "transformers/m.py"
    assert portable("/x/modules/transformers_modules/repo/1a/m.py") == "transformers_modules/repo/1a/m.py"
    assert portable("<stdin>") == "<stdin>"


WORDS = ["layers", "0", "1", "2", "07", "13", "{0-3}", "{", "}{", "a,b", "{{1}}", "-"]
NAMES = st.lists(st.lists(st.sampled_from(WORDS), max_size=4).map(".".join), unique=True, max_size=30)


@given(NAMES)
@settings(max_examples=200, deadline=None)
def test_names_in_short_stand_for_exactly_those_names(names):
    texts = folded(names)
    assert sorted(name for text in texts for name in unfolded(text)) == sorted(names)


def test_names_are_short():
    experts = [f"layers.{i}.mlp.experts.{j}" for i in range(3, 30) for j in range(64)]
    assert folded(experts) == ["layers.{3-29}.mlp.experts.{0-63}"]


def test_any_site_and_refusal_comes_back(tmp_path):
    sites = tuple(SavedSite(name, "T<>", "qkv", ("é", "\ud800"), None, None) for name in ("", "a", "b.{0-1}"))
    refusals = (
        SavedRefusal("a", "T", "odd", (), "a reason of tomorrow", "{module}: 'x'\n", "m.py", 3),
        SavedRefusal("a", "T", "odd", (), "tied", "a: is shared", "m.py", None),
    )
    plan = fk.SavedPlan("M", sites, refusals, (), "s", ("odd",), (("fusekit", "9"),))
    path = tmp_path / "p.json"
    path.write_text(as_json(plan))
    assert as_json(fk.load_plan(path)) == path.read_text()
    assert fk.load_plan(path).sites == sites


def broken(tmp_path, change):
    """What loading says of a saved plan after `change`, of its data or of its text."""
    path = fk.plan(llama(1)).save(tmp_path / "plan.json")
    data = json.loads(path.read_text())
    data["refusals"] = [dict(data["sites"][0], reason="tied", message="{module}: shared")]
    changed = change(data)
    path.write_text(changed if isinstance(changed, str) else json.dumps(data))
    with pytest.raises(fk.FusekitError) as error:
        fk.load_plan(path)
    said = str(error.value)
    assert "plan.json" in said and "\n" not in said
    return said


@pytest.mark.parametrize(
    "change, says",
    [
        (lambda data: "", "is not JSON .*save the plan again"),
        (lambda data: json.dumps(data)[:100], "is not JSON .*cut short"),
        (lambda data: "[" * 100_000, "is not JSON"),
        (lambda data: "{\n<<<<<<< HEAD\n", "marks of an unresolved merge"),
        (lambda data: "[1]", "no plan of fusekit"),
        (lambda data: data.pop("fusekit_plan") and None, 'no "fusekit_plan".*plan.save'),
        (
            lambda data: data.update(fusekit_plan=2, fusekit="7.1"),
            r"newer .*\(7.1, format 2\).*upgrade",
        ),
        (lambda data: data.update(fusekit_plan="1"), "is '1', not the number of a format"),
        (lambda data: data.update(fusekit_plan=True), "not the number of a format"),
        (lambda data: data.pop("sites") and None, 'has no "sites".*save the plan again'),
        (lambda data: data.update(sites={}), '"sites" is not a list'),
        (lambda data: data.update(model=3), '"model" that is not a text'),
        (lambda data: data["sites"].append(7), r"sites\[3\] is not an object"),
        (lambda data: data["sites"][0].pop("fusion") and None, r'sites\[0\] has no "fusion"'),
        (lambda data: data["sites"][1].update(parts="q"), r'sites\[1\] has a "parts" that is not a list'),
        (lambda data: data["sites"][1].update(modules=[1]), r'"modules" that is not a list of texts'),
        (lambda data: data["sites"][1].update(line=True), r'"line" that is not a number'),
        (lambda data: data["sites"][1].update(path=[]), r'"path" that is not a text'),
        (lambda data: data["refusals"][0].pop("reason") and None, r'refusals\[0\] has no "reason"'),
        (
            lambda data: data["sites"][0].update(modules=["l.{0-9999}.{0-9999}"]),
            "more than 1000000 modules",
        ),
        (lambda data: data.update(versions=1, torch=2), '"torch" that is not a text'),
    ],
)
def test_a_broken_file_is_named_with_what_is_wrong(tmp_path, change, says):
    assert re.search(says, broken(tmp_path, change))


def test_what_is_no_file_is_named(tmp_path):
    with pytest.raises(fk.FusekitError, match=r"there is no file .*none.json: plan.save\("):
        fk.load_plan(tmp_path / "none.json")
    with pytest.raises(fk.FusekitError, match="cannot be read"):
        fk.load_plan(tmp_path)
    (tmp_path / "x.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(fk.FusekitError, match=r"x.json is not text"):
        fk.load_plan(tmp_path / "x.json")
    with pytest.raises(fk.FusekitError, match=r"takes the path of a file, not int"):
        fk.load_plan(3)
    with pytest.raises(fk.FusekitError, match=r"cannot be written to .*name a file in a folder"):
        fk.plan(nn.Sequential()).save(tmp_path / "no" / "plan.json")


def test_fields_of_a_later_version_are_let_pass(tmp_path):
    path = fk.plan(llama(1)).save(tmp_path / "plan.json")
    data = json.loads(path.read_text())
    data["more"] = data["sites"][0]["more"] = 1
    path.write_text(json.dumps(data))
    assert len(fk.load_plan(path).sites) == 5
