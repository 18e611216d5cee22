"""What became of a plan: what is a change, what is not, and what it is called."""

from dataclasses import replace

import pytest
import torch.nn as nn

import fusekit as fk
from fusekit.model.changes import compare
from fusekit.model.saved import SavedPlan, SavedRefusal, SavedSite


def site(name="l.0", fusion="qkv", parts=("q", "k", "v"), line=3, **fields):
    return SavedSite(name, "Attention", fusion, parts, "m.py", line, **fields)


def refusal(name="l.0", fusion="qkv", parts=("q", "k", "v"), reason="tied", message="is shared", line=3):
    said = f"{name}: cannot fuse {fusion}: {message}"
    return SavedRefusal(name, "Attention", fusion, parts, reason, said, "m.py", line)


def plan(*items):
    """A saved plan of sites and refusals."""
    sites = tuple(one for one in items if isinstance(one, SavedSite) and not one.applied)
    applied = tuple(one for one in items if isinstance(one, SavedSite) and one.applied)
    return SavedPlan("M", sites, tuple(one for one in items if isinstance(one, SavedRefusal)), applied)


def told(changes):
    return [(one.kind, one.name, one.fusion, one.message) for one in changes.all]


def test_equal_plans_have_no_change():
    both = plan(site(), refusal("l.1"))
    changes = compare(both, both)
    assert not changes and changes.ok and told(changes) == []


@pytest.mark.parametrize(
    "before, after",
    [
        ([site()], [site(line=99)]),
        ([site()], [site(applied=True)]),
        ([refusal()], [refusal(line=9, message="is shared with another")]),
        ([site("l.1"), site("l.0")], [site("l.0"), site("l.1")]),
    ],
)
def test_lines_words_order_and_being_applied_are_no_change(before, after):
    assert not compare(plan(*before), plan(*after))


def test_a_site_that_turned_into_a_refusal_says_its_reason():
    changes = compare(plan(site()), plan(refusal(reason="called-twice", message="q is called twice")))
    assert told(changes) == [("disappeared", "l.0", "qkv", "now refused [called-twice]: q is called twice")]
    assert not changes.ok and changes
    assert changes.disappeared[0].after.reason == "called-twice"


def test_a_site_that_is_gone_without_a_refusal_says_so():
    changes = compare(plan(site()), plan(refusal("l.1")))
    assert told(changes)[0] == ("disappeared", "l.0", "qkv", "no site and no refusal is there any more")
    assert [one.name for one in changes.new_refusals] == ["l.1"]


def test_one_refusal_may_stand_for_two_sites():
    glu = site(fusion="glu", parts=("gate", "up"))
    stop = refusal(fusion="columns", parts=(), reason="trace-stopped", message="the trace stops")
    changes = compare(plan(site(), glu), plan(stop))
    said = "now columns refused [trace-stopped]: the trace stops"
    assert [one.message for one in changes.disappeared] == [said, said]
    assert changes.new_refusals == ()


def test_a_refusal_that_was_there_before_still_explains():
    stop = refusal(fusion="columns", parts=(), reason="trace-stopped", message="it stops")
    assert "trace-stopped" in compare(plan(site(), stop), plan(stop)).disappeared[0].message


def test_a_refusal_of_other_parts_explains_nothing():
    other = refusal(fusion="glu", parts=("gate", "up"))
    assert compare(plan(site()), plan(other)).disappeared[0].after is None


def test_a_norm_that_is_refused_is_known_by_its_fusion():
    norm = site("norm", "rms_norm", ())
    changes = compare(plan(norm), plan(refusal("norm", "rms_norm", (), "hooked", "has hooks")))
    assert told(changes) == [("disappeared", "norm", "rms_norm", "now refused [hooked]: has hooks")]


def test_what_appears_says_what_it_was():
    changes = compare(plan(refusal()), plan(site(), site("l.1")))
    assert told(changes) == [
        ("appeared", "l.0", "qkv", "was refused [tied]"),
        ("appeared", "l.1", "qkv", "new"),
    ]
    assert changes.ok and changes and changes.gone_refusals == ()


@pytest.mark.parametrize(
    "before, after, says",
    [
        (site(fusion="columns"), site(), "columns → qkv"),
        (site(fusion="columns", parts=("k", "q", "v")), site(), "columns of k, q, v → qkv of q, k, v"),
        (site(fusion="kv", parts=("k", "v")), site(), "kv of k, v → qkv of q, k, v"),
        (site(fusion="columns", parts=("a", "b")), site(fusion="glu", parts=("a", "b")), "columns → glu"),
    ],
)
def test_linears_that_are_still_merged_are_a_change_and_no_loss(before, after, says):
    changes = compare(plan(before), plan(after))
    assert [one.message for one in changes.changed] == [says]
    assert changes.ok and changes.appeared == changes.disappeared == ()


@pytest.mark.parametrize(
    "before, after, says",
    [
        (site(), site(fusion="kv", parts=("k", "v")), "now kv of k, v"),
        (site(fusion="glu", parts=("a", "b")), site(fusion="columns", parts=("a", "b")), "now columns"),
    ],
)
def test_linears_of_which_less_is_fused_are_a_loss(before, after, says):
    changes = compare(plan(before), plan(after))
    assert [one.message for one in changes.disappeared] == [says]
    assert [one.fusion for one in changes.appeared] == [after.fusion]


def test_refusals_change_their_reason_or_role_come_and_go():
    before = plan(refusal(), refusal("l.1", "columns"), refusal("l.2"))
    after = plan(refusal(reason="hooked", message="has hooks"), refusal("l.1"), refusal("l.3"))
    changes = compare(before, after)
    assert told(changes) == [
        ("changed", "l.0", "qkv", "refused [tied] → refused [hooked]: has hooks"),
        ("changed", "l.1", "columns", "columns refused [tied] → qkv refused [tied]: is shared"),
        ("new refusal", "l.3", "qkv", "refused [tied]: is shared"),
        ("gone refusal", "l.2", "qkv", "was refused [tied]"),
    ]
    assert changes.ok


def test_two_refusals_at_one_place_are_counted_one_by_one():
    twice = plan(refusal("n", "rms_norm", ()), refusal("n", "rms_norm", ()))
    assert len(compare(twice, plan(refusal("n", "rms_norm", ()))).gone_refusals) == 1
    assert not compare(twice, twice)


def test_the_frame_has_a_row_for_each_change():
    frame = compare(plan(site(), refusal("l.1")), plan(refusal(line=8), site("l.1"))).to_frame()
    assert frame.columns.tolist() == "kind name type fusion parts before after message path line".split()
    assert frame.kind.tolist() == ["disappeared", "appeared"]
    assert frame.before.tolist() == ["site", "tied"] and frame.after.tolist() == ["tied", "site"]
    assert frame.line.tolist() == [8, 3] and frame.parts.tolist() == ["q, k, v"] * 2
    assert compare(plan(), plan()).to_frame().empty


class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        return self.q(x), self.k(x)


def test_plans_saved_plans_and_paths_are_compared(tmp_path):
    model = nn.Sequential(Pair(), Pair())
    before = fk.plan(model)
    path = before.save(tmp_path / "a.json")
    assert not fk.compare(before, path) and not fk.compare(str(path), fk.load_plan(path))
    model[1].k.register_forward_hook(lambda *_: None)
    changes = fk.compare(path, fk.plan(model))
    (lost,) = changes.disappeared
    assert (lost.name, lost.fusion, lost.parts) == ("1", "columns", ("q", "k"))
    assert lost.message.startswith("now refused [hooked]: k carries hooks")
    assert fk.compare(fk.plan(model), path).appeared[0].message == "was refused [hooked]"
    with before["0"].apply():
        assert not fk.compare(before["0"], fk.plan(model)["0"])


def test_what_is_no_plan_is_named(tmp_path):
    with pytest.raises(fk.FusekitError, match=r"takes plans, saved plans or paths .*, not Sequential"):
        fk.compare(nn.Sequential(), plan())
    with pytest.raises(fk.FusekitError, match="there is no file"):
        fk.compare(tmp_path / "none.json", plan())


def test_plans_of_two_models_name_both():
    from fusekit import display

    other = replace(plan(site()), model_name="N")
    assert "M → N" in display.text(compare(plan(site()), other))
