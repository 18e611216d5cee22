"""Changes between plans: what is lost first, equal layers as one row."""

from dataclasses import replace

from fusekit import display
from fusekit.model.changes import compare
from fusekit.model.saved import SavedPlan, SavedRefusal, SavedSite

SITES = tuple(SavedSite(f"layers.{i}.mlp", "MLP", "glu", ("gate", "up"), "p/m.py", 3) for i in range(4))
BEFORE = SavedPlan("Model", SITES, (), (), "", ("glu",), (("torch", "2.12"), ("transformers", "5.23")))


def refused(name, reason="tied"):
    said = f"{name}: cannot fuse glu: {name}.gate is shared"
    return SavedRefusal(name, "MLP", "glu", ("gate", "up"), reason, said, "p/m.py", 7)


def after(**fields):
    return replace(BEFORE, versions=(("torch", "2.13"), ("transformers", "5.23")), **fields)


def test_equal_changes_are_one_row_with_the_reason_and_its_line(read):
    changes = compare(BEFORE, after(sites=SITES[:1], refusals=tuple(refused(s.name) for s in SITES[1:])))
    lines = display.text(changes).splitlines()
    assert lines[0] == "Model: 3 sites disappeared"
    assert lines[1] == "  torch 2.12 → 2.13, transformers 5.23"
    assert lines[2] == "  sites that disappeared" and len(lines) == 4
    assert lines[3].split()[:4] == ["layers.1-3.mlp", "×", "3", "glu"]
    assert "now refused [tied]" in lines[3] and lines[3].endswith("m.py:7")
    shown = read(display.html(changes)).text
    assert "layers.1-3.mlp" in shown and "now refused [tied]" in shown and "3 sites disappeared" in shown


def test_no_change_says_how_many_are_as_before(read):
    for shown in (display.text(compare(BEFORE, BEFORE)), read(display.html(compare(BEFORE, BEFORE))).text):
        assert "no change: 4 sites and 0 refusals as before" in shown


def test_what_is_lost_comes_first_and_each_kind_has_its_heading():
    before = replace(BEFORE, refusals=(refused("a"), refused("b"), refused("c", "tied")))
    sites = (*SITES[:3], replace(SITES[0], name="a"))
    now = after(sites=sites, refusals=(refused("c", "hooked"), refused("d")))
    text = display.text(compare(before, now))
    assert text.splitlines()[0] == (
        "Model: 1 site disappeared, 1 appeared, 1 changed, 1 new refusal, 1 refusal gone"
    )
    headings = [line.strip() for line in text.splitlines() if line.startswith("  ") and line[2] != " "][1:]
    assert headings == [
        "sites that disappeared",
        "changed",
        "sites that appeared",
        "new refusals",
        "refusals that are gone",
    ]


def test_many_changes_that_all_differ_stay_small():
    sites = tuple(replace(SITES[0], name=f"x.{i}", type_name=f"K{i}") for i in range(300))
    changes = compare(replace(BEFORE, sites=sites), after(sites=()))
    assert len(display.text(changes).splitlines()) < 30 and "280 rows more" in display.text(changes)
    assert len(display.html(changes)) < 100_000 and "220 rows more" in display.html(changes)


def test_a_change_is_one_line():
    (change,) = compare(BEFORE, after(sites=SITES[1:])).all
    assert display.text(change) == (
        "<Change layers.0.mlp: disappeared: glu of gate, up: no site and no refusal is there any more>"
    )
