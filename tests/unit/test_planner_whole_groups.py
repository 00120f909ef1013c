"""Every way to pack whole groups, lines below functions, and what both do to the bound."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_hexi.planner import find_plan
from megatron_hexi.planner.bound import LowerBound
from megatron_hexi.planner.bound.groups.site_times import in_steps
from megatron_hexi.planner.bound.packings.program import Program
from megatron_hexi.planner.bound.packings.whole import packings
from megatron_hexi.planner.bound.waiting.lines import Line, below
from megatron_hexi.planner.bound.waiting.pass_rows import _slopes
from megatron_hexi.planner.budget import THOROUGH
from megatron_hexi.planner.fleet.units import find_units
from tests.support.costs import cluster, tiny_job

NODES = [("fast", "DOUBLE", 2), ("slow", "PLAIN", 2)]


def by_hand(used, units, span, worth, needed):
    """The same by trying every multiset."""
    found = set()
    numbers = [number for number in range(len(used)) if worth[number] > 0]
    for count in range(span[0], span[1] + 1):
        for taken in itertools.combinations_with_replacement(numbers, count):
            fits = (used[list(taken)].sum(axis=0) <= units).all()
            if fits and sum(worth[number] for number in taken) >= needed:
                found.add(taken)
    return found


@given(st.integers(0, 10_000))
def test_all_packings_that_hold_enough_are_found(seed):
    random = np.random.default_rng(seed)
    units = random.integers(1, 5, size=2)
    used = np.array(
        [pair for pair in itertools.product(*(range(most + 1) for most in units)) if any(pair)], float
    )
    worth = (used @ random.uniform(0.5, 2, 2)) * random.uniform(0.5, 1, len(used))
    worth[random.random(len(used)) < 0.2] = 0
    low = int(random.integers(1, 4))
    span = low, low + int(random.integers(0, 3))
    program = Program(used, units.tolist(), span)
    total, _ = program.solve(worth)
    needed = total * random.uniform(0.7, 1.0)
    if total <= 0:
        return
    every = by_hand(used, units, span, worth, needed * (1 - 1e-6))
    for mixed in (False, True):

        def hold(packed, mixed=mixed):
            return worth[list(packed)] if len(set(packed)) > mixed else None

        found = packings(used, units.tolist(), span, worth, needed, program.prices(), hold, 10_000)
        assert found.complete
        assert all((most == worth[list(one)]).all() for one, most in found.found)
        assert {tuple(sorted(one)) for one, _ in found.found} == {
            one for one in every if len(set(one)) > mixed
        }


def test_too_many_packings_are_not_all():
    used, worth = np.ones((6, 1)), np.ones(6)
    program = Program(used, [8], (8, 8))
    assert program.solve(worth)[0] == pytest.approx(8)
    found = packings(used, [8], (8, 8), worth, 8.0, program.prices(), lambda packed: worth[list(packed)], 20)
    assert not found.complete
    assert 20 < len(found.found) < 30
    # Those that may not hold the sequence are counted too, if they are many.
    found = packings(used, [8], (8, 8), worth, 8.0, program.prices(), lambda _packed: None, 20)
    assert not found.complete
    assert not found.found


@given(
    st.lists(
        st.tuples(st.floats(0, 1), st.floats(-10, 10)), min_size=1, max_size=12, unique_by=lambda p: p[0]
    )
)
def test_lines_are_below_all_points_and_meet_the_outer_ones(points):
    points = sorted((round(x, 3), y) for x, y in points)
    points = [pair for pair, after in zip(points, [*points[1:], (2, 0)], strict=True) if pair[0] < after[0]]
    places, values = (np.array(one) for one in zip(*points, strict=True))
    lines = below(places, values)
    hull = np.array([[line.slope * x + line.at_zero for x in places] for line in lines]).max(axis=0)
    assert (hull <= values + 1e-6).all()
    assert hull[[0, -1]] == pytest.approx(values[[0, -1]], abs=1e-6)


def test_of_points_at_one_place_the_lowest_counts():
    assert below(np.array([2.0, 2.0, 2.0]), np.array([5.0, 3.0, 4.0])) == [Line(0.0, 3.0)]
    lines = below(np.array([0.0, 1.0, 1.0]), np.array([0.0, 2.0, 1.0]))
    assert lines == [Line(1.0, 0.0)]


@given(st.floats(0, 20), st.integers(1, 7), st.floats(0, 1), st.floats(0, 1))
def test_planes_are_below_what_takes_turns(ratio, steps, wire, compute):
    by_wire, by_work = _slopes(ratio, steps)
    least = float(in_steps(np.array(wire), np.array(compute), steps))
    assert by_wire * wire + by_work * compute <= least + 1e-5


@pytest.mark.parametrize(("length", "bandwidth"), [(2**13, 30), (2**14, 10)])
def test_the_bound_comes_closer_and_stays_below(length, bandwidth):
    job = tiny_job(seq_length=length, recompute="full")
    fleet = find_units(job, cluster(NODES, bandwidth=bandwidth))
    best = find_plan(job, fleet.cluster).cost.iteration_s
    bound = LowerBound(fleet, 1, 1.1 * best, THOROUGH.proof)
    assert 1.1 * bound.roughly().iteration_s < bound.closely(1.1 * best).iteration_s <= best
