"""Saved plans: as plans, without diffs."""

from dataclasses import replace

from fusekit import display
from fusekit.model.saved import SavedPlan, SavedRefusal, SavedSite


def kept(number, applied=False):
    names = [f"layers.{i}.mlp" for i in range(number)]
    return tuple(SavedSite(name, "MLP", "glu", ("gate", "up"), "p/m.py", 3, applied) for name in names)


def test_equal_layers_are_one_row_and_the_versions_are_named(read):
    plan = SavedPlan("Model", kept(30), (), (), "", ("glu",), (("fusekit", "0.1"), ("torch", "2.13")))
    lines = display.text(plan).splitlines()
    assert lines[0] == "Model: 30 sites (30 glu), 0 refusals, nothing applied"
    assert lines[1] == "  saved with fusekit 0.1, torch 2.13"
    assert "layers.0-29.mlp" in lines[3] and "× 30" in lines[3] and len(lines) == 4
    shown = read(display.html(plan)).text
    assert "layers.0-29.mlp" in shown and "before and after" not in shown and "torch 2.13" in shown


def test_a_saved_plan_of_nothing_says_what_was_looked_for():
    plan = SavedPlan("Model", (), (), (), "", ("rms_norm",))
    for shown in (display.text(plan), display.html(plan)):
        assert "othing to fuse in Model" in shown and "RMSNorm" in shown and "glu" not in shown


def test_a_reason_that_this_version_does_not_know_is_shown():
    odd = SavedRefusal("a", "T", "glu", (), "of-tomorrow", "a: cannot fuse glu: so", "p/m.py", 3)
    plan = SavedPlan("Model", (), (odd,), ())
    assert "1 × [of-tomorrow]\n" in display.text(plan) and "of-tomorrow" in display.html(plan)
    assert display.text(odd) == "<SavedRefusal a: glu (of-tomorrow) at m.py:3: so>"


def test_what_was_applied_is_listed():
    plan = SavedPlan("Model", (), (), kept(2, True), "layers")
    assert display.text(plan).startswith("Model, the part under layers: 0 sites, 0 refusals, 2 applied")
    assert "othing to fuse" not in display.text(plan) + display.html(plan)
    assert "Was applied" in display.html(plan) and "layers.0-1.mlp" in display.html(plan)


def test_a_saved_site_is_one_line():
    (site,) = kept(1)
    assert display.text(site) == "<SavedSite layers.0.mlp: glu of gate, up (MLP)>"
    assert display.text(replace(site, name="", applied=True)).startswith("<SavedSite (the model itself): glu")
    assert "p/m.py:3" in display.html(site)
