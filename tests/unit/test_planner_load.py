"""What a piece of a group takes at least, worked by hand."""

import numpy as np
import pytest

from megatron_hexi.cost.compute import keys_merge_times, merge_times
from megatron_hexi.planner.bound.pieces.prices import Prices
from megatron_hexi.planner.bound.site_classes import sites_of
from megatron_hexi.planner.fleet.units import find_units
from tests.support.costs import cluster, tiny_job

LENGTH, GROUP = 2**14, 2**12


def load_of(**job):
    fleet = find_units(tiny_job(seq_length=LENGTH, **job), cluster([("a", "PLAIN", 2), ("b", "DOUBLE", 2)]))
    site, *_ = sites_of(fleet, True, Prices((1.0,), {}, {}))
    return fleet.job, site.pieces.loads[0]


def test_gradients_of_keys_are_merged_by_depth():
    job, load = load_of()
    group = np.array([float(GROUP)])
    # A quarter of all tokens. Outermost, its middle is an eighth of the way in: it sees all keys of the rest.
    # Innermost, half of them.
    for depth, keys in ((1 / 8, 0.75 * LENGTH), (7 / 8, 0.375 * LENGTH), (1.0, 0.375 * LENGTH)):
        _, far = load.head_times(group, 4, depth)
        _, deepest = load.head_times(group, 4)
        more = keys_merge_times(load._speeds, job, np.array([keys - 0.375 * LENGTH])) / load.ratio
        assert far.backward - deepest.backward == pytest.approx(more)
        assert far.forward == deepest.forward


def test_a_merge_is_that_of_the_cost_model():
    job, load = load_of()
    one = np.ones(1)
    forward, backward = merge_times(load._speeds, job, one)
    assert load.a_merge(0) == (forward[0], 0)
    assert load.a_merge(1) == (backward[0], keys_merge_times(load._speeds, job, one)[0] / load.ratio)
