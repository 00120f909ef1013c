"""CP-SAT and polishing: never worse, complete hints, a proof on small cases, and what scaling cannot find."""

from dataclasses import replace

import numpy as np
import pytest
from ortools.sat.python import cp_model

from megatron_hexi.planner.fleet.rates import Rates
from megatron_hexi.planner.fleet.units import find_units
from megatron_hexi.planner.layouts.layout import A2AGroup, Layout
from megatron_hexi.planner.layouts.trial import Judge
from megatron_hexi.planner.search.balance import balance
from megatron_hexi.planner.search.groupings import all_partitions, site_classes
from megatron_hexi.planner.search.guess import FirstGuess
from megatron_hexi.planner.search.polish import polish
from megatron_hexi.planner.search.solver import _Build, refine
from tests.support.costs import TINY, cluster, tiny_job
from tests.support.fleets import device_text, random_fleets, random_layouts, read_text


def balanced(random, fleet, judge):
    """A grouping of one domain, balanced."""
    rates = Rates(fleet)
    if len(fleet.units) <= 4:
        grouping = random.choice(list(all_partitions(fleet)))
    else:
        grouping = tuple(site for sites in site_classes(fleet).values() for site in sites)
    together = fleet.job.global_batch_size // fleet.job.micro_batch_size
    first = judge.try_out(fleet, [FirstGuess(fleet, rates).layout(grouping, together)], 2)
    return balance(judge, rates, first, 4)


def check_sound(trial):
    """Every token and head is dealt once."""
    job = trial.fleet.job
    for layout in trial.layouts:
        assert sum(part.total for part in layout.parts) == job.seq_length
        assert all(sum(part.heads) == job.workload().local_heads for part in layout.parts)
        assert all(count >= 0 for part in layout.parts for count in (*part.tokens, *part.heads))


# CP-SAT


@pytest.mark.parametrize("seeds", [(0, 15), pytest.param((15, 60), marks=pytest.mark.slow)], ids=str)
def test_refining_is_never_worse(seeds):
    better = 0
    for random, fleet in random_fleets(*seeds):
        judge = Judge(fleet)
        for trial in (
            balanced(random, fleet, judge),
            judge.try_out(fleet, random_layouts(random, fleet, random.choice([1, None])), 2),
        ):
            refined = refine(judge, trial).trial
            assert refined.order <= trial.order
            check_sound(refined)
            assert (refined.window, len(refined.layouts)) == (trial.window, len(trial.layouts))
            assert [[part.units for part in layout.parts] for layout in refined.layouts] == [
                [part.units for part in layout.parts] for layout in trial.layouts
            ]
            better += refined.order < trial.order
    assert better > 0.25 * (seeds[1] - seeds[0])


def test_refining_twice_gives_the_same():
    for random, fleet in random_fleets(0, 15):
        judge = Judge(fleet)
        trial = balanced(random, fleet, judge)
        one, other = refine(judge, trial), refine(judge, trial)
        assert (one.trial.layouts, one.proven) == (other.trial.layouts, other.proven)


def test_the_layout_given_is_a_complete_hint_that_keeps_every_rule():
    checked = 0
    for random, fleet in random_fleets(0, 40):
        trial = balanced(random, fleet, Judge(fleet))
        if trial.timing.needed[0].max() > 0.99 * trial.timing.usable[0].min():
            continue  # CP-SAT leaves a little of the memory free
        build = _Build(trial)
        for layout in trial.layouts:
            build.add_replica(layout)
        proto = build.model.proto
        assert sorted(proto.solution_hint.vars) == list(range(len(proto.variables)))
        build.model.minimize(build.limit)
        solver = cp_model.CpSolver()
        solver.parameters.num_workers = 1
        solver.parameters.fix_variables_to_their_hinted_value = True
        assert solver.solve(build.model) == cp_model.OPTIMAL
        checked += 1
    assert checked > 25


@pytest.mark.parametrize("nodes", [[("a", "PLAIN", 2)], [("a", "DOUBLE", 1), ("b", "PLAIN", 1)]])
@pytest.mark.parametrize("grouping", [((0, 1),), ((0,), (1,))])
def test_small_cases_are_proven(nodes, grouping):
    fleet = find_units(tiny_job(seq_length=2**14), cluster(nodes))
    judge, rates = Judge(fleet), Rates(fleet)
    trial = balance(judge, rates, judge.try_out(fleet, [FirstGuess(fleet, rates).layout(grouping, 1)], 2), 4)
    refined = refine(judge, trial)
    assert refined.proven
    # Scaling found it already.
    assert refined.trial.iteration_s == pytest.approx(trial.iteration_s, rel=2e-3)


@pytest.mark.parametrize(
    ("memory", "heads", "kv_heads", "speed"), [(2.5, 4, 4, 200), (3, 8, 2, 200), (3, 8, 8, 100)]
)
def test_tokens_and_heads_under_memory_are_found_together(memory, heads, kv_heads, speed):
    # Two members, one with little memory. Scaling settles heads at the tokens held, and tokens beside the
    # heads held: it stays where one head more means fewer tokens. The best is found by trying all.
    text = (
        "name: tight\nnodes:\n- {name: a, gpu: A, gpus: 1}\n- {name: b, gpu: B, gpus: 1}\n"
        "network: {bandwidth_gb_s: 200, latency_us: 0, per: gpu}\n"
        f"devices:\n{device_text('A', 100, 100)}{device_text('B', speed, speed, memory=memory)}"
    )
    model = replace(TINY, heads=heads, kv_heads=kv_heads, head_dim=64)
    fleet = find_units(tiny_job(seq_length=2**17, model=model, recompute="full"), read_text(text))
    judge, rates = Judge(fleet), Rates(fleet)
    rates.free = np.full(2, np.inf)  # begin with shares by speed alone
    first = judge.try_out(fleet, [FirstGuess(fleet, rates).layout(((0, 1),), 1)], 1)
    scaled = balance(judge, rates, first, 6)
    refined = refine(judge, scaled)
    assert scaled.fits
    assert refined.trial.fits
    assert refined.trial.iteration_s < 0.8 * scaled.iteration_s
    every = [
        judge.try_out(
            fleet, [Layout((A2AGroup((0, 1), (tokens, 2**17 - tokens), (own, heads - own)),), 1)], 1
        )
        for own in range(heads + 1)
        for tokens in range(0, 2**17 + 1, 2**12)
    ]
    best = min(every, key=lambda trial: trial.order)
    assert refined.trial.iteration_s < 1.05 * best.iteration_s


def test_replicas_with_unequal_shares_are_refined_together():
    job = tiny_job(seq_length=2**14, global_batch_size=3)
    fleet = find_units(job, cluster([("a", "DOUBLE", 2), ("b", "PLAIN", 2)]))
    layouts = [
        Layout((A2AGroup((0, 1), (12000, 4384), (3, 1)),), 2),
        Layout((A2AGroup((2, 3), (12000, 4384), (1, 3)),), 1),
    ]
    judge = Judge(fleet)
    trial = judge.try_out(fleet, layouts, 1)
    refined = refine(judge, trial).trial
    assert [layout.micro_batches for layout in refined.layouts] == [2, 1]
    assert refined.iteration_s < 0.9 * trial.iteration_s


# Polishing


def test_polishing_is_never_worse_and_keeps_to_its_budget():
    better = 0
    for random, fleet in random_fleets(0, 30, gpus=(2, 3, 4, 6)):
        judge = Judge(fleet)
        for trial in (
            balanced(random, fleet, judge),
            judge.try_out(fleet, random_layouts(random, fleet, 1), 2),
        ):
            before = judge.trials
            polished = polish(judge, trial, 12)
            assert polished.order <= trial.order
            assert judge.trials <= before + 12
            check_sound(polished)
            better += polished.order < trial.order
    assert better > 20


def test_polishing_finds_what_links_ask_for():
    # Two kinds of nodes of one GPU over a thin network: the slow one's keys keep the fast one waiting.
    job = tiny_job(seq_length=2**14)
    fleet = find_units(job, cluster([("a", "DOUBLE", 1), ("b", "PLAIN", 1)], bandwidth=1))
    judge = Judge(fleet)
    trial = judge.try_out(
        fleet, [Layout((A2AGroup((0,), (8192,), (4,)), A2AGroup((1,), (8192,), (4,))), 1)], 1
    )
    polished = polish(judge, trial, 60)
    every = [
        judge.try_out(
            fleet,
            [Layout((A2AGroup((0,), (size,), (4,)), A2AGroup((1,), (2**14 - size,), (4,))), 1)],
            window,
        )
        for size in range(256, 2**14, 256)
        for window in (1, 2)
    ]
    assert polished.iteration_s < 1.01 * min(trial.iteration_s for trial in every)


def test_without_a_budget_polishing_changes_nothing():
    fleet = find_units(tiny_job(), cluster([("a", "DOUBLE", 1), ("b", "PLAIN", 1)]))
    judge = Judge(fleet)
    trial = judge.try_out(fleet, [Layout((A2AGroup((0, 1), (4000, 96), (4, 0)),), 1)], 1)
    assert polish(judge, trial, 0) is trial
    assert judge.trials == 1
