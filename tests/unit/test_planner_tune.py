"""Small random changes of layouts: never worse, sound, and what no rule by kinds of groups finds."""

from dataclasses import replace
from pathlib import Path

import pytest

from megatron_hexi.cluster import read_cluster
from megatron_hexi.cost import Job, read_model
from megatron_hexi.planner import find_plan
from megatron_hexi.planner.budget import THOROUGH
from megatron_hexi.planner.fleet.rates import Rates
from megatron_hexi.planner.fleet.units import find_units
from megatron_hexi.planner.layouts.layout import Layout, Part
from megatron_hexi.planner.layouts.orders import alternating, facing, other_orders
from megatron_hexi.planner.layouts.trial import Judge
from megatron_hexi.planner.search.domain import DomainSearch
from megatron_hexi.planner.search.guess import FirstGuess
from megatron_hexi.planner.search.polish import polish
from megatron_hexi.planner.tuning.improve import improve
from megatron_hexi.planner.tuning.tune import Effort, tune
from tests.support.costs import cluster, tiny_job
from tests.support.fleets import random_fleets, random_layouts


def _effort(trials, patience=10**6):
    return Effort(trials, patience, steps=(0.005, 0.02, 0.06, 0.2, 0.5), series=0)


@pytest.mark.parametrize("replicas", [1, 2])
def test_tuning_is_never_worse_keeps_to_its_budget_and_deals_everything_once(replicas):
    better = number = 0
    for random, fleet in random_fleets(0, 30 * replicas, gpus=(3, 6, 8)):
        together = fleet.job.global_batch_size // fleet.job.micro_batch_size
        if len(fleet.units) < 3 * replicas or together < replicas:
            continue
        judge = Judge(fleet)
        trial = judge.try_out(fleet, random_layouts(random, fleet, replicas), 2)
        before = judge.trials
        tuned = tune(judge, trial, _effort(40))
        assert tuned.order <= trial.order
        assert judge.trials <= before + 40
        better, number = better + (tuned.order < trial.order), number + 1
        for old, new in zip(trial.layouts, tuned.layouts, strict=True):
            assert sum(part.total for part in new.parts) == fleet.job.seq_length
            assert all(sum(part.heads) == fleet.job.workload().local_heads for part in new.parts)
            assert all(count >= 0 for part in new.parts for count in (*part.tokens, *part.heads))
            assert (old.units, old.micro_batches) == (new.units, new.micro_batches)
        assert tune(judge, trial, _effort(40)).plan == tuned.plan
    assert better > number / 2 > 4, (better, number)


def test_without_a_budget_nothing_changes():
    fleet = find_units(tiny_job(), cluster([("a", "DOUBLE", 1), ("b", "PLAIN", 1)]))
    judge = Judge(fleet)
    trial = judge.try_out(fleet, [Layout((Part((0, 1), (4000, 96), (4, 0)),), 1)], 1)
    assert tune(judge, trial, _effort(0)) is trial


def test_replicas_that_are_alike_stay_alike():
    job = tiny_job(seq_length=2**13, global_batch_size=2, data_parallel=2)
    fleet = find_units(job, cluster([("a", "PLAIN", 4)], bandwidth=2))
    layouts = [Layout((Part((first, first + 1), (8000, 192), (3, 1)),), 1) for first in (0, 2)]
    judge = Judge(fleet)
    trial = judge.try_out(fleet, layouts, 1)
    tuned = tune(judge, trial, _effort(100))
    one, other = ([(part.tokens, part.heads) for part in layout.parts] for layout in tuned.layouts)
    assert one == other
    assert tuned.iteration_s < 0.8 * trial.iteration_s


def test_groups_of_one_kind_get_different_shares_where_keys_are_waited_for():
    # Polishing changes groups that are alike together; six of them want six different shares.
    nodes = [(name, "PLAIN", 2) for name in "abcdef"]
    fleet = find_units(tiny_job(seq_length=2**15), cluster(nodes, bandwidth=2))
    judge = Judge(fleet)
    layout = FirstGuess(fleet, Rates(fleet)).layout(fleet.sites, 1)
    polished = polish(judge, judge.try_out(fleet, [layout], 2), 60)
    tuned = tune(judge, polished, _effort(300))
    assert len({part.total for part in tuned.layouts[0].parts}) > 1
    assert tuned.iteration_s < 0.98 * polished.iteration_s


def test_who_is_outside_is_found_where_it_matters():
    # 28 units of two H100 or A100: three groups over several nodes, the mixed one at an end of the three.
    known = read_cluster(Path("benchmarks/simulation/clusters/flops-1-mixed.yaml"))
    fleet = find_units(Job(read_model("gpt-13b"), 2**17, tensor_parallel=2, recompute="selective"), known)
    judge = Judge(fleet)
    grouping = (tuple(range(10)), tuple(range(10, 20)), tuple(range(20, 28)))
    layout = FirstGuess(fleet, Rates(fleet)).layout(grouping, 8)
    mixed_inside = facing(fleet, alternating(fleet, layout.parts))
    first, *others = (
        judge.try_out(fleet, [replace(layout, parts=parts)], 2).iteration_s
        for parts in (mixed_inside, *other_orders(mixed_inside))
    )
    assert min(others) < 0.9 * first


@pytest.mark.slow  # a minute and more; of the thorough proof
def test_a_longer_look_finds_a_better_plan_and_a_closer_proof():
    # Eight H100 and four A100: groups that only random changes come by.
    known = read_cluster(Path("benchmarks/simulation/clusters/testbed-12.yaml"))
    job = Job(read_model("gpt-7b"), 2**15, recompute="full")
    short, found = (find_plan(job, known, thorough=asked) for asked in (False, True))
    assert found.cost.iteration_s < 0.99 * short.cost.iteration_s
    assert short.trials < found.trials / 4
    assert short.bound.iteration_s < found.bound.iteration_s <= found.cost.iteration_s


def test_an_improved_plan_is_as_good_or_better_and_the_same_again():
    for _, fleet in random_fleets(0, 4, gpus=(6, 8)):
        one = replace(fleet, job=replace(fleet.job, data_parallel=1))
        together = one.job.global_batch_size // one.job.micro_batch_size
        found = []
        for _ in range(2):
            judge = Judge(one)
            best = DomainSearch(judge, one, together).run()
            found.append(improve(judge, one, best, (), 0.5 * best.iteration_s, THOROUGH))
            assert found[-1].order <= best.order
        assert found[0].plan == found[1].plan


def test_patience_ends_it_and_longer_efforts_are_no_worse():
    fleet = find_units(
        tiny_job(seq_length=2**15), cluster([(name, "PLAIN", 2) for name in "abc"], bandwidth=2)
    )
    layout = FirstGuess(fleet, Rates(fleet)).layout(fleet.sites, 1)
    spent, taken = [], []
    for patience in (5, 50, 10**6):
        judge = Judge(fleet)
        trial = judge.try_out(fleet, [layout], 2)
        taken.append(tune(judge, trial, _effort(400, patience)).iteration_s)
        spent.append(judge.trials - 1)
    assert spent[0] < spent[1] < spent[2] == 400
    assert taken[0] >= taken[1] >= taken[2]


def test_tokens_follow_where_groups_change_places(monkeypatch):
    # As many layouts are timed either way: whether tokens are moved before a change is judged decides.
    fleet = find_units(
        tiny_job(seq_length=2**18), cluster([("a", "DOUBLE", 2), ("b", "PLAIN", 2)], bandwidth=50)
    )
    layout = FirstGuess(fleet, Rates(fleet)).layout(((0, 2), (1,), (3,)), 1)
    judge = Judge(fleet)
    trial = judge.try_out(fleet, [layout], 2)
    taken = []
    for levellings in (0, 2):
        monkeypatch.setattr("megatron_hexi.planner.tuning.tune._LEVELLINGS", levellings)
        taken.append([tune(judge, trial, replace(_effort(60), series=s)).iteration_s for s in range(4)])
    assert sum(taken[1]) < 0.9985 * sum(taken[0])
