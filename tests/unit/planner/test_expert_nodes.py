"""Plans let rows of experts travel once to each node where that is faster, and only there."""

import dataclasses

import pytest

from megatron_hexi.cost import estimate
from megatron_hexi.kinds import Experts
from megatron_hexi.plan import validate_plan
from megatron_hexi.planner import find_plan
from megatron_hexi.planner.request import Request
from tests.support.costs import cluster, tiny_job
from tests.unit.planner.test_experts import MODEL

#: Expert domains of all eight GPUs, of eight experts a token.
MANY = dataclasses.replace(MODEL, experts=Experts(32, 8, 512, layers=(False, True, True)))
NODES = [(f"n{number}", "PLAIN", 2) for number in range(4)]


def planned(model, bandwidth, latency):
    request = Request(
        tiny_job(model=model, seq_length=16384, global_batch_size=8, pipeline_parallel=1),
        frozenset({"pipeline_parallel"}),
        expert_parallel=8,
    )
    fleet = cluster(NODES, bandwidth, latency)
    found = find_plan(request, fleet)
    validate_plan(found.plan)
    return found, fleet


def without_nodes(plan):
    replicas = (
        dataclasses.replace(
            one, stages=tuple(dataclasses.replace(stage, expert_nodes=None) for stage in one.stages)
        )
        for one in plan.replicas
    )
    return dataclasses.replace(plan, replicas=tuple(replicas))


def test_rows_travel_once_to_nodes_where_the_network_is_slow():
    found, fleet = planned(MANY, 2, 10)
    nodes = [stage.expert_nodes for stage in found.plan.replicas[0].stages]
    assert nodes == [((0, 1), (2, 3), (4, 5), (6, 7))]
    direct = estimate(without_nodes(found.plan), found.job, fleet).iteration_s
    assert estimate(found.plan, found.job, fleet).iteration_s < 0.9 * direct
    assert found.cost.iteration_s == pytest.approx(estimate(found.plan, found.job, fleet).iteration_s)


def test_a_token_of_two_experts_goes_straight_to_them_over_links_of_much_latency():
    two = dataclasses.replace(MODEL, experts=Experts(32, 2, 512, layers=(False, True, True)))
    found, _ = planned(two, 50, 5000)
    assert all(stage.expert_nodes is None for stage in found.plan.replicas[0].stages)
