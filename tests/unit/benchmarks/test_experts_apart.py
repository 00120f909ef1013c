"""The linear program of `benchmarks.experts_apart` against gains known by hand."""

import pytest

from benchmarks.experts_apart import most_gain


@pytest.mark.parametrize(
    ("seconds", "gain"),
    [
        (((1, 1), (3, 3)), 1.0),  # alike: nothing to gain
        (((1, 3), (3, 1)), 2.0),  # each does what it is fast at: 1 token/s in place of 2 / 4
        (((1, 1), (2, 4)), 1.125),  # the second attends for 1/2, the first for 1/4: 3/4 over 1/2 + 1/6
    ],
)
def test_the_most_gain(seconds, gain):
    assert most_gain(seconds) == pytest.approx(gain)
