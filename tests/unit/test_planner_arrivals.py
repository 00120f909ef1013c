"""When keys arrive, step by step, against the clock of the cost model."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_hexi.cost.overlap import ForwardClock, Part
from megatron_hexi.planner.bound import bound as bounds
from megatron_hexi.planner.bound.arrivals import Arrivals
from megatron_hexi.planner.bound.columns import GroupTimes
from megatron_hexi.planner.bound.group_lines import GroupLines
from megatron_hexi.planner.bound.key_times import KeyTimes
from megatron_hexi.planner.bound.prices import token_prices
from megatron_hexi.planner.bound.setting import Setting
from megatron_hexi.planner.units import find_units
from tests.support.costs import cluster, tiny_job
from tests.support.rows import Recorder

MANY = 1_000_000


class Arriving(ForwardClock):
    """The clock, which keeps when each step's keys have arrived."""

    def __init__(self, posted):
        super().__init__(posted, posted, np.zeros(len(posted)), MANY)

    def arrived(self, owners, seconds):
        users = np.arange(len(owners))
        self.step([Part(np.zeros(len(owners)), owners, users, seconds, seconds)])
        return self._wire.free.copy()


@given(data=st.data(), count=st.integers(2, 5))
def test_of_single_units_they_arrive_when_the_clock_says(data, count):
    fleet = find_units(tiny_job(), cluster([(name, "PLAIN", 1) for name in "abcdef"[:count]]))
    classes = bounds._classes(list(bounds._sites(fleet, True, token_prices(fleet))))
    [of_class] = classes
    assert of_class.count == count
    shape, limits = ((0, 1),), ((0, 4),)
    alone = GroupTimes(fleet.job, classes, [shape], 1, (count, count), (0.0, 1e3), False)
    setting = Setting(fleet.job, classes, False, alone, 1e3)
    groups = [GroupLines(setting, shape, 1.0, 4096.0, count, limits)] * count
    order = data.draw(st.permutations(range(count)))
    tokens = data.draw(st.lists(st.integers(1, 4096), min_size=count, max_size=count))
    posted = data.draw(st.lists(st.floats(0, 1e-3), min_size=count, max_size=count))

    program = Recorder(groups)
    keys = KeyTimes(program, setting, groups, order)
    arrivals = Arrivals(program, groups, keys, order, [([], one) for one in posted])
    values = dict(zip(program.tokens, tokens, strict=True))

    clock = Arriving(np.array(posted))
    for step in range(1, count):
        owners = np.zeros(count, dtype=int)
        for turn, number in enumerate(order):
            owners[number] = arrivals.sources(turn)[step - 1]
            assert owners[number] == order[turn - step]
        seconds = np.array([keys.between(by, 0, of) * tokens[of] for by, of in enumerate(owners)])
        expected = clock.arrived(owners, seconds)
        for number in range(count):
            start, at_zero = arrivals.at[number, 0, step]
            assert program.least(start, values) + at_zero == pytest.approx(expected[number])
    for number, of in itertools.product(range(count), repeat=2):
        # Whoever is outside sees all of the keys, whoever is inside half of them.
        if number != of:
            outside = order.index(number) < order.index(of)
            assert keys.seen(number, of) == (1.0 if outside else 0.5)
