"""When keys arrive, step by step, against the clock of the cost model."""

import itertools
from unittest import mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_hexi.cost import overlap
from megatron_hexi.cost.compute import Times
from megatron_hexi.cost.overlap import Part, Start, pass_ends
from megatron_hexi.planner.bound.groups.group_times import GroupTimes
from megatron_hexi.planner.bound.pieces.prices import token_prices
from megatron_hexi.planner.bound.site_classes import classes_of, sites_of
from megatron_hexi.planner.bound.waiting.arrivals import Arrivals
from megatron_hexi.planner.bound.waiting.blocks import Blocks
from megatron_hexi.planner.bound.waiting.group_lines import GroupLines
from megatron_hexi.planner.bound.waiting.key_times import KeyTimes
from megatron_hexi.planner.bound.waiting.pass_end import PassEnd
from megatron_hexi.planner.bound.waiting.setting import Setting
from megatron_hexi.planner.fleet.units import find_units
from tests.support.costs import cluster, tiny_job
from tests.support.rows import Recorder

MANY = 1_000_000


def arrivals_by_the_clock(posted, own_block, window, steps):
    """When each unit has the keys of each step, given by owners, seconds on the way and of the blocks."""
    found = []

    class Noting(overlap._Wire):
        def carry(self, *batch):
            arrived = super().carry(*batch)
            found.append(self._free)
            return arrived

    nothing, users = np.zeros(len(posted)), np.arange(len(posted))
    parts = [[Part(Times(compute, compute), owners, users, there, there)] for owners, there, compute in steps]
    with mock.patch.object(overlap, "_Wire", Noting):
        pass_ends(False, parts, Start(posted, nothing, own_block, nothing), window, 1, nothing)
    return found


class Given(Blocks):
    """Blocks that take so long: their own, and one for each other group."""

    seconds: np.ndarray

    def of_step(self, turn, place, step):
        return self.seconds[self._order[turn]][step]


class End(PassEnd):
    """When keys may leave; a block takes as long as it says."""

    def __init__(self, posted):
        self.posted = [([], one) for one in posted]

    def lasts(self, number, place, seconds):
        return (0, 0.0), seconds


def groups_of(count):
    """Groups of one unit each, with a node of its own."""
    fleet = find_units(tiny_job(), cluster([(name, "PLAIN", 1) for name in "abcdef"[:count]]))
    classes = classes_of(sites_of(fleet, True, token_prices(fleet)))
    [of_class] = classes
    assert of_class.count == count
    shape, limits = ((0, 1),), ((0, 4),)
    alone = GroupTimes(fleet.job, classes, [shape], 1, (count, count), (0.0, 1e3), False)
    setting = Setting(fleet.job, classes, False, alone, 1e3)
    return setting, [GroupLines(setting, shape, 1.0, 4096.0, count, limits)] * count


@given(data=st.data(), count=st.integers(2, 5), in_turn=st.booleans())
def test_of_single_units_they_arrive_when_the_clock_says(data, count, in_turn):
    setting, groups = groups_of(count)
    order = data.draw(st.permutations(range(count)))
    tokens = data.draw(st.lists(st.integers(1, 4096), min_size=count, max_size=count))
    posted = data.draw(st.lists(st.floats(0, 1e-3), min_size=count, max_size=count))
    each = st.lists(st.floats(0, 1e-3), min_size=count, max_size=count)
    seconds = np.array(data.draw(st.lists(each, min_size=count, max_size=count)))
    # The first keys are there by then: of how long these take, in parts, nothing is assumed.
    seconds[:, 0] += 2e-2

    program = Recorder(groups)
    keys = KeyTimes(program, setting, groups, order)
    blocks = Given(program.tokens, groups, keys, order, True, 0)
    blocks.seconds = seconds
    arrivals = Arrivals(program, groups, keys, blocks, order, End(posted), in_turn)
    values = dict(zip(program.tokens, tokens, strict=True))

    steps = []
    for step in range(1, count):
        owners = np.zeros(count, dtype=int)
        for turn, number in enumerate(order):
            owners[number] = blocks.sources(turn)[step - 1]
            assert owners[number] == order[turn - step]
        there = np.array([keys.between(by, 0, of) * tokens[of] for by, of in enumerate(owners)])
        steps.append((owners, there, seconds[:, step]))
    window = 1 if in_turn else MANY
    expected = arrivals_by_the_clock(np.array(posted), seconds[:, 0], window, steps)
    for step, number in itertools.product(range(1, count), range(count)):
        start, at_zero = arrivals.at[number, 0, step]
        assert program.least(start, values) + at_zero == pytest.approx(expected[step - 1][number])
    for number, of in itertools.product(range(count), repeat=2):
        # Whoever is outside sees all of the keys, whoever is inside half of them.
        if number != of:
            outside = order.index(number) < order.index(of)
            assert keys.seen(number, of) == (1.0 if outside else 0.5)


@given(data=st.data(), count=st.integers(2, 5))
def test_where_inner_groups_are_not_known_they_arrive_no_later(data, count):
    setting, groups = groups_of(count)
    order = data.draw(st.permutations(range(count)))
    tokens = data.draw(st.lists(st.integers(1, 4096), min_size=count, max_size=count))
    posted = data.draw(st.lists(st.floats(0, 1e-3), min_size=count, max_size=count))
    end, found, first_parts = End(posted), [], []
    for known in (order, order[: data.draw(st.integers(1, count))]):
        program = Recorder(groups)
        keys = KeyTimes(program, setting, groups, known)
        blocks = Blocks(program.tokens, groups, keys, known, True, 0)
        arrivals = Arrivals(program, groups, keys, blocks, known, end)
        values = dict(zip(program.tokens, tokens, strict=True))
        found.append(
            {name: program.least(start, values) + at_zero for name, (start, at_zero) in arrivals.at.items()}
        )
        firsts = [arrivals.first(turn) for turn in range(len(known))]
        first_parts.append([program.least(start, values) + at_zero for start, at_zero in firsts])
    assert all(some <= every + 1e-12 for every, some in zip(*first_parts, strict=False))
    every, some = found
    assert {number for number, _, _ in some} == set(known)
    assert all(seconds <= every[name] + 1e-12 for name, seconds in some.items())
    # A group's neighbours are known, so is what it waits for in the first step.
    assert all(some[known[turn], 0, 1] == every[known[turn], 0, 1] for turn in range(1, len(known) - 1))
