"""Whole iterations: closed forms of even plans, TP units, pipelines, replicas; what must never get worse."""

import dataclasses
import re

import numpy as np
import pytest

from megatron_hexi.cost import CostModel, estimate
from megatron_hexi.cost.compute import (
    device_speeds,
    keys_merge_times,
    logits_times,
    merge_times,
    optimizer_seconds,
    own_block_times,
    rectangle_times,
    token_times,
)
from megatron_hexi.errors import ClusterError, PlanError
from megatron_hexi.plan import Replica, proportional_plan
from tests.support.costs import TINY, cluster, stage_params, tiny_job

GB = 1e9
FAST = 1e6  # GB/s: a network that takes no time


def at(value):
    return np.array([value], dtype=float)


def both(times):
    return float(times.forward[0] + times.backward[0])


def even(groups, members):
    return [[1.0] * members] * groups


def speeds_of(known, job):
    return device_speeds(known.ranks[0].device, job)


def test_one_gpu_is_the_sum_of_its_work():
    job, known = tiny_job(global_batch_size=3), cluster([("a", "PLAIN", 1)])
    cost = estimate(proportional_plan(job.workload(), [even(1, 1)]), job, known)
    speeds = speeds_of(known, job)
    token, logits = token_times(speeds, job, at(4096)), logits_times(speeds, job, at(4096))
    own = own_block_times(speeds, job, at(4096), True)
    params = stage_params(job, 0)
    step = optimizer_seconds(speeds, job, params, params)
    expected = 3 * (2 * (both(token) + 4 * both(own)) + both(logits)) + step
    assert cost.iteration_s == pytest.approx(expected)
    assert cost.tokens_per_s == pytest.approx(3 * 4096 / expected)
    assert cost.phases.communication == 0
    assert cost.idle_share == pytest.approx(0, abs=1e-12)


def test_an_even_group_is_its_closed_form():
    # Four GPUs of a node, 100 GB/s each way: all-to-alls of 3/4 of the shard, all compute a quarter.
    job, known = tiny_job(), cluster([("a", "PLAIN", 4)])
    cost = estimate(proportional_plan(job.workload(), [even(1, 4)]), job, known)
    speeds = speeds_of(known, job)
    token, logits = token_times(speeds, job, at(1024)), logits_times(speeds, job, at(1024))
    own = own_block_times(speeds, job, at(4096), True)
    # 1024 tokens x 3 other heads: query, key, value; the output back; and the same in the other direction.
    moves = 2 * 1024 * 3 * 128 * 2 * (3 + 1) / (100 * GB)
    params = stage_params(job, 0)
    layer = [float(token[way][0] + own[way][0]) + moves / 2 for way in range(2)]
    # The last layer's gradients, and the first one's weights, are not hidden.
    ring = [3 / 4 * params * size / (100 * GB) for size in (4, 2)]
    wire = moves / 2
    exposed = max(ring[0] / 2, ring[0] - 2 * (layer[1] - wire)) + max(
        ring[1] / 2, ring[1] - 2 * (layer[0] - wire)
    )
    step = optimizer_seconds(speeds, job, params, params / 4)
    expected = 2 * sum(layer) + both(logits) + exposed + step
    assert cost.iteration_s == pytest.approx(expected)
    assert cost.phases.all_to_all == pytest.approx(2 * moves)
    assert cost.phases.exchange == 0
    assert cost.phases.gradients == pytest.approx(exposed)
    assert cost.idle_share == pytest.approx(0, abs=1e-9)


def test_an_even_ring_on_a_fast_network_is_its_compute():
    job, known = tiny_job(), cluster([("a", "PLAIN", 1), ("b", "PLAIN", 1)], bandwidth=FAST)
    cost = estimate(proportional_plan(job.workload(), [even(2, 1)]), job, known)
    speeds = speeds_of(known, job)
    token, own = token_times(speeds, job, at(2048)), own_block_times(speeds, job, at(2048), True)
    # The outer group: its back 1024 see all 2048 keys of the inner one; the inner one: 2048 see 1024.
    blocks = rectangle_times(speeds, job, at(1024), at(2048))
    assert blocks.forward == rectangle_times(speeds, job, at(2048), at(1024)).forward
    merges = [merge_times(speeds, job, at(q)) for q in (1024, 2048)]
    keys = [keys_merge_times(speeds, job, at(k)) for k in (2048, 1024)]
    forward = [float(4 * (own.forward + blocks.forward + merge.forward)[0]) for merge in merges]
    backward = [
        float(4 * (own.backward + blocks.backward + merge.backward + key)[0])
        for merge, key in zip(merges, keys, strict=True)
    ]
    attention = [2 * (there + back) for there, back in zip(forward, backward, strict=True)]
    assert [rank.attention_s for rank in cost.ranks] == pytest.approx(attention)
    # Each pass waits for its slower group; the network still takes a little.
    work = 2 * (both(token) + max(forward) + max(backward)) + cost.phases.logits
    assert work < cost.iteration_s - cost.phases.optimizer < work * 1.001


@pytest.mark.parametrize("kv_heads", [4, 2, 1])
def test_between_two_groups_half_of_the_own_block_hides_the_gradients(kv_heads):
    job = tiny_job(model=dataclasses.replace(TINY, kv_heads=kv_heads))
    known = cluster([("a", "PLAIN", 1), ("b", "PLAIN", 1)], bandwidth=200)
    # The longest message: 2048 tokens' keys and values of all KV heads.
    transfer = 2048 * kv_heads * 2 * 128 * 2 / (200 * GB)
    own = own_block_times(speeds_of(known, job), job, at(2048), True)
    assert transfer < 4 * own.forward < 2 * own.backward
    cost = estimate(proportional_plan(job.workload(), [even(2, 1)]), job, known)
    assert cost.phases.exchange == pytest.approx(0, abs=1e-12)


def test_ranks_times_add_up():
    job = tiny_job(global_batch_size=4, recompute="selective")
    known = cluster([("a", "DOUBLE", 2), ("b", "PLAIN", 3)])
    plan = proportional_plan(job.workload(), [[[2, 2], [1, 1, 1]]])
    cost = estimate(plan, job, known)
    assert cost.phases.total == pytest.approx(cost.iteration_s)
    for rank in cost.ranks:
        assert rank.compute_s + rank.communication_s + rank.idle_s == pytest.approx(cost.iteration_s)
    assert [rank.name for rank in cost.ranks] == ["a-0/0", "a-0/1", "b-0/0", "b-0/1", "b-0/2"]
    assert cost.ceiling_tokens_per_s > cost.tokens_per_s
    assert {pace.phase for pace in cost.paces} == {"token", "attention", "logits", "optimizer"}


def test_recomputation_costs_a_forward_pass():
    known = cluster([("a", "PLAIN", 2)], bandwidth=FAST)

    def phases(recompute):
        job = tiny_job(recompute=recompute, overlap_gradients=False)
        return estimate(proportional_plan(job.workload(), [even(1, 2)]), job, known).phases

    none, selective, full = map(phases, ("none", "selective", "full"))
    # Attention: 1 + 2.5 times the forward pass, or once more.
    assert selective.attention == full.attention == pytest.approx(none.attention * 4.5 / 3.5)
    assert selective.token == none.token < full.token
    assert selective.all_to_all == full.all_to_all == pytest.approx(1.5 * none.all_to_all)


def test_tensor_parallel_units():
    # Two units of two GPUs: half the heads and half the matrices on each, sums inside a unit besides.
    job = tiny_job(tensor_parallel=2)
    known = cluster([("a", "PLAIN", 2), ("b", "PLAIN", 2)])
    plan = proportional_plan(job.workload(), [even(1, 2)])
    cost = estimate(plan, job, known)
    assert [(rank.rank, rank.unit, rank.name) for rank in cost.ranks] == [
        (0, 0, "a-0/0"),
        (1, 0, "a-0/1"),
        (2, 1, "b-0/0"),
        (3, 1, "b-0/1"),
    ]
    # Two sums a layer and direction, one for the logits; rings of two at 100 GB/s.
    once = 2 * 1 / 2 * 2048 * 512 * 2 / (100 * GB)
    assert cost.phases.tensor_parallel == pytest.approx(once * (2 * 2 * 2 + 1))
    own = own_block_times(speeds_of(known, job), job, at(4096), True)
    assert cost.phases.attention == pytest.approx(2 * both(own))
    # Each GPU sends its own head to its counterpart over its own card: 2048 tokens x 1 head, 4 of them.
    assert cost.phases.all_to_all == pytest.approx(2 * 2 * 2048 * 128 * 2 * 4 / (10 * GB))
    shared = estimate(plan, job, cluster([("a", "PLAIN", 2), ("b", "PLAIN", 2)], per="node"))
    assert shared.phases.all_to_all == pytest.approx(2 * cost.phases.all_to_all)


@pytest.mark.parametrize("slow", [2, 3])
def test_a_unit_waits_for_its_slowest_gpu_whichever_it_is(slow):
    known = cluster([("a", "PLAIN", 2), ("b", "PLAIN", 2)])
    job = tiny_job(tensor_parallel=2, global_batch_size=4)
    plan = proportional_plan(job.workload(), [[[1.0], [1.0]]])
    seconds = estimate(plan, job, known.at_speeds({slow: 0.5})).iteration_s
    assert seconds == pytest.approx(estimate(plan, job, known.at_speeds({2: 0.5, 3: 0.5})).iteration_s)
    assert seconds > 1.2 * estimate(plan, job, known).iteration_s


def test_a_unit_on_two_nodes_is_refused():
    job = tiny_job(tensor_parallel=2)
    plan = proportional_plan(job.workload(), [even(1, 2)])
    said = "a tensor-parallel unit of 2 has ranks [0, 1], which span two nodes (a-0/0 to b-0/0)"
    with pytest.raises(ClusterError, match=re.escape(said)):
        estimate(plan, job, cluster([("a", "PLAIN", 1), ("b", "PLAIN", 3)]))


def test_pipelines_fill_and_drain():
    known = cluster([("a", "PLAIN", 1), ("b", "DOUBLE", 1)], bandwidth=FAST)
    job = tiny_job(pipeline_parallel=2, global_batch_size=8)
    plan = proportional_plan(job.workload(), [even(1, 1)])
    cost = estimate(plan, job, known)
    slow, fast = (rank.token_s + rank.attention_s + rank.logits_s for rank in cost.ranks)
    sends = 2 * 4096 * 512 * 2 / (FAST * GB)
    assert cost.phases.bubble == pytest.approx(fast / 8)
    assert cost.iteration_s == pytest.approx(slow + 8 * sends + fast / 8 + cost.phases.optimizer)
    assert [(rank.stage, rank.unit) for rank in cost.ranks] == [(0, 0), (1, 0)]


def test_replicas_run_beside_each_other():
    known = cluster([("a", "PLAIN", 2), ("b", "PLAIN", 2)], bandwidth=FAST)
    one = tiny_job(global_batch_size=4, overlap_gradients=False)
    two = dataclasses.replace(one, data_parallel=2)
    plan = proportional_plan(two.workload(), [even(1, 2), even(1, 2)])
    half = proportional_plan(one.workload(), [even(1, 2)])
    both = estimate(plan, two, known)
    alone = estimate(half, one, known, gpus=[0, 1])
    assert both.phases.attention == pytest.approx(alone.phases.attention / 2)
    uneven = dataclasses.replace(
        plan, replicas=tuple(Replica(r.stages, n) for r, n in zip(plan.replicas, (3, 1), strict=True))
    )
    assert estimate(uneven, two, known).phases.attention == pytest.approx(alone.phases.attention * 3 / 4)


def test_any_gpus_of_the_cluster_may_be_chosen():
    job, known = tiny_job(), cluster([("a", "PLAIN", 2), ("b", "DOUBLE", 2)])
    plan = proportional_plan(job.workload(), [even(1, 2)])
    model = CostModel(job, known)
    fast = model.estimate(plan, gpus=[2, 3])
    assert [rank.name for rank in fast.ranks] == ["b-0/0", "b-0/1"]
    assert fast.iteration_s < model.estimate(plan, gpus=[0, 1]).iteration_s
    with pytest.raises(ClusterError, match="GPU b-0/1 is given twice"):
        model.estimate(plan, gpus=[3, 3])
    with pytest.raises(ClusterError, match="has no GPU 9; give 0 to 3"):
        model.estimate(plan, gpus=[0, 9])


def test_jobs_and_clusters_that_differ_are_refused():
    job, known = tiny_job(), cluster([("a", "PLAIN", 2)])
    plan = proportional_plan(job.workload(), [even(1, 2)])
    with pytest.raises(ClusterError, match="has 3 GPUs, but the plan is for 2"):
        estimate(plan, job, cluster([("a", "PLAIN", 3)]))
    with pytest.raises(PlanError, match=r"workload.seq_length: the plan is for 4096, but the job has 8192"):
        estimate(plan, tiny_job(seq_length=8192), known)
    with pytest.raises(PlanError, match=r"the plan has 1, the job --data-parallel-size 2"):
        estimate(plan, tiny_job(data_parallel=2), known)
    three = dataclasses.replace(plan, replicas=(Replica(plan.replicas[0].stages, 3),))
    with pytest.raises(PlanError, match=r"replicas take 3 micro-batches of 1, .* the global batch has 1"):
        estimate(three, job, known)
    both = proportional_plan(job.workload(), [even(1, 1), even(1, 1)])
    with pytest.raises(PlanError, match="2 replicas cannot share 3 micro-batches"):
        estimate(both, tiny_job(data_parallel=2, global_batch_size=3), known)
