"""What cannot have other rows in every batch is refused by name."""

from __future__ import annotations

from argparse import Namespace
from dataclasses import replace

import pytest

from megatron_hexi.cluster import read_cluster
from megatron_hexi.cost import unit_rates
from megatron_hexi.errors import HexiError, PlanError
from megatron_hexi.megatron.plan_arguments import check_batch_shares
from megatron_hexi.models import Job, read_model
from megatron_hexi.plan import Domain, Replica, Stage, UnitRates, proportional_plan, validate_plan
from tests.unit.replan.test_arguments import STAGES, TWO

RATES = UnitRates((1e-6, 2e-6), (1e-9, 2e-9), (8, 8))
RATED = replace(TWO, rates=RATES)


def arguments(**given: object) -> Namespace:
    defaults = {"hexi_plan": "plan.yaml", "hexi_batch_shares": True, "hexi_replan_interval": None}
    return Namespace(**(defaults | {"dataloader_inter_document_masking": True, "sft": False} | given))


def test_documents_under_a_plan_with_rates_pass():
    check_batch_shares(arguments(), RATED)
    check_batch_shares(arguments(), replace(STAGES, rates=RATES))
    check_batch_shares(arguments(hexi_batch_shares=False), TWO)


@pytest.mark.parametrize(
    ("given", "plan", "message"),
    [
        ({"dataloader_inter_document_masking": False}, RATED, "add --dataloader-inter-document-masking"),
        ({}, TWO, "make a plan with hexi plan --batch-shares"),
        ({"hexi_replan_interval": 10}, RATED, "does not work with --hexi-replan-interval"),
        (
            {"hybrid_layer_pattern": "M*"},
            RATED,
            "does not work with --hybrid-layer-pattern of layers M: they have the plan's heads",
        ),
        (
            {"experimental_attention_variant": "gated_delta_net"},
            RATED,
            "does not work with --experimental-attention-variant of layers G: they have the plan's heads",
        ),
    ],
)
def test_a_job_that_cannot_have_them_is_refused(given, plan, message):
    with pytest.raises(HexiError, match=message):
        check_batch_shares(arguments(**given), plan)


def test_rates_have_a_figure_for_each_unit():
    with pytest.raises(PlanError, match=r"rates.room has 1 figures, the plan 2 members; give one each"):
        validate_plan(replace(TWO, rates=replace(RATES, room=(8,))))


def test_rates_are_those_of_the_gpus_that_the_plan_names():
    """A100 are slower than H100 at both; what a plan already holds there is room for."""
    cluster = read_cluster("examples/clusters/mixed-16.yaml")  # eight H100, then eight A100
    job = Job(read_model("gpt-7b"), seq_length=65536, recompute="full")
    plan = proportional_plan(job.workload(), [[[2.0] * 2, [1.0] * 2]])
    rates = unit_rates(replace(plan, gpus=(0, 1, 8, 9)), job, cluster)
    for seconds in (rates.row_s, rates.pair_s):
        assert seconds[0] == seconds[1] < seconds[2] == seconds[3]
        assert 2 < seconds[2] / seconds[0] < 4
    # One layer of 4096 x 12 x 4096 weights, four passes of 2 FLOPs, with the vocabulary's share
    assert 1.6e-6 < rates.row_s[0] < 4e-6
    # Five and a half passes of two products of 2 x 4096 FLOPs a pair
    assert 4.5 * 4 * 4096 / 1e15 < rates.pair_s[0] < 4.5 * 4 * 4096 / 3e14
    assert all(room > 16384 for room in rates.room)


def test_each_stage_has_rates_of_its_own():
    """A stage of H100 before one of A100; the last computes logits, and layers do not count in seconds."""
    cluster = read_cluster("examples/clusters/mixed-16.yaml")
    job = Job(read_model("gpt-7b"), seq_length=32768, recompute="full", global_batch_size=2)
    plan = proportional_plan(job.workload(), [[[1.0] * 2, [1.0] * 2]])
    (replica,) = plan.replicas
    second = tuple(
        replace(group, members=tuple(replace(one, ranks=(4 + one.lead,)) for one in group.members))
        for group in replica.domain.groups
    )
    stages = (
        Stage(replica.stages[0].domains, layers=(0, 20)),
        Stage((Domain(second),), layers=(20, 32)),
    )
    staged = replace(plan, replicas=(Replica(stages, micro_batches=2),), gpus=(*range(4), *range(8, 12)))
    rates = unit_rates(staged, job, cluster)
    validate_plan(replace(staged, rates=rates))
    for seconds in (rates.row_s, rates.pair_s):
        assert len(set(seconds[:4])) == len(set(seconds[4:])) == 1
        assert 2 < seconds[4] / seconds[0] < 4
    assert all(room > 8192 for room in rates.room)
    # A repeated stage: A100 before H100 on the same units is as slow as A100 alone, and holds no more.
    halves = replace(job, pipeline_parallel=2)
    repeated = unit_rates(replace(plan, gpus=(*range(8, 12), *range(4))), halves, cluster)
    slow = unit_rates(replace(plan, gpus=(*range(8, 12), *range(12, 16))), halves, cluster)
    assert repeated.pair_s == slow.pair_s
    assert repeated.room == slow.room
