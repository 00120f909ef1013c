"""The least that suffices between two times: never more than the truth, and as close as asked."""

from hypothesis import given
from hypothesis import strategies as st

from megatron_hexi.planner.bound.halving import least_sufficient


@given(
    low=st.floats(1e-6, 1e3),
    span=st.floats(0, 10),
    at=st.floats(0, 1),
    precision=st.floats(1e-6, 0.1),
)
def test_it_is_at_most_the_truth_and_close(low, span, at, precision):
    high = low * (1 + span)
    truth = low + at * (high - low)
    found = least_sufficient(lambda time: time >= truth, low, high, precision)
    assert low <= found <= truth * (1 + 1e-12)
    assert truth - found <= precision * high


def test_nothing_between_is_not_looked_at():
    def fails(time):
        raise AssertionError(time)

    assert least_sufficient(fails, 2.0, 2.0, 0.1) == 2.0
    assert least_sufficient(fails, 3.0, 2.0, 0.1) == 3.0
