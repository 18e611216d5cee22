"""Before and after, side by side."""

from hypothesis import given
from hypothesis import strategies as st

from fusekit import display
from fusekit.display.diff import CONTEXT, changes, chunks, pairs, word_marks
from fusekit.forward import SourceDiff

LINES = st.lists(
    st.sampled_from(["q = self.q(x)", "k = self.k(x)", "q = m[:4]", "", "return q", "x"]), max_size=12
)


def diff(before, after):
    return SourceDiff(before, after, "/a/b.py", 10, "attn: qkv")


@given(LINES, LINES)
def test_every_line_of_both_stands_once_and_in_order(before, after):
    rows = pairs(before, after)
    assert [row.before for row in rows if row.before is not None] == list(range(len(before)))
    assert [row.after for row in rows if row.after is not None] == list(range(len(after)))
    assert all(before[row.before] == after[row.after] for row in rows if row.equal)


@given(LINES, LINES)
def test_folding_drops_no_row_and_hides_no_change(before, after):
    rows = pairs(before, after)
    runs = list(chunks(rows))
    assert [row for _, run in runs for row in run] == rows
    assert all(row.equal for hidden, run in runs if hidden for row in run)


@given(st.text(max_size=30), st.text(max_size=30))
def test_what_is_not_marked_is_nearly_in_both_lines(old, new):
    for text, marks in zip((old, new), word_marks(old, new), strict=True):
        assert list(marks) == sorted(marks)
        assert all(0 <= start < end <= len(text) for start, end in marks)


def test_lines_that_answer_each_other_are_paired():
    rows = pairs(
        ["q = self.q(x).view(s)", "k = self.k(x).view(s)"],
        ["m = merged(x)", "q = m[0].view(s)", "k = m[1].view(s)"],
    )
    assert [(row.before, row.after) for row in rows] == [(None, 0), (0, 1), (1, 2)]


def test_changed_words_are_marked_and_a_dot_between_them_is_no_island():
    old, new = word_marks("q = self.q_proj(x).view(s)", "q = merged[0].view(s)")
    assert ["q = self.q_proj(x).view(s)"[a:b] for a, b in old] == ["self.q_proj(x)"]
    assert ["q = merged[0].view(s)"[a:b] for a, b in new] == ["merged[0]"]


def test_marks_are_signs_besides_colours(read):
    seen = read(display.html(diff("a = 1\n", "a = 2\n")))
    assert "- 10\n" in seen.text and "+ 10\n" in seen.text
    assert {"del", "ins"} <= set(seen.seen)
    assert "1 line gone (-), 1 line new (+)" in seen.text


def test_unchanged_lines_are_folded_away_from_the_change(read):
    lines = [f"line{i}" for i in range(40)]
    seen = read(display.html(diff("\n".join(lines), "\n".join([*lines[:20], "new", *lines[20:]]))))
    assert f"{20 - CONTEXT} unchanged lines, 10 to {10 + 19 - CONTEXT}" in seen.text
    assert seen.seen.count("details") == 2
    assert "line39" in seen.text  # folded, not gone: find-in-page finds it


def test_a_diff_without_a_change_says_so():
    same = diff("a\n", "a\n")
    assert changes(same) == (0, 0)
    assert display.text(same) == "attn: qkv: nothing changes"
    assert "nothing changes" in display.html(same)


def test_the_text_is_the_unified_diff():
    some = diff("a = 1\n", "a = 2\n")
    assert display.text(some) == str(some) and "\n-a = 1\n+a = 2" in str(some)
