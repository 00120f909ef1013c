"""Replicas by themselves: what they take together, against every choice; and what that brings."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_hexi.cost import Job, presets
from megatron_hexi.planner import find_plan
from megatron_hexi.planner.bound import LowerBound
from megatron_hexi.planner.bound.pieces.gradients import Ring
from megatron_hexi.planner.bound.pieces.prices import Prices
from megatron_hexi.planner.bound.replica_choices import replica_shapes
from megatron_hexi.planner.bound.replicas import Replicas
from megatron_hexi.planner.bound.site_classes import classes_of, sites_of
from megatron_hexi.planner.budget import THOROUGH
from megatron_hexi.planner.fleet.units import find_units
from tests.support.bounds import lower_bound
from tests.support.costs import cluster


def every_shape(units):
    counts = itertools.product(*(range(most + 1) for most in units))
    return [tuple((place, n) for place, n in enumerate(chosen) if n) for chosen in counts if any(chosen)]


def best_by_hand(shapes, seconds, units, together):
    """The least time in which replicas take all micro-batches, over all sets of replicas."""
    best = np.inf

    def extend(first, left, chosen):
        nonlocal best
        if chosen:
            # Micro-batches one by one to whoever is done first.
            ends = [0.0] * len(chosen)
            for _ in range(together):
                place = min(range(len(chosen)), key=lambda n: ends[n] + seconds[chosen[n]])
                ends[place] += seconds[chosen[place]]
            best = min(best, max(ends))
        for number in range(first, len(shapes)):
            needs = dict(shapes[number])
            rest = [have - needs.get(place, 0) for place, have in enumerate(left)]
            if min(rest) >= 0:
                extend(number, rest, [*chosen, number])

    extend(0, list(units), [])
    return best


@settings(max_examples=40, deadline=None)
@given(
    units=st.lists(st.integers(1, 3), min_size=1, max_size=2),
    together=st.integers(1, 6),
    random=st.randoms(use_true_random=False),
)
def test_whole_replicas_are_put_together_as_well_as_can_be(units, together, random):
    shapes = every_shape(units)
    # More units are faster, not in proportion.
    speeds = [
        sum(n * (2 if place == 0 else 1) for place, n in shape) ** random.uniform(0.4, 1) for shape in shapes
    ]
    rates = np.array([sum(n * (2.5 if place == 0 else 1.5) for place, n in shape) for shape in shapes])
    seconds = [1 / speed for speed in speeds]
    for number, shape in enumerate(shapes):  # never slower than a part of it
        for other, part in enumerate(shapes):
            if all(n <= dict(shape).get(place, 0) for place, n in part):
                seconds[number] = min(seconds[number], seconds[other])
    asked = []

    def may(number, count, each_s):
        asked.append(number)
        assert each_s >= 1 / rates[number]
        return seconds[number] <= each_s

    turns = list(range(1, together + 1))
    best_s = best_by_hand(shapes, seconds, units, together)
    replicas = Replicas(shapes, units, turns, together, 1, Ring(), rates, may)
    least_s = replicas.least_s(0.0, 1.5 * best_s)
    assert best_s * 0.996 <= least_s <= best_s
    assert asked


def test_a_pipeline_s_replicas_are_asked_for_each_number_of_micro_batches():
    asked = []

    def may(number, count, each_s):
        asked.append(count)
        # Two micro-batches take three passes of a second and a half through two stages.
        return each_s >= 1.5

    replicas = Replicas([((0, 1),)], [1], [1, 2], 2, 2, Ring(), np.array([10.0]), may)
    assert replicas.least_s(0.0, 9.0) == pytest.approx(4.5, rel=0.01)
    assert set(asked) == {2}


def test_replicas_by_themselves_bound_what_groups_of_any_let_pass():
    # Eight sequences on six GPUs: parts of a sequence would do better.
    nodes = [("a", "H100-SXM-80GB", 4), ("b", "A100-SXM-80GB", 2)]
    job = Job(presets()["gpt-3b"], 2**14, recompute="full", global_batch_size=8)
    fleet = find_units(job, cluster(nodes, bandwidth=25))
    found_s = find_plan(job, cluster(nodes, bandwidth=25), data_parallel=None).cost.iteration_s
    by_replicas = lower_bound(fleet, None, found_s).iteration_s
    by_groups = lower_bound(fleet, None, found_s, THOROUGH.proof._replace(replicas=0)).iteration_s
    assert by_groups < by_replicas <= found_s


def test_whole_groups_bound_replicas_more_closely():
    # Two sequences: each replica is on both nodes, or there is one.
    nodes = [("a", "H100-SXM-80GB", 4), ("b", "A100-SXM-80GB", 2)]
    job = Job(presets()["gpt-3b"], 2**15, recompute="full", global_batch_size=2)
    fleet = find_units(job, cluster(nodes, bandwidth=25))
    found_s = find_plan(job, cluster(nodes, bandwidth=25), data_parallel=None).cost.iteration_s
    bound = LowerBound(fleet, None, found_s, THOROUGH.proof)
    assert 1.05 * bound.roughly().iteration_s < bound.closely(found_s).iteration_s <= found_s


@pytest.mark.parametrize("seq_length", [2**16, pytest.param(2**19, marks=pytest.mark.slow)])
def test_one_of_free_replicas_is_bounded_like_one_that_is_given(seq_length):
    # Of half a million tokens there is room for one sequence only.
    nodes = [("a", "H100-SXM-80GB", 4), ("b", "A100-SXM-80GB", 4)]
    job = Job(presets()["gpt-3b"], seq_length, recompute="full", global_batch_size=2)
    fleet = find_units(job, cluster(nodes, bandwidth=25))
    found_s = find_plan(job, cluster(nodes, bandwidth=25)).cost.iteration_s
    one, free = (lower_bound(fleet, count, found_s).iteration_s for count in (1, None))
    assert free == one if seq_length == 2**19 else free < one


def test_as_many_replicas_as_are_best_are_no_slower_than_one():
    # Of eight units of three kinds, the best grouping of one replica comes by what the bound names.
    nodes = [("a", "H100-SXM-80GB", 4), ("b", "A100-SXM-80GB", 2), ("c", "L40S-48GB", 2)]
    job = Job(presets()["gpt-3b"], 2**18, recompute="full", global_batch_size=4)
    known = cluster(nodes, bandwidth=25)
    plans = [find_plan(job, known, data_parallel=count, thorough=True) for count in (1, None)]
    one, free = (planned.cost.iteration_s for planned in plans)
    assert free <= one * (1 + 1e-9)


def test_units_without_room_for_a_sequence_are_no_replica():
    job = Job(presets()["gpt-3b"], 2**17, recompute="full", global_batch_size=4)
    fleet = find_units(job, cluster([("a", "H100-SXM-80GB", 2), ("b", "L40S-48GB", 2)], bandwidth=25))
    classes = classes_of(sites_of(fleet, True, Prices((1.0,), {}, {})))
    choices = replica_shapes(fleet, classes, None)
    assert ((0, 2), (1, 2)) in choices
    assert ((1, 1),) not in choices
    # What has room stays so with more units.
    sizes = [dict(shape) for shape in choices]
    for shape in every_shape((2, 2)):
        part_fits = any(all(dict(shape).get(place, 0) >= n for place, n in size.items()) for size in sizes)
        assert (shape in choices) == part_fits
