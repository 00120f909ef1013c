"""The least that suffices between two times: never more than the truth, and as close as asked."""

from hypothesis import given
from hypothesis import strategies as st

from megatron_hexi.planner.bound.packings.halving import least_sufficient


@given(
    low=st.floats(1e-6, 1e3),
    span=st.floats(0, 10),
    at=st.floats(0, 1),
    precision=st.floats(1e-6, 0.1),
    steps=st.lists(st.floats(0.05, 0.9), min_size=1, max_size=3),
)
def test_it_is_at_most_the_truth_and_close(low, span, at, precision, steps):
    high = low * (1 + span)
    truth = low + at * (high - low)
    found = least_sufficient(lambda time: time >= truth, low, high, precision, steps)
    assert low <= found <= truth * (1 + 1e-12)
    assert truth - found <= precision * high


def test_it_looks_where_steps_say():
    looked = list[float]()

    def fails(time):
        looked.append(time)
        return False

    least_sufficient(fails, 0.0, 1.0, 0.7, (1 / 8, 1 / 4))
    assert looked == [0.125, 0.34375]


def test_nothing_between_is_not_looked_at():
    def fails(time):
        raise AssertionError(time)

    assert least_sufficient(fails, 2.0, 2.0, 0.1) == 2.0
    assert least_sufficient(fails, 3.0, 2.0, 0.1) == 3.0
