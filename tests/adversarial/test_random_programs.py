"""Forwards drawn by hypothesis, run before and after: refused, or equal."""

from collections import Counter

from hypothesis import HealthCheck, assume, given, settings
from programs import outcome, programs

PROGRAMS = 1_000


def test_a_drawn_forward_is_refused_or_equal():
    seen, counts = set(), Counter()

    @settings(
        max_examples=PROGRAMS,
        derandomize=True,
        database=None,
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
    )
    @given(programs())
    def check(text):
        assume(text not in seen)
        found = outcome(text)
        assert not found.difference, f"{found.difference}\n{text}"
        seen.add(text)
        counts.update(name for name in ("runs", "fuses", "unsound", "mergeable") if getattr(found, name))

    check()
    # Else little was tested.
    assert len(seen) == PROGRAMS
    assert counts["runs"] > 0.9 * PROGRAMS, counts
    assert counts["fuses"] > 0.3 * PROGRAMS, counts
    assert counts["unsound"] > 0.2 * PROGRAMS, counts
    assert counts["mergeable"] > 0.35 * PROGRAMS, counts
