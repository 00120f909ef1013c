"""Changes of a layout's groups: nothing is lost or made up, and further is twice as far."""

from math import log
from random import Random

import numpy as np
import pytest

from megatron_hexi.planner.fleet.units import find_units
from megatron_hexi.planner.layouts.layout import Layout, Part
from megatron_hexi.planner.tuning.moves import drawn, shared
from tests.support.costs import cluster, tiny_job
from tests.support.fleets import random_fleets, random_layouts


def test_a_move_deals_the_same_tokens_heads_and_units_and_what_has_no_further_keeps_all_of_a_group():
    kinds = {True: 0, False: 0}
    for random, fleet in random_fleets(0, 20, gpus=(4, 6, 8)):
        [layout] = random_layouts(random, fleet, 1)
        for number in range(20):
            move = drawn(Random(number), fleet, layout, (0.1, 0.5))
            after = move.change(layout.parts)
            kinds[move.further is None] += 1
            assert sum(part.total for part in after) == fleet.job.seq_length
            assert all(sum(part.heads) == fleet.job.workload().local_heads for part in after)
            assert all(count >= 0 for part in after for count in (*part.tokens, *part.heads))
            assert sorted(unit for part in after for unit in part.units) == list(layout.units)
            if move.further is None:
                assert sorted(part.total for part in after) == sorted(part.total for part in layout.parts)
    assert min(kinds.values()) > 20, kinds


@pytest.mark.parametrize("step", [0.1, -0.2])
def test_further_is_twice_as_far(step):
    fleet = find_units(tiny_job(seq_length=2**20), cluster([("a", "PLAIN", 2), ("b", "PLAIN", 2)]))
    before = Layout((Part((0, 1), (2**18, 2**18), (2, 2)), Part((2, 3), (2**18, 2**18), (3, 1))), 1)
    met = 0
    for number in range(60):
        move = drawn(Random(number), fleet, before, (abs(step),))
        if move.further is None:
            continue
        once, twice = (_odds(change(before.parts)) for change in (move.change, move.further().change))
        moved = np.flatnonzero(np.abs(once) > 1e-3)
        if once.any() and np.sign(once[moved[0]]) == np.sign(step):
            assert twice == pytest.approx(2 * once, abs=1e-4)
            assert abs(once[moved[0]]) == pytest.approx(abs(step), abs=1e-4)
            met += 1
    assert met > 3


def _odds(parts):
    """Logarithms of the groups' ratio, and of the members' in each group."""
    (a, b), (c, d) = (part.tokens for part in parts)
    return np.array([log((a + b) / (c + d)), log(a / b), log(c / d)])


def test_heads_move_twice_as_many_but_no_more_than_there_are():
    fleet = find_units(tiny_job(), cluster([("a", "PLAIN", 2)]))
    parts = (Part((0, 1), (2048, 2048), (3, 1)),)
    seen = set()
    for number in range(60):
        move = drawn(Random(number), fleet, Layout(parts, 1), (0.1,))
        for _ in range(3):
            [after] = move.change(parts)
            if after.tokens == (2048, 2048):
                seen.add(after.heads)
            assert move.further
            move = move.further()
    assert seen == {(3, 1), (2, 2), (4, 0), (1, 3), (0, 4)}


def test_tokens_are_shared_by_weights_and_inside_groups_as_before():
    parts = (Part((0, 1), (600, 200), (4, 0)), Part((2,), (200,), (4,)))
    one, other = shared(parts, np.array([1.0, 3.0]))
    assert (one.total, other.total) == (250, 750)
    assert one.tokens == pytest.approx((187.5, 62.5), abs=1)
