"""Chunks of a stage, chosen by the cost model where borders are fast, and as the user says."""

from __future__ import annotations

import dataclasses

import pytest

from megatron_hexi.cluster import PlannerRules
from megatron_hexi.cost import CostModel
from megatron_hexi.errors import HexiError
from megatron_hexi.models import presets
from megatron_hexi.planner import Request, find_plan
from tests.support.costs import TINY, cluster, tiny_job

STAGES = 4
DEEP = dataclasses.replace(TINY, layers=16, vocab_size=128)
JOB = tiny_job(model=DEEP, seq_length=16384, global_batch_size=8, pipeline_parallel=STAGES)
FIXED = frozenset({"pipeline_parallel", "data_parallel", "recompute"})


def nodes(bandwidth):
    """Return a cluster with a node of one GPU for each stage, and so many GB/s between nodes."""
    return cluster([(f"n{number}", "PLAIN", 1) for number in range(STAGES)], bandwidth=bandwidth)


def planned(bandwidth, **terms):
    """Return the simplest plan; chunks of equal stages are simpler than ministages, and as fast."""
    request = Request(JOB, FIXED, **terms)
    return find_plan(request, nodes(bandwidth), with_baselines=True, simpler_within=0.01)


@pytest.fixture(scope="module")
def fast():
    return planned(100)


def test_chunks_are_chosen_where_they_are_fastest(fast):
    assert fast.plan.is_repeated
    seconds = {}
    for chunks in (1, 2, 4):
        job = dataclasses.replace(fast.job, virtual_stages=chunks)
        seconds[chunks] = CostModel(job, nodes(100)).timing(fast.plan).phases.total
    assert fast.job.virtual_stages == min(seconds, key=lambda chunks: seconds[chunks]) > 1
    assert fast.cost.iteration_s == pytest.approx(min(seconds.values()))
    assert fast.bound.iteration_s <= fast.cost.iteration_s


def test_megatrons_flags_are_compared_with_and_without_chunks(fast):
    alone = planned(100, virtual_stages=1)
    (best,), (plain,) = ([one for one in found.baselines if one.name == "usp"] for found in (fast, alone))
    assert f"{fast.job.virtual_stages} chunks a stage" in best.layout
    assert "chunks" not in plain.layout
    assert best.tokens_per_s > plain.tokens_per_s
    assert fast.cost.tokens_per_s >= best.tokens_per_s * (1 - 1e-9)
    assert alone.job.virtual_stages == 1
    assert alone.cost.iteration_s > fast.cost.iteration_s
    assert alone.bound.iteration_s >= fast.bound.iteration_s


def test_thin_borders_have_whole_stages():
    assert planned(0.1).job.virtual_stages == 1


def test_a_number_that_the_user_gives_stays():
    found = planned(0.1, virtual_stages=2)
    assert found.job.virtual_stages == 2
    assert found.plan.is_repeated
    assert (
        next(one for one in found.baselines if one.name == "uneven-layers").why_not
        == "stages have equal chunks"
    )


@pytest.mark.parametrize(
    ("job", "terms", "message"),
    [
        (JOB, {"virtual_stages": 3}, "16 layers cannot be cut into 4 stages of 3 equal chunks"),
        (JOB, {"virtual_stages": 0}, "--num-virtual-stages-per-pipeline-rank 0: give a number above 0"),
        (
            JOB,
            {"virtual_stages": 2, "rules": PlannerRules(unequal_stages=True)},
            "--num-virtual-stages-per-pipeline-rank 2 and --unequal-stages: only equal stages have chunks",
        ),
        (
            tiny_job(model=presets()["mixtral-8x7b"]),
            {"virtual_stages": 2},
            "stages of models with experts have layers of their own",
        ),
    ],
)
def test_chunks_that_no_plan_has(job, terms, message):
    with pytest.raises(HexiError, match=message):
        find_plan(Request(job, FIXED, **terms), nodes(100))
