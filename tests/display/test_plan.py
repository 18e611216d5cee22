"""Plans, sites, refusals and what was applied."""

from fusekit import display
from fusekit.display.site import group_refusals, group_sites
from fusekit.forward import SourceDiff
from fusekit.fusions import Refusal
from fusekit.model import Fused


def layers(site, number, **fields):
    return tuple(site(f"model.layers.{i}.attn", **fields) for i in range(number))


def test_repeated_layers_are_one_row_with_their_number(site, plan):
    text = display.text(plan(layers(site, 30)))
    assert text.splitlines()[0] == "Model: 30 sites (30 qkv), 0 refusals, nothing applied"
    assert text.splitlines()[2].split() == [
        "model.layers.0-29.attn", "×", "30", "qkv", "q_proj,", "k_proj,", "v_proj", "Attention",
    ]  # fmt: skip


def test_an_outlier_is_a_row_of_its_own(site):
    some = [*layers(site, 3), site("model.layers.3.attn", "kv", ("k_proj", "v_proj"))]
    assert [(one.label, len(one.items)) for one in group_sites(some)] == [
        ("model.layers.0-2.attn", 3),
        ("model.layers.3.attn", 1),
    ]


def test_refusals_are_one_row_though_each_names_its_module():
    some = [
        Refusal(
            f"layers.{i}.attn", "qkv", "input-written", f"layers.{i}.attn: x is written", "/a/m.py", 7, ()
        )
        for i in range(4)
    ]
    other = Refusal("layers.4.attn", "qkv", "tied", "layers.4.attn: q_proj is shared", None, None, ())
    assert [(one.label, one.first.reason) for one in group_refusals([*some, other])] == [
        ("layers.0-3.attn", "input-written"),
        ("layers.4.attn", "tied"),
    ]
    assert display.text(some[0]) == "<Refusal layers.0.attn: qkv (input-written) at m.py:7: x is written>"


def test_a_plan_of_32_layers_is_small(site, plan):
    some = [
        site(f"model.layers.{i}.{name}", fusion)
        for i in range(32)
        for name, fusion in (("attn", "qkv"), ("mlp", "glu"), ("norm", "rms_norm"))
    ]
    assert len(display.html(plan(some))) < 60_000


def test_a_plan_of_32_layers_that_all_differ_stays_small_and_says_what_is_left_out(site, plan):
    some = [site(f"layers.{i}.{n}", type_name=f"Kind{i}") for i in range(32) for n in "abcd"]
    refusals = [
        Refusal(f"layers.{i}", "qkv", "tied", f"shared with {i * i}", "/a/b.py", i, ()) for i in range(300)
    ]
    html = display.html(plan(some, refusals))
    assert len(html) < 250_000
    assert "diffs left out" in html and "220 rows more" in html
    text = display.text(plan(some, refusals))
    assert len(text.splitlines()) <= 60 and "rows more; .to_frame() has all" in text


def test_one_diff_for_each_row(site, plan, read):
    seen = read(display.html(plan([*layers(site, 5), site("norm", "rms_norm", ())])))
    assert seen.text.count("before and after") == 2
    assert "before and after, model.layers.0.attn" in seen.text


def test_a_site_whose_diff_fails_does_not_hide_the_others(site, plan, read):
    class Broken:
        @property
        def before(self):
            raise RuntimeError("the file is gone")

    seen = read(display.html(plan([site("a", diff=Broken()), site("b")])))
    assert "no diff to show (RuntimeError: the file is gone)" in seen.text
    assert "before and after" in seen.text


def test_a_plan_that_finds_nothing_says_what_stood_in_the_way(plan):
    refusals = [Refusal(f"l.{i}", "qkv", "tied" if i else "hooked", "m", None, None, ()) for i in range(3)]
    text, html = display.text(plan((), refusals)), display.html(plan((), refusals))
    assert "nothing to fuse in Model: 3 places look fusable and were refused, for" in text
    assert "Nothing to fuse in Model: 3 places look fusable and were refused, for:" in html
    assert "nothing looks like one of these" in display.text(plan())


def test_a_plan_whose_sites_are_all_applied_says_that(site, plan):
    done = plan((), (), layers(site, 2, applied=True))
    assert "Nothing more to fuse" in display.html(done) and "2 applied" in display.text(done)
    assert "model.layers.0-1.attn" in display.html(done)


def test_a_part_of_a_model_is_named(site, plan):
    assert "Model, the part under layers.0: 1 site" in display.text(
        plan([site("layers.0.attn")], scope="layers.0")
    )


def test_assumptions_come_from_the_sites_where_the_plan_has_none(site, plan):
    assert "assumptions" in display.text(plan([site("a")], assumptions=None))


def test_a_list_of_sites_or_refusals_prints_one_line_each(site, samples):
    assert display.text(site("")) == "<Site (the model itself): qkv of q_proj, k_proj, v_proj (Attention)>"
    assert display.text(samples["refusal"]).count("\n") == 0
    assert "conftest.py:" in display.text(samples["refusal"])


def test_a_site_shows_its_diff(site, read):
    some = SourceDiff("a = 1\n", "a = 2\n", "/a/b.py", 1, "t")
    seen = read(display.html(site("x.y", diff=some, applied=True)))
    assert "x.y" in seen.text and "applied" in seen.text and "a = 2" in seen.text


def test_what_was_applied_says_how_to_revert(stand_in, site, plan):
    some = layers(site, 4)
    fused = stand_in(Fused, plan=plan(some), sites=some, reverted=False)
    assert "Model: 4 sites (4 qkv) applied" in display.text(fused)
    assert ".revert() gives back exactly what was there" in display.text(fused)
    assert "fused.revert()" in display.html(fused)
    undone = stand_in(Fused, plan=plan(some), sites=some, reverted=True)
    assert "reverted" in display.text(undone) and "fused.revert()" not in display.html(undone)


def test_a_model_where_nothing_was_applied_says_why(stand_in, plan, read):
    refusals = [Refusal("a", "qkv", "tied", "a: is shared", None, None, ())]
    fused = stand_in(Fused, plan=plan((), refusals), sites=(), reverted=False)
    for shown in (display.text(fused), read(display.html(fused)).text):
        assert "Model: 0 sites applied" in shown and "othing to fuse in Model: 1 place looks fusable" in shown
        assert "is shared" in shown and "revert" not in shown


def test_the_plan_of_a_llama_of_32_layers_is_five_rows_and_small(read):
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from fusekit.model import plan as plan_of

    with torch.device("meta"):
        llama = LlamaForCausalLM(
            LlamaConfig(hidden_size=64, num_hidden_layers=32, num_attention_heads=4, vocab_size=9)
        )
    real = plan_of(llama, only=["qkv", "glu", "rms_norm"])
    lines = display.text(real).splitlines()
    assert "model.layers.0-31.self_attn" in lines[2] and "× 32" in lines[2]
    assert len(group_sites(real.sites)) == 5
    html = display.html(real)
    assert len(html) < 250_000 and read(html).text.count("before and after") == 5
