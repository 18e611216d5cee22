"""Alias sets, writes and their evidence."""

from fusekit import display
from fusekit.tracing import AliasReport, AliasSet, Evidence, Write


def report(sets=(), writes=(), **fields):
    given = dict(source=None, stopped=None, assumptions=()) | fields
    return AliasReport("Mlp", sets=tuple(sets), writes=tuple(writes), **given)


def test_a_set_stands_with_its_evidence_and_what_the_run_saw(read):
    steps = (Evidence(7, "x.view(-1)", "view", True), Evidence(9, "y.reshape(4)", "may be a view", None))
    some = report([AliasSet(("x", "y", "z"), steps), AliasSet(("w",), ())])
    text = display.text(some)
    assert "x, y, z            line 7: view: x.view(-1)" in text and "not run" in text
    assert "1 alias set" in text and "share with no other name: w" in text
    seen = read(display.html(some)).text
    assert "x.view(-1)" in seen and "may be a view" in seen and "yes" in seen


def test_a_name_that_shares_somewhere_is_not_called_alone():
    some = report(
        [
            AliasSet(("x",), ()),
            AliasSet(("x", "y"), (Evidence(0, "getitem", "view", True),)),
            AliasSet(("z",), ()),
        ]
    )
    assert "share with no other name: z" in display.text(some)
    assert "view: getitem" in display.text(some)  # made by no line of the source


def test_no_write_is_said_out_loud(read):
    assert "writes nothing" in display.text(report())
    assert "Writes nothing." in read(display.html(report())).text


def test_a_write_names_what_it_may_write(read):
    some = report(writes=[Write(3, "x.mul_(2)", ("x", "y"), False)])
    assert "1 write" in display.text(some)
    row = next(line for line in display.text(some).splitlines() if "x.mul_(2)" in line)
    assert row.split() == ["3", "x.mul_(2)", "x,", "y", "no"]


def test_a_stop_limits_what_is_claimed(samples):
    text = display.text(samples["empty aliasing"])
    assert "stopped at b.py:3: a branch on data" in text and "writes nothing up to there" in text


def test_the_source_marks_its_writes_and_steps(samples, read):
    html = display.html(samples["aliasing"])
    source = samples["aliasing"].source
    assert f"w {source.line + 3}" in html and f"= {source.line + 2}" in html


def test_an_arm_that_did_not_run_says_why(read):
    step = Evidence(
        7, "x.view(-1)", "view", None, "aten::view returns a view of its input", "`flag` was false"
    )
    some = report(
        [AliasSet(("x", "y"), (step,))], [Write(8, "y.mul_(2)", ("x", "y"), None, "writes in place")]
    )
    text = display.text(some)
    assert "line 7: x.view(-1): aten::view returns a view of its input  not run: `flag` was false" in text
    assert "not run: `flag` was false" in read(display.html(some)).text
    assert "writes in place" in read(display.html(some)).text


def test_what_may_be_written_stands_apart_from_what_is(read):
    sure = Write(3, "x.mul_(2)", ("x",), True)
    unsure = Write(4, "helper(y)", ("y",), None, "calls what cannot be read", False, ("outside",))
    text = display.text(report(writes=[sure, unsure]))
    assert "1 write, 1 more place may" in text and "y, (outside)" in text
    text = display.text(report(writes=[unsure]))
    assert "writes nothing for certain, 1 more place may" in text
    assert "Writes nothing for certain." in read(display.html(report(writes=[unsure]))).text


def test_a_forward_that_was_not_followed_says_that_there_may_be_more(read):
    some = report(failed="it uses eval()", notes=("A note.",))
    for text in (display.text(some), read(display.html(some)).text):
        assert "could not be followed to its end: it uses eval()" in text and "A note." in text
