"""What a user gets wrong: a sentence that names it and says what to do."""

import types

import pytest
import torch
import torch.nn as nn

import fusekit as fk
from fusekit.model.plan import Site


class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.q = nn.Linear(8, 8)
        self.k = nn.Linear(8, 8)

    def forward(self, x):
        return self.q(x), self.k(x)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Pair() for _ in range(3))

    def forward(self, x):
        return [layer(x) for layer in self.layers]


def only_refusal(model):
    plan = fk.plan(model)
    assert plan.sites == ()
    (refusal,) = plan.refusals
    return refusal


def test_class_without_source_names_the_class_and_the_way_out():
    namespace = {"nn": nn}
    exec(
        "class Hidden(nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.q = nn.Linear(4, 4)\n"
        "        self.k = nn.Linear(4, 4)\n"
        "    def forward(self, x):\n"
        "        return self.q(x), self.k(x)\n",
        namespace,
    )
    refusal = only_refusal(namespace["Hidden"]())
    assert refusal.reason == "no-source"
    assert "Hidden.forward has no source text" in refusal.message
    assert "define the class in a file or in a notebook cell" in refusal.message


def test_parts_on_several_devices_are_named_with_their_devices():
    model = nn.Sequential(Pair())
    model[0].k.to("meta")
    refusal = only_refusal(model)
    assert refusal.reason == "device-mismatch"
    assert refusal.message.startswith("0: cannot fuse columns: ")
    assert "q on cpu" in refusal.message and "k on meta" in refusal.message
    assert "move them to one" in refusal.message


def test_a_model_on_several_devices_is_fused_where_each_module_is_on_one():
    model = Model()
    model.layers[1].to("meta")
    with fk.fuse(model) as fused:
        assert len(fused.sites) == 3
        x = torch.randn(2, 8)
        torch.testing.assert_close(model.layers[0](x)[1], model.layers[0].k(x))
        assert model.layers[1](x.to("meta"))[0].is_meta


@pytest.mark.parametrize(
    "make, words",
    [
        (
            lambda: nn.Parameter(torch.ones(8, 8, dtype=torch.int8), requires_grad=False),
            "q.weight is a Parameter of torch.int8",
        ),
        (
            lambda: nn.Parameter(torch.ones(8, 8).to(torch.float8_e4m3fn), requires_grad=False),
            "q",
        ),
    ],
)
def test_quantised_part_is_named(make, words):
    module = Pair()
    module.q.weight = make()
    refusal = only_refusal(module)
    assert refusal.reason in ("quantized", "dtype-mismatch")
    assert words in refusal.message


def test_dtypes_of_the_parts_are_named():
    module = Pair()
    module.k.half()
    refusal = only_refusal(module)
    assert "q float32" in refusal.message and "k float16" in refusal.message


def test_bias_of_another_dtype_is_named():
    module = Pair()
    module.k.bias.data = module.k.bias.data.double()
    refusal = only_refusal(module)
    assert refusal.reason == "dtype-mismatch"
    assert "k.bias float64" in refusal.message


def test_weights_made_in_inference_mode_are_refused_and_work_as_before():
    with torch.inference_mode():
        module, x = Pair(), torch.randn(2, 8)
        refusal = only_refusal(module)
        assert refusal.reason == "inference-tensor" and "outside of it" in refusal.message
        module(x)
    fused_module = Pair()
    fused = fk.fuse(fused_module)
    with torch.inference_mode():
        state = {name: value.clone() for name, value in fused_module.state_dict().items()}
        fused_module.load_state_dict(state, assign=True)
        want = fused_module.q(x)
        torch.testing.assert_close(fused_module(x)[0], want)
        fused.revert()
        torch.testing.assert_close(fused_module(x)[0], want)
        assert not fk.plan(fused_module).sites


@pytest.mark.parametrize("options", [{"only": "qvk"}, {"only": ["qvk"]}, {"exclude": "qvk"}])
def test_unknown_fusion_is_named_with_the_nearest(options):
    with pytest.raises(fk.FusekitError, match=r"no fusion 'qvk'.*did you mean 'qkv'"):
        fk.plan(Model(), **options)


def test_unknown_path_is_named_with_the_nearest():
    plan = fk.plan(Model())
    with pytest.raises(fk.FusekitError, match=r"no module 'layer\.1' in Model.*did you mean 'layers\.1'"):
        plan["layer.1"]
    with pytest.raises(fk.FusekitError, match=r"plan\.sites\[0\]"):
        plan[0]


def test_pattern_that_matches_nothing_is_named():
    with pytest.raises(fk.FusekitError, match=r"layers='model\.layers\.\*' matches no module"):
        fk.plan(Model(), layers="model.layers.*")


def test_patterns_that_match_choose():
    model = Model()
    assert [site.name for site in fk.plan(model, layers="layers.[02]").sites] == ["layers.0", "layers.2"]
    assert [site.name for site in fk.plan(model, layers=["layers.1"]).sites] == ["layers.1"]
    assert [site.name for site in fk.plan(model)["layers.1"].sites] == ["layers.1"]
    assert fk.plan(model, exclude="columns").sites == ()
    assert len(fk.plan(model)[""].sites) == 3


def test_plan_of_another_model():
    one, other = Model(), Model()
    plan = fk.plan(one)
    with pytest.raises(fk.FusekitError, match=r"belongs to another Model.*fk\.plan"):
        plan.apply(other)
    assert not fk.plan(other).applied and not fk.plan(one).applied
    with plan.apply(one):
        pass


@pytest.mark.parametrize("thing", ["gpt2", None, nn.Linear, torch.ones(2), types.SimpleNamespace()])
def test_what_is_no_module_is_named_by_its_type(thing):
    for function in (fk.plan, fk.fuse, fk.revert):
        with pytest.raises(fk.FusekitError, match=f"takes a module, not {type(thing).__name__}"):
            function(thing)


def test_every_refusal_has_a_documented_reason():
    with pytest.raises(ValueError, match="no reason of a refusal"):
        fk.plan(Model()) and __import__("fusekit").fusions.Refusal("", "qkv", "because", "")


def test_site_that_is_no_longer_in_the_model():
    model = Model()
    plan = fk.plan(model)
    model.layers[1].q = nn.Linear(8, 3)
    before = model.layers[0].q.weight.data_ptr()
    try:
        plan.apply()
    except fk.FusekitError as error:
        assert "layers.1" in str(error) and "plan again" in str(error)
        assert model.layers[0].q.weight.data_ptr() == before
    else:
        x = torch.randn(2, 8)
        torch.testing.assert_close(model.layers[1](x)[0], model.layers[1].q(x))


def test_sites_are_data():
    (site, *_) = fk.plan(Model()).sites
    assert isinstance(site, Site) and site.title == "layers.0: columns" and site.type_name == "Pair"
    assert "self.merged_q_k(x)" in str(site.diff)
    assert site.trace.complete and site.aliasing.writes == ()
