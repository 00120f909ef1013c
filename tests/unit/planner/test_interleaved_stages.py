"""Interleaved ministages of stages that differ, which the planner proposes where the cost model says so."""

from __future__ import annotations

import dataclasses
import functools

import pytest

from megatron_hexi.cluster import PlannerRules
from megatron_hexi.cost import CostModel
from megatron_hexi.cost.memory import GIB
from megatron_hexi.plan import Replica, Stage, read_plan, validate_plan, write_plan
from megatron_hexi.planner import Request, find_plan
from megatron_hexi.planner.features import features_of
from megatron_hexi.planner.joint import Candidate
from megatron_hexi.planner.moves import Climb, MemoryMoves
from tests.support.costs import TINY, cluster, tiny_job
from tests.support.stage_plans import job_plan
from tests.unit.benchmarks.test_proof import one_group

DEEP = dataclasses.replace(TINY, layers=12, vocab_size=128)
JOB = tiny_job(model=DEEP, seq_length=16384, global_batch_size=5, pipeline_parallel=2)
STAGES = frozenset({"pipeline_parallel", "data_parallel"})


def nodes(bandwidth):
    """Return a cluster of GPU a, twice as fast as b, and b, with so many GB/s between them."""
    return cluster([("a", "DOUBLE", 1), ("b", "PLAIN", 1)], bandwidth=bandwidth)


def planned(bandwidth, **terms):
    return find_plan(Request(JOB, STAGES, **terms), nodes(bandwidth))


@pytest.fixture(scope="module")
def fast():
    return planned(100)


def test_ministages_are_interleaved_where_that_is_fastest(fast, tmp_path):
    (replica,) = fast.plan.replicas
    assert replica.is_interleaved
    write_plan(fast.plan, tmp_path / "plan.yaml")
    plan = read_plan(tmp_path / "plan.yaml")
    validate_plan(plan)
    model = CostModel(fast.job, nodes(100))
    took = model.timing(plan).phases.total
    assert took == pytest.approx(fast.cost.iteration_s)
    fewest = min(stage.layers[1] - stage.layers[0] for stage in replica.stages)
    for count in range(2, fewest + 1):
        other = in_ministages(plan, count, "interleaved")
        assert took <= model.timing(other).phases.total * (1 + 1e-9)
    assert fast.bound.iteration_s <= took


def in_ministages(plan, count, order):
    """The plan with so many ministages in each stage of its only replica, in this order."""
    (replica,) = plan.replicas
    stages = tuple(dataclasses.replace(stage, ministages=count) for stage in replica.stages)
    return dataclasses.replace(plan, replicas=(dataclasses.replace(replica, stages=stages, order=order),))


@pytest.mark.parametrize(
    "terms",
    [
        {"virtual_stages": 1},
        {"rules": PlannerRules(ministages=False)},
        {"rules": PlannerRules(unequal_stages=False)},
    ],
    ids=["no-chunks", "no-ministages", "no-unequal-stages"],
)
def test_what_a_request_rules_out_is_not_proposed(terms, fast):
    found = planned(100, **terms)
    assert not any(replica.order for replica in found.plan.replicas)
    assert found.cost.iteration_s > fast.cost.iteration_s


def test_a_note_says_what_it_gains(fast):
    (note, *_) = fast.notes
    whole = planned(100, rules=PlannerRules(ministages=False)).cost.iteration_s
    gain = whole / fast.cost.iteration_s - 1
    count = fast.plan.replicas[0].ministages
    assert note == (
        f"stages run in {count} interleaved ministages: without that the best layout takes {gain:.1%} longer "
        "(plan with --no-ministages)"
    )
    assert features_of(fast.plan) == ("ministages", "unequal_stages")


def test_thin_borders_have_whole_stages():
    assert all(replica.ministages is None for replica in planned(0.1).plan.replicas)


def test_a_stage_that_no_longer_fits_computes_its_layers_again():
    job = dataclasses.replace(JOB, pipeline_parallel=1, global_batch_size=2)
    stages = tuple(
        Stage((one_group([((rank,), job.seq_length)], job.model.heads),), layers=layers)
        for rank, layers in enumerate([(0, 8), (8, 12)])  # the second waits for the first
    )
    plan = job_plan(job.workload(), [Replica(stages, 2)], 1)

    def machines(memory=""):
        return cluster([("a", "PLAIN", 1), ("b", f"DOUBLE{memory}", 1)], bandwidth=100)

    needed = CostModel(job, machines()).timing(plan).needed[1].max() / GIB
    # The second has no room for the activations that interleaving keeps besides.
    known = machines(f", memory_gb: {needed * 80 / 64 * 1.0001}")
    start = Candidate(plan, job, CostModel(job, known).timing(plan))

    def climbed(request):
        model = functools.partial(CostModel, cluster=known)
        return Climb([MemoryMoves(request, known)], model).best(start, 50)

    best = climbed(Request(job))
    assert best.fits
    assert best.iteration_s < 0.9 * start.iteration_s
    (replica,) = best.plan.replicas
    assert replica.is_interleaved
    assert [stage.recompute for stage in replica.stages] == ["none", ("mlp",)]
    for mode in ("none", 1):
        only = Request(dataclasses.replace(job, recompute=mode), frozenset({"recompute"}))
        assert climbed(only) is start
