"""Small changes of a domain: never worse, within a budget, and what scaling cannot find."""

from megatron_hexi.planner.fleet.rates import Rates
from megatron_hexi.planner.fleet.units import find_units
from megatron_hexi.planner.layouts.layout import A2AGroup, Layout
from megatron_hexi.planner.layouts.trial import Judge
from megatron_hexi.planner.search.balance import balance
from megatron_hexi.planner.search.groupings import all_partitions, site_classes
from megatron_hexi.planner.search.guess import FirstGuess
from megatron_hexi.planner.search.polish import polish
from tests.support.costs import cluster, tiny_job
from tests.support.fleets import random_fleets, random_layouts


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
