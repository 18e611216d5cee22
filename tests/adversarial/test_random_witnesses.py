"""What a run on meta saw of forwards drawn by hypothesis is among what the analysis of their text allows."""

from hypothesis import HealthCheck, Phase, given, settings
from programs import module_of, programs

from tests.tracing.witnesses import contradictions

PROGRAMS = 1_000


def test_the_text_of_a_drawn_forward_allows_what_a_run_saw():
    seen = set()

    @settings(
        max_examples=PROGRAMS,
        derandomize=True,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
    )
    @given(programs())
    def check(text):
        with module_of(text) as module:
            found = contradictions(module)
        assert found == [], f"{found}\n{text}"
        seen.add(text)

    check()
    assert len(seen) > 0.8 * PROGRAMS  # else little was tested
