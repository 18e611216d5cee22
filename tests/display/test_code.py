"""The highlighter and numbered lines."""

from hypothesis import given
from hypothesis import strategies as st

from fusekit.display.code import highlight, indent_of, line_html, numbered, outdent
from fusekit.display.markup import Html, lines_of


@given(st.text(alphabet="abc def#'\"\\\n\t ()[]{}:@01.é\x0c", max_size=120))
def test_any_text_comes_back_whole(text):
    assert ["".join(piece for _, piece in line) for line in highlight(text)] == lines_of(text)


def test_words_of_the_language_have_their_colours():
    (line,) = highlight("def f(x=1): return 'a'  # why")
    assert [(colour, text) for colour, text in line if colour] == [
        ("keyword", "def"),
        ("name", "f"),
        ("number", "1"),
        ("keyword", "return"),
        ("string", "'a'"),
        ("comment", "# why"),
    ]


def test_a_string_over_three_lines_is_coloured_on_each():
    assert [line[-1][0] for line in highlight('    """a\n    b\n    c"""')] == ["string"] * 3


def test_what_follows_an_error_is_plain_and_what_precedes_it_is_not():
    lines = highlight("if x:\n  return (\n")
    assert lines[0][0] == ("keyword", "if") and lines[1][1] == ("keyword", "return")


def test_marks_cut_through_colours():
    html = line_html([("", "ab"), ("number", "12")], [(1, 3)], Html("<ins>"))
    assert html.startswith("a<ins>b</ins><ins><span") and html.count("<ins>") == 2


def test_numbers_stand_beside_the_code_and_not_in_it(read):
    html = numbered("    def f():\n        pass\n", 99)
    seen = read(html)
    assert " 99\n100\n" in html and seen.seen.count("pre") == 2
    assert "def f():\n    pass\n" in seen.text


def test_a_blank_line_does_not_count_for_the_indent():
    assert indent_of("    a\n\n      b") == 4
    assert outdent("    a\n\n      b", 4) == "a\n\n  b"
