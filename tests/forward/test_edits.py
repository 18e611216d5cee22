"""Edits of the text: (span, new text) over the original file."""

import ast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fusekit.errors import FusekitError
from fusekit.forward import Edit, SourceDiff, Span, apply_edits, text_at


def span_of(text: str, part: str) -> Span:
    """The span of the expression `part` in the Python text `text`."""
    return next(
        Span.of(node)
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.expr) and ast.get_source_segment(text, node) == part
    )


def test_no_edits_give_the_same_text():
    assert apply_edits("a\nb", []) == "a\nb" and apply_edits("", []) == ""


def test_edit_after_characters_of_many_bytes_lands_on_its_expression():
    text = "x = 'é€😀' + y  # ü\nz = x\n"
    assert apply_edits(text, [Edit(span_of(text, "y"), "long")]) == "x = 'é€😀' + long  # ü\nz = x\n"


def test_edits_come_in_any_order():
    text = "f(a, b, c)\n"
    edits = [Edit(span_of(text, name), name * 2) for name in "cab"]
    assert apply_edits(text, edits) == apply_edits(text, edits[::-1]) == "f(aa, bb, cc)\n"


def test_insertion_goes_before_what_is_replaced_at_its_place():
    text = "    y = x\n"
    edits = [Edit(Span(1, 4, 1, 5), "z"), Edit(Span(1, 4, 1, 4), "w = 1\n    ")]
    assert apply_edits(text, edits) == "    w = 1\n    z = x\n"


def test_edit_over_several_lines():
    text = "y = f(\n    a,\n    b,\n)\n"
    assert apply_edits(text, [Edit(span_of(text, text[4:].strip()), "g")]) == "y = g\n"


def test_last_line_can_be_taken_away():
    assert apply_edits("a\nb\n", [Edit(Span(2, 0, 3, 0), "")]) == "a\n"


def test_form_feed_is_no_line_end():
    text = "a\n\fb\nc\n"
    assert apply_edits(text, [Edit(Span(3, 0, 3, 1), "d")]) == "a\n\fb\nd\n"


@pytest.mark.parametrize("second", [Span(1, 0, 1, 3), Span(1, 1, 1, 2), Span(1, 2, 1, 5), Span(1, 1, 1, 1)])
def test_overlapping_edits_raise(second):
    with pytest.raises(FusekitError, match="overlap"):
        apply_edits("abcdef\n", [Edit(Span(1, 0, 1, 3), "x"), Edit(second, "y")])


def test_edits_that_touch_do_not_overlap():
    edits = [Edit(Span(1, 0, 1, 2), "x"), Edit(Span(1, 2, 1, 3), "y")]
    assert apply_edits("abcdef\n", edits) == "xydef\n"


@pytest.mark.parametrize(
    "span",
    [
        Span(3, 0, 3, 0),
        Span(0, 0, 1, 0),
        Span(1, 9, 1, 9),
        Span(1, -1, 1, 0),
        Span(1, 2, 1, 1),
        Span(1, 0, 9, 0),
    ],
)
def test_place_that_is_not_in_the_text_raises(span):
    with pytest.raises(FusekitError):
        apply_edits("abc\n", [Edit(span, "x")])


def test_place_inside_a_character_raises():
    with pytest.raises(FusekitError, match="inside a character"):
        apply_edits("é = 1\n", [Edit(Span(1, 1, 1, 2), "x")])


@given(st.text(alphabet="aé€😀\n\f x", max_size=40), st.data())
def test_an_edit_changes_its_span_and_nothing_else(text, data):
    start = data.draw(st.integers(0, len(text)))
    end = data.draw(st.integers(start, len(text)))

    def place(index):
        before = text[:index].split("\n")
        return len(before), len(before[-1].encode())

    if end == len(text) and text.endswith("\n") and start == end:
        return
    span = Span(*place(start), *place(end))
    assert apply_edits(text, [Edit(span, "<new>")]) == text[:start] + "<new>" + text[end:]


def test_text_at_counts_bytes():
    text = "é = (1 +\n  ü)\n"
    assert text_at(text, span_of(text, "ü")) == "ü"
    assert text_at(text, Span(1, 5, 2, 5)) == "(1 +\n  ü)"


def test_diff_prints_as_a_unified_diff():
    shown = str(SourceDiff("a\nb\n", "a\nc\n", "/p.py", 3, "M.forward"))
    assert shown.splitlines() == [
        "--- M.forward",
        "+++ M.forward (fused)",
        "@@ -1,2 +1,2 @@",
        " a",
        "-b",
        "+c",
    ]
