"""Polishing: never worse, within its budget, and what scaling cannot find."""

from dataclasses import replace

import pytest

from megatron_hexi.planner.fleet.rates import Rates
from megatron_hexi.planner.fleet.units import find_units
from megatron_hexi.planner.layouts.layout import Layout, Part
from megatron_hexi.planner.layouts.trial import Judge
from megatron_hexi.planner.search.balance import balance
from megatron_hexi.planner.search.domain import DomainSearch
from megatron_hexi.planner.search.groupings import all_partitions, site_classes
from megatron_hexi.planner.search.guess import FirstGuess
from megatron_hexi.planner.search.polish import polish
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
    trial = judge.try_out(fleet, [Layout((Part((0,), (8192,), (4,)), Part((1,), (8192,), (4,))), 1)], 1)
    polished = polish(judge, trial, 60)
    every = [
        judge.try_out(
            fleet, [Layout((Part((0,), (size,), (4,)), Part((1,), (2**14 - size,), (4,))), 1)], window
        )
        for size in range(256, 2**14, 256)
        for window in (1, 2)
    ]
    assert polished.iteration_s < 1.01 * min(trial.iteration_s for trial in every)


def test_without_a_budget_polishing_changes_nothing():
    fleet = find_units(tiny_job(), cluster([("a", "DOUBLE", 1), ("b", "PLAIN", 1)]))
    judge = Judge(fleet)
    trial = judge.try_out(fleet, [Layout((Part((0, 1), (4000, 96), (4, 0)),), 1)], 1)
    assert polish(judge, trial, 0) is trial
    assert judge.trials == 1


# Memory


@pytest.mark.parametrize(
    ("memory", "heads", "kv_heads", "speed"), [(2.5, 4, 4, 200), (3, 8, 2, 200), (3, 8, 8, 100)]
)
def test_tokens_and_heads_under_memory_are_found_together(memory, heads, kv_heads, speed):
    # Two members, one with little memory, where one head more means fewer tokens. Scaling alone settles heads
    # at the tokens held, and tokens beside the heads held; groupings, orders and changes come near the best.
    text = (
        "name: tight\nnodes:\n- {name: a, gpu: A, gpus: 1}\n- {name: b, gpu: B, gpus: 1}\n"
        "network: {bandwidth_gb_s: 200, latency_us: 0, per: gpu}\n"
        f"devices:\n{device_text('A', 100, 100)}{device_text('B', speed, speed, memory=memory)}"
    )
    model = replace(TINY, heads=heads, kv_heads=kv_heads, head_dim=64)
    fleet = find_units(tiny_job(seq_length=2**17, model=model, recompute="full"), read_text(text))
    judge = Judge(fleet)
    found = DomainSearch(judge, fleet, 1).run()
    assert found.fits
    every = [
        judge.try_out(fleet, [Layout((Part((0, 1), (tokens, 2**17 - tokens), (own, heads - own)),), 1)], 1)
        for own in range(heads + 1)
        for tokens in range(0, 2**17 + 1, 2**12)
    ]
    best = min(every, key=lambda trial: trial.order)
    assert found.iteration_s < 1.05 * best.iteration_s
