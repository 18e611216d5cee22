"""The verdict, the worst of each kind, and what was not run."""

from fusekit import display
from fusekit.display.verify import split, worst_first
from fusekit.model import LayerError, NotRun


def test_the_verdict_comes_first_and_in_words(report, check):
    good, bad = report([check()]), report([check(), check("gradients", "q.weight", ok=False)])
    assert display.text(good).splitlines()[0].endswith("within what float64 allows: ok")
    assert display.text(bad).splitlines()[0] == "Model: FAILED: 1 of 2 checks (gradients)"
    assert "FAILED" in display.html(bad) and "FAILED" not in display.html(good)


def test_failed_checks_come_first_then_the_worst(check):
    mild, worse, failed = check(fused=1e-6), check(fused=9e-6), check(ok=False, fused=0.0)
    assert worst_first([mild, worse, failed]) == [failed, worse, mild]


def test_many_checks_of_one_kind_show_the_worst_and_fold_the_rest(report, check, read):
    some = [check("site", f"layers.{i}", "qkv", fused=i * 1e-7) for i in range(40)]
    ((name, top, rest),) = split(some)
    assert (name, [one.name for one in top], len(rest)) == ("site qkv", ["layers.39"], 39)
    seen = read(display.html(report(some)))
    assert "site qkv: 39 more, none further from unfused, all ok" in seen.text and "layers.0" in seen.text
    assert "... and 39 more checks" in display.text(report(some))


def test_every_failed_check_is_shown(check):
    some = [check("site", f"layers.{i}", "qkv", ok=i % 2 == 0) for i in range(10)]
    ((_, top, rest),) = split(some)
    assert len(top) == 5 and not any(one.ok for one in top) and all(one.ok for one in rest)


def test_a_report_of_many_checks_is_small(report, check):
    some = [check("gradients", f"model.layers.{i}.attn.{p}.weight") for i in range(100) for p in "qkvo"]
    assert len(display.html(report([*some, *(check("site", f"l.{i}", "glu") for i in range(400))]))) < 150_000


def test_what_was_not_run_says_why_and_whether_that_was_meant(report, check):
    left = [NotRun("generation", "no tokenizer", False), NotRun("gradients", "grads=False", True)]
    text = display.text(report([check()], not_run=left))
    assert "NOT RUN: generation: no tokenizer" in text and "left out: gradients: grads=False" in text
    html = display.html(report([check()], not_run=left))
    assert "could not run" in html and "left out" in html


def test_passed_checks_with_some_that_could_not_run_decide_nothing(report, check):
    some = report([check()], not_run=[NotRun("generation", "no tokenizer", False)])
    assert "UNDECIDED" in display.text(some) and "(generation)" in display.text(some)
    assert "FAILED" not in display.html(some) and "allows: ok" not in display.html(some)


def test_what_is_missing_is_named_once(report, check):
    left = [NotRun("site", "a: not called", False), NotRun("site", "b: no tensor", False)]
    assert "could not be run (site)" in display.text(report([check()], not_run=left))


def test_an_error_that_is_no_number_is_shown(report, check, read):
    layers = [
        LayerError("layers.0", 1e-7, float("nan"), 0.0, float("inf")),
        LayerError("l.1", 1e-7, 1e-7, 0, 0),
    ]
    text = read(display.html(report([check(ok=False, fused=float("nan"))], layers))).text
    assert "could not be drawn" not in text and "nan" in text and "inf" in text


def test_nothing_checked_is_not_ok(report):
    assert "nothing was checked" in display.text(report([]))
    assert "fk-good" not in display.html(report([])).partition("</style>")[2]


def test_the_error_of_each_layer_is_a_number_and_a_bar(report, check, read):
    some = [LayerError("layers.0", 1e-7, 2e-7, 0.0, 1e-8), LayerError("layers.1", 4e-7, 4e-7, 0.0, 1e-8)]
    html = display.html(report([check()], some))
    assert "width:60px" in html and "width:120px" in html
    assert "Error down the depth, 2 layers" in read(html).text and "4e-07" in read(html).text
    assert "largest error after layers.1: fused 4e-07, unfused 4e-07" in display.text(report([check()], some))
