"""Groups one inside the other: no layout is faster than what is said of them, and few are as fast."""

from functools import partial

import numpy as np
import pytest

from megatron_hexi.planner.bound.packings.halving import least_sufficient
from megatron_hexi.planner.bound.packings.nested import Nested
from megatron_hexi.planner.bound.packings.packing import Packing, shapes_of
from megatron_hexi.planner.bound.packings.worth import Worth
from megatron_hexi.planner.bound.pieces.gradients import Ring, least_ring
from megatron_hexi.planner.bound.pieces.load import Load
from megatron_hexi.planner.bound.pieces.prices import token_prices
from megatron_hexi.planner.bound.site_classes import classes_of, sites_of
from megatron_hexi.planner.budget import THOROUGH
from megatron_hexi.planner.fleet.units import find_units
from megatron_hexi.planner.layouts.layout import Layout, Part
from megatron_hexi.planner.layouts.trial import Judge
from megatron_hexi.planner.tuning.tune import Effort, tune
from tests.support.costs import cluster, tiny_job
from tests.support.fleets import shapes_of_trial, trials_of

MANY = 1_000_000


def nested_of(fleet, classes, shapes, count, ring, longest_s):
    """Groups of such shapes; all are worked out."""
    worth = Worth(fleet.job, classes, shapes, [count], ring, (0.0, longest_s), 0)
    return Nested(fleet.job, worth, [one.size * one.count for one in classes], MANY)


def together(groups):
    """The numbers of groups that are looked at with so many."""
    return next(span for span in ((2, 2), (3, 3), (4, 5), (6, 8), (9, 99)) if span[0] <= groups <= span[1])


def test_no_layout_whatever_is_faster():
    tried = 0
    for seed in range(24):
        for fleet, trial, how in trials_of(seed, 8):
            classes, shapes = shapes_of_trial(fleet, trial)
            ring = least_ring(fleet, trial.iteration_s, crosses=True)
            count, span = trial.layouts[0].micro_batches, (len(shapes), len(shapes))
            time = trial.iteration_s * (1 + 1e-6)
            nested = nested_of(fleet, classes, list(dict.fromkeys(shapes)), count, ring, time)
            for halves in {None, trial.plan.exchange.parts > 1}:
                assert nested.suffices(time, span, (count, together(len(shapes)), halves)), f"{seed} {how}"
            tried += 1
    assert tried > 40


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_of_groups_whose_keys_cost_nothing_it_is_close(recompute):
    # Five GPUs, each a group of its own: the best layout gives inner groups and outer ones other tokens.
    job = tiny_job(seq_length=2**17, recompute=recompute)
    nodes = [("a", "PLAIN", 1), ("b", "PLAIN", 1), ("c", "PLAIN", 1), ("d", "DOUBLE", 1), ("e", "DOUBLE", 1)]
    fleet = find_units(job, cluster(nodes, bandwidth=100_000))
    judge, heads = Judge(fleet), job.workload().local_heads
    rates = [1, 1, 1, 2, 2]
    found = []
    for order in ([0, 1, 2, 3, 4], [3, 4, 0, 1, 2], [0, 3, 1, 4, 2]):
        parts = [Part((unit,), (job.seq_length * rates[unit] // 7,), (heads,)) for unit in order]
        rest = job.seq_length - sum(part.total for part in parts)
        parts[0] = Part(parts[0].units, (parts[0].tokens[0] + rest,), (heads,))
        trial = judge.try_out(fleet, [Layout(tuple(parts), 1)], 2)
        found.append(tune(judge, trial, Effort(600, 100, (0.0003, 0.001, 0.003, 0.01), 0)))
    best = min(found, key=lambda trial: trial.order)
    best_s = best.timing.phases.total - best.timing.phases.gradients - best.timing.phases.optimizer
    classes = classes_of(sites_of(fleet, True, token_prices(fleet)))
    shapes = [shape for shape in shapes_of(classes) if len(shape) == 1]
    nested = nested_of(fleet, classes, shapes, 1, Ring(), best_s)
    may = partial(nested.suffices, span=(5, 5), way=(1, (4, 5), None))
    least_s = least_sufficient(may, best_s / 2, best_s, 1e-4)
    assert 0.99 * best_s <= least_s <= best_s
    packing, by_itself = (
        Packing(job, classes, [1], False, Ring(), (best_s / 2, best_s), THOROUGH.proof._replace(packings=0))
        for _ in range(2)
    )
    rough_s, close_s = packing.least_s(), packing.closely_least_s(best_s)
    assert rough_s < close_s
    # A replica beside others is asked about one time after the other.
    for closely, least_s in ((False, rough_s), (True, close_s)):
        assert not by_itself.suffices(0.999 * least_s, closely)
        assert by_itself.suffices(1.002 * least_s, closely)


def test_how_deep_a_group_is_follows_from_what_others_hold():
    fleet = find_units(tiny_job(seq_length=2**14), cluster([(name, "PLAIN", 1) for name in "ab"]))
    classes = classes_of(sites_of(fleet, True, token_prices(fleet)))
    nested = nested_of(fleet, classes, list(shapes_of(classes)), 1, Ring(), 1.0)
    # It holds 0.2 of all at any depth up to 3/8, and 0.4 deeper inside.
    caps = np.where(np.arange(16) < 6, 0.2, 0.4)[:, None] * 2**14
    outer = np.array([0.0, 0.2, 0.3, 0.5]) * 2**14
    hold, depth = nested._hold(np.repeat(caps, 4, axis=1), outer)
    # From 0.2 on, 0.4 more has its middle at 0.4; from 0.3 on it has it beyond 3/8 in any case.
    assert hold / 2**14 == pytest.approx([0.2, 0.4, 0.4, 0.4])
    assert depth.tolist() == [1, 6, 7, 11]


def test_more_groups_outside_mean_more_merging():
    fleet = find_units(tiny_job(seq_length=2**14), cluster([(name, "PLAIN", 1) for name in "abcd"]))
    [site] = classes_of(sites_of(fleet, True, token_prices(fleet)))
    load: Load = site.loads[0]
    group = np.array([2.0**12])
    outermost, even, innermost = (load.merges(group, 4, met) for met in (1.5, None, 3.0))
    assert outermost.forward == pytest.approx(even.forward)
    assert innermost.forward == pytest.approx(2 * outermost.forward)
    assert load.merges(np.array([2.0**14]), 4, 3.0).forward == pytest.approx(0)
