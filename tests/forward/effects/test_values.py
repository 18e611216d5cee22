"""Values and states: what is known where two ways come together."""

import pytest

from fusekit.forward.effects import switched_off
from fusekit.forward.effects.values import (
    ANY,
    BOTTOM,
    CONTAINER,
    KNOWN,
    MOST_OBJECTS,
    NOWHERE,
    OUTSIDE,
    PLAIN,
    REST,
    TENSOR,
    UNSET,
    Region,
    State,
    Value,
    anything,
    container,
    join,
    joined,
    meet,
    plain,
    tensor,
)

X, Y = Region("given", "x"), Region("given", "y")
NEW, LIST = Region("new", 1), Region("new", 2)
OWN = Region("own", 3)


def held(value: Value, token: object) -> Value:
    return Value(value.regions, value.kinds, value.constant, value.fixed, value.objects, token=token)


def test_regions_are_told_apart_by_where_they_came_from():
    assert Region("new", 1, "a", deep=True) == Region("new", 1, "b", can_be_input=False)
    assert len({Region("new", 1), Region("own", 1), Region("given", 1), Region("new", 2)}) == 4
    assert OUTSIDE.deep and not NEW.deep


@pytest.mark.parametrize(
    "one, other, kinds, regions",
    [
        (tensor({X}), tensor({X}), {TENSOR}, {X}),
        (tensor({X}), tensor({Y}), {TENSOR}, {X, Y}),
        (tensor({X}), plain(1), {TENSOR, PLAIN}, {X}),
        (tensor({X}), anything({OUTSIDE}), {TENSOR, ANY}, {X, OUTSIDE}),
        (container({LIST}), tensor({X}), {CONTAINER, TENSOR}, {LIST, X}),
        (BOTTOM, tensor({X}), {TENSOR}, {X}),
        (tensor({X}), BOTTOM, {TENSOR}, {X}),
        (BOTTOM, BOTTOM, set(), set()),
    ],
)
def test_a_join_may_be_either(one, other, kinds, regions):
    for found in (join(one, other), join(other, one)):
        assert found.kinds == kinds and found.regions == regions


@pytest.mark.parametrize(
    "one, other, constant, fixed",
    [
        (plain(1, True), plain(1, True), 1, True),
        (plain(1, True), plain(1), UNSET, False),  # the one may change
        (plain(1, True), plain(2, True), UNSET, False),
        (plain(1), plain(True), UNSET, False),
        (plain(0.0), plain(0), UNSET, False),
        (plain("a", True), plain("a", True), "a", True),
        (plain(None, True), plain(None, True), None, True),
        (plain(None, True), tensor({X}), UNSET, False),
    ],
)
def test_a_constant_stays_where_both_have_it(one, other, constant, fixed):
    for found in (join(one, other), join(other, one)):
        assert found.constant is constant or found.constant == constant
        assert found.fixed is fixed


def test_nothing_that_is_not_there_is_fixed():
    assert not plain(fixed=True).fixed and plain(None, True).fixed


def test_a_token_stays_where_both_have_it():
    x = held(tensor({X}), "a")
    assert join(x, held(tensor({Y}), "a")).token == "a"
    assert join(x, held(tensor({Y}), "b")).token is None
    assert join(x, tensor({X})).token is None and join(BOTTOM, x).token is None
    assert x.without_token() == tensor({X})
    assert joined([x, x]).token is None


def test_objects_are_joined_by_identity():
    one, other, equal = [1], [2], [1]
    first, second, third = (Value(NOWHERE, frozenset({KNOWN}), objects=(o,)) for o in (one, other, equal))
    assert join(first, first).objects == (one,)
    assert [id(o) for o in joined([first, second, third, first]).objects] == [id(one), id(other), id(equal)]
    assert first != third and first == Value(NOWHERE, frozenset({KNOWN}), objects=(one,))


def test_too_many_objects_are_anything():
    values = [Value(NOWHERE, frozenset({KNOWN}), objects=(object(),)) for _ in range(MOST_OBJECTS + 1)]
    assert joined(values[:-1]).kinds == {KNOWN}
    assert joined(values) == anything({OUTSIDE})


@pytest.mark.parametrize(
    "value, is_plain, is_tensor",
    [
        (plain(1), True, False),
        (tensor({X}), False, True),
        (join(tensor({X}), plain(None)), False, True),
        (join(tensor({X}), container({LIST})), False, False),
        (anything({X}), False, False),
        (BOTTOM, False, False),
    ],
)
def test_kinds(value, is_plain, is_tensor):
    assert value.is_plain is is_plain and value.is_tensor is is_tensor


# -- states --------------------------------------------------------------------------------------------


def names(**values: Value) -> State:
    return State({(0, name): value for name, value in values.items()})


def test_where_no_way_leads_the_other_is_the_state():
    state = names(x=tensor({X}))
    assert meet(None, state, "here") is state and meet(state, None, "here") is state
    assert meet(state, state, "here") is state and meet(None, None, "here") is None


def test_a_name_may_hold_what_it_holds_on_either_way():
    found = meet(names(h=tensor({X})), names(h=tensor({NEW}), w=tensor({Y})), "here")
    assert found.names[0, "h"].regions == {X, NEW}
    assert found.names[0, "w"].regions == {Y}  # on the other way it has no value


def test_names_with_one_value_on_each_way_have_one_behind():
    a, b = held(tensor({X}), "a"), held(tensor({Y}), "b")
    found = meet(names(h=a, w=a, v=b), names(h=b, w=b, v=b), "here")
    h, w, v = (found.names[0, name].token for name in "hwv")
    assert h == w and h not in (None, "a", "b")
    assert v == "b"
    assert meet(names(h=a), names(h=b), "there").names[0, "h"].token != h


def test_names_with_one_value_on_one_way_only_have_two():
    a, b = held(tensor({X}), "a"), held(tensor({Y}), "b")
    found = meet(names(x=a, h=a), names(x=a, h=b), "here")
    assert found.names[0, "x"].token == "a" and found.names[0, "h"].token not in (None, "a")
    with switched_off("values"):
        found = meet(names(x=a, h=a), names(x=a, h=b), "here")
    assert found.names[0, "x"].token == found.names[0, "h"].token == "a"


def test_the_same_place_again_gives_the_same_state():
    """So a loop settles."""
    a, b = held(tensor({X}), "a"), held(tensor({Y}), "b")
    once = meet(names(h=a, w=a), names(h=b, w=b), "here")
    assert meet(once, names(h=b, w=b), "here") == once


def test_what_an_earlier_round_left_is_no_longer_the_new_value():
    state = names(h=held(tensor({X}), "a"), w=held(tensor({X}), "a"), v=held(tensor({Y}), "b"))
    state.retoken("a", frozenset({(0, "h")}))
    h, w, v = (state.names[0, name].token for name in "hwv")
    assert h == "a" and v == "b" and w not in (None, "a", "b")


def test_items_of_a_new_container_are_those_of_either_way():
    one, other = State(), State()
    one.put(LIST, 0, tensor({X}))
    other.put(LIST, 0, tensor({Y}))
    other.put(LIST, 1, tensor({NEW}))
    found = meet(one, other, "here").heap[LIST]
    assert found[0].regions == {X, Y} and found[1].regions == {NEW}


def test_an_attribute_that_one_way_stores_may_be_what_it_was():
    stored = State()
    stored.put(OWN, "kept", tensor({X}))
    for found in (meet(stored, State(), "here"), meet(State(), stored, "here")):
        assert found.heap[OWN]["kept"].regions == {X, OUTSIDE}


def test_what_is_put_may_lie_beside_what_lay_there():
    state = State()
    state.put(LIST, REST, held(tensor({X}), "a"))
    state.put(LIST, REST, tensor({Y}))
    assert state.heap[LIST][REST] == tensor({X, Y})
    state.put(LIST, REST, tensor({NEW}), surely=True)
    assert state.heap[LIST][REST] == tensor({NEW})


def test_a_copy_is_of_its_own():
    state = names(x=tensor({X}))
    state.put(LIST, 0, tensor({X}))
    other = state.copy()
    assert other == state
    other.put(LIST, 0, tensor({Y}))
    other.names[0, "x"] = tensor({Y})
    other.escaped |= {NEW}
    assert state.heap[LIST][0].regions == {X} and state.names[0, "x"].regions == {X} and not state.escaped
    assert meet(state, other, "here").escaped == {NEW}
