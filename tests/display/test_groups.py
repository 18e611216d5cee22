"""Repeated layers as one row."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from fusekit.display.groups import group, ranges

WORD = st.sampled_from(["layers", "experts", "attn", "mlp", "0", "1", "2", "3", "10", "07", "-1", ""])
PATH = st.lists(WORD, max_size=5).map(".".join)
ITEMS = st.lists(st.tuples(PATH, st.sampled_from("ab")), max_size=40)


def grouped(items):
    return group(items, lambda item: item[0], lambda item: item[1])


def labels(*paths):
    return [(one.label, len(one.items)) for one in grouped([(path, "") for path in paths])]


@given(ITEMS)
def test_every_item_is_in_one_group_once(items):
    assert Counter(item for one in grouped(items) for item in one.items) == Counter(items)


@given(ITEMS)
def test_a_group_stands_for_exactly_the_paths_of_its_items(items):
    for one in grouped(items):
        assert sorted(one.paths()) == sorted({path for path, _ in one.items})


@given(ITEMS)
def test_items_of_a_group_agree_and_keep_their_order(items):
    groups = grouped(items)
    for one in groups:
        assert len({key for _, key in one.items}) == 1
    first = [items.index(one.first) for one in groups]
    assert first == sorted(first)


@given(st.sets(st.integers(0, 60), min_size=1))
def test_ranges_without_a_limit_say_every_number(numbers):
    said = ranges(sorted(numbers), most=100)
    back = set()
    for piece in said.split(","):
        ends, _, step = piece.partition(":")
        start, _, end = ends.partition("-")
        back |= set(range(int(start), int(end or start) + 1, int(step or 1)))
    assert back == numbers


def test_layers_that_differ_in_one_number_are_one_row():
    assert labels(*(f"model.layers.{i}.attn" for i in range(30))) == [("model.layers.0-29.attn", 30)]


def test_experts_of_all_layers_are_one_row():
    paths = [f"layers.{i}.experts.{j}" for i in range(4) for j in range(3)]
    assert labels(*paths) == [("layers.0-3.experts.0-2", 12)]


def test_a_layer_with_fewer_experts_is_a_row_of_its_own():
    assert labels("layers.0.experts.0", "layers.0.experts.1", "layers.1.experts.0") == [
        ("layers.0-1.experts.0", 2),
        ("layers.0.experts.1", 1),
    ]


def test_every_second_layer_and_gaps_are_told():
    assert labels(*(f"l.{i}" for i in range(0, 8, 2))) == [("l.0-6:2", 4)]
    assert labels("l.0", "l.1", "l.5") == [("l.0-1,5", 3)]
    assert ranges([1, 4, 9, 16, 25, 36, 49, 64, 81]) == "1,4,9,16,25,36,49,…,81"


def test_the_model_itself_and_names_with_leading_zeros_stand_alone():
    assert labels("", "l.07", "l.08") == [("", 1), ("l.07", 1), ("l.08", 1)]
