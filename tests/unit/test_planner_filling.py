"""The search for the most tokens that fill a time: never short of the truth, and seldom far above it."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from megatron_hexi.planner.bound.pieces.filling import Filling

#: Of each piece: a latency, seconds a token, seconds a token squared, what takes at least so long meanwhile.
PIECES = st.lists(
    st.tuples(st.floats(0, 1.5), st.floats(1e-6, 1e-2), st.floats(0, 1e-6), st.floats(0, 1.5)),
    min_size=1,
    max_size=8,
)


def largest(load, most):
    """The same by halving alone."""
    low, high = np.zeros(len(most)), most.copy()
    for _ in range(100):
        middle = (low + high) / 2
        fits = load(middle) <= 1
        low, high = np.where(fits, middle, low), np.where(fits, high, middle)
    return np.where(load(most) <= 1, most, low)


@given(pieces=PIECES, limits=st.lists(st.floats(0.1, 10), min_size=1, max_size=4))
def test_it_is_never_short_of_the_truth_whatever_was_sought_before(pieces, limits):
    latency, each, square, least = np.array(pieces).T
    most, filling = np.full(len(pieces), 65536.0), Filling()
    for limit in limits:

        def load(tokens, limit=limit):
            return (latency + each * tokens + np.maximum(square * tokens**2, least)) / limit

        truth, found = largest(load, most), filling.last("tokens", most, load)
        assert (found >= truth * (1 - 1e-12)).all()
        assert (found <= most).all()
        fits = load(np.zeros(len(pieces))) < 1
        assert (found[fits] <= truth[fits] * 1.04 + 1).all()
