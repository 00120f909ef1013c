"""The simulator differs from the cost model where it must, on all kinds of plans and clusters."""

import dataclasses
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_hexi.cost import estimate
from megatron_hexi.errors import ClusterError, PlanError
from megatron_hexi.lab.simulator import compare_with_model, replay, simulate
from megatron_hexi.models import Job, presets
from megatron_hexi.plan import proportional_plan
from tests.support.costs import TINY, cluster, tiny_job
from tests.support.plans import examples, plans
from tests.unit.cost.test_network import cluster_of_three
from tests.unit.lab.test_simulator import job_for, nodes_for

GB = 1e9


def compared(plan, job, known, gpus=None):
    found, cost = simulate(plan, job, known, gpus), estimate(plan, job, known, gpus)
    rows = {row.phase: row for row in compare_with_model(found, cost)}
    assert rows["iteration"].simulated_s == found.iteration_s
    assert rows["iteration"].model_s == cost.iteration_s
    parts = [row.difference_s for phase, row in rows.items() if phase != "iteration"]
    assert sum(parts) == pytest.approx(rows["iteration"].difference_s, abs=1e-12)
    return found, cost, rows


def test_transfers_that_the_model_never_lets_meet():
    # Replica 0 exchanges keys between two nodes while replica 1 has its all-to-alls there: the model counts
    # them apart, and both have half of the link.
    job = tiny_job(data_parallel=2, global_batch_size=2, overlap_gradients=False)
    plan = proportional_plan(job.workload(), [[[1.0], [1.0]], [[1.0, 1.0]]])
    known = cluster([("a", "PLAIN", 2), ("b", "PLAIN", 2)], per="node", bandwidth=5)
    found, cost, rows = compared(plan, job, known, gpus=[0, 2, 1, 3])
    assert found.iteration_s > 1.05 * cost.iteration_s
    assert rows["exchange"].difference_s > 0.5 * rows["iteration"].difference_s
    assert {"a-0 network out", "b-0 network in"} <= {
        link.name for link in found.links if link.most_at_once > 1
    }
    # With a card each there is nothing to share.
    alone, model, _ = compared(
        plan, job, cluster([("a", "PLAIN", 2), ("b", "PLAIN", 2)], bandwidth=5), [0, 2, 1, 3]
    )
    assert alone.iteration_s == pytest.approx(model.iteration_s, rel=0.02)


def test_a_link_that_is_never_full_slows_nothing():
    job = tiny_job(data_parallel=2, global_batch_size=2, overlap_gradients=False)
    plan = proportional_plan(job.workload(), [[[1.0], [1.0]], [[1.0, 1.0]]])
    levels = "levels:\n- {name: rack, groups: [[a], [b]], bandwidth_gb_s: 1000}\n"
    known = cluster([("a", "PLAIN", 2), ("b", "PLAIN", 2)], bandwidth=5, extra=levels)
    found, cost, _ = compared(plan, job, known, [0, 2, 1, 3])
    rack = next(link for link in found.links if link.name == "rack 0 out")
    assert rack.most_at_once == 2
    assert found.iteration_s == pytest.approx(cost.iteration_s, rel=0.02)


def test_transfers_that_the_model_counts_together():
    # Members of the last group are cut differently from the others, so that several serve each of them; and
    # they are not ready at the same time.
    job = tiny_job(overlap_gradients=False)
    plan = proportional_plan(job.workload(), [[[1.0], [2.0], [1.0, 4.0]]])
    known = cluster([("a", "PLAIN", 1), ("b", "PLAIN", 1), ("c", "PLAIN", 2)], bandwidth=8)
    found, cost, rows = compared(plan, job, known)
    assert found.iteration_s < 0.95 * cost.iteration_s
    assert rows["exchange"].difference_s < 0.5 * rows["iteration"].difference_s


def test_lags_are_made_up():
    job = tiny_job(overlap_gradients=False)
    known = cluster([("a", "PLAIN", 2), ("b", "PLAIN", 1)], bandwidth=32)
    found, cost, rows = compared(proportional_plan(job.workload(), [[[2.0, 1.0], [2.0]]]), job, known)
    assert found.iteration_s < 0.995 * cost.iteration_s
    assert rows["exchange"].difference_s < 0.5 * rows["iteration"].difference_s


def test_units_of_gpus_share_what_a_node_shares():
    job = tiny_job(tensor_parallel=2)
    plan = proportional_plan(job.workload(), [[[1.0], [1.0]]])
    nodes = [("a", "PLAIN", 2), ("b", "PLAIN", 2)]
    apart, shared = (simulate(plan, job, cluster(nodes, bandwidth=1, per=per)) for per in ("gpu", "node"))
    # Twice the bytes on one card instead of two.
    assert shared.phases.exchange > 1.8 * apart.phases.exchange
    assert shared.links[0].bytes == 2 * apart.links[0].bytes
    assert (shared.links[0].most_at_once, apart.links[0].most_at_once) == (2, 1)
    assert [(rank.rank, rank.unit) for rank in shared.ranks] == [(0, 0), (1, 0), (2, 1), (3, 1)]
    assert {span.rank for span in shared.spans} == {0, 2}
    assert shared.phases.tensor_parallel == pytest.approx(
        estimate(plan, job, cluster(nodes)).phases.tensor_parallel
    )


@pytest.mark.parametrize("kind", ["gpu", "node", "matrix"])
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_any_cluster(kind, recompute):
    known = cluster_of_three(kind)
    job = Job(presets()["gpt-7b"], 8192, recompute=recompute, pipeline_parallel=2, global_batch_size=4)
    plan = proportional_plan(job.workload(), [[[2.0, 1.0], [1.0]]])
    found, cost = simulate(plan, job, known), estimate(plan, job, known)
    assert found.iteration_s == pytest.approx(cost.iteration_s, rel=0.25)
    for name in ("pipeline", "optimizer"):
        assert getattr(found.phases, name) == pytest.approx(getattr(cost.phases, name))
    assert found.phases.bubble > 0
    assert {rank.stage for rank in found.ranks} == {0, 1}


@given(plans(most_replicas=2), st.sampled_from(["none", "full"]))
@examples(25)
def test_any_plan(plan, recompute):
    job = job_for(plan, recompute=recompute)
    known = nodes_for(plan, per="node")
    found, cost = simulate(plan, job, known), estimate(plan, job, known)
    # Shapes that nobody would plan differ a lot, but no work is lost.
    assert found.iteration_s >= max(rank.busy_s for rank in found.ranks) * (1 - 1e-9)
    assert 0.3 < found.iteration_s / cost.iteration_s < 3


def test_any_gpus():
    job, known = tiny_job(), cluster([("a", "PLAIN", 2), ("b", "DOUBLE", 2)])
    plan = proportional_plan(job.workload(), [[[1.0, 1.0]]])
    fast = simulate(plan, job, known, gpus=[2, 3])
    assert [(rank.gpu, rank.name) for rank in fast.ranks] == [(2, "b-0/0"), (3, "b-0/1")]
    assert fast.iteration_s < simulate(plan, job, known, gpus=[0, 1]).iteration_s
    assert simulate(dataclasses.replace(plan, gpus=(2, 3)), job, known) == fast
    with pytest.raises(ClusterError, match="4 GPUs, but the plan is for 2"):
        simulate(plan, job, known)
    with pytest.raises(PlanError, match="the plan is for 4096, but the job has 8192"):
        simulate(plan, tiny_job(seq_length=8192), known, gpus=[0, 1])


def test_a_single_gpu_is_the_model_s():
    job, known = tiny_job(global_batch_size=2), cluster([("a", "PLAIN", 1)])
    plan = proportional_plan(job.workload(), [[[1.0]]])
    found = simulate(plan, job, known)
    assert found.iteration_s == pytest.approx(estimate(plan, job, known).iteration_s)
    assert found.phases.communication == pytest.approx(0, abs=1e-15)
    assert found.links == ()
    assert found.idle_share == pytest.approx(0, abs=1e-12)


def uneven(groups, members, seed=0):
    random = Random(seed)
    return [[random.uniform(0.5, 4) for _ in range(members)] for _ in range(groups)]


def test_the_same_again():
    job = tiny_job(recompute="selective")
    plan = proportional_plan(job.workload(), [uneven(3, 2)], 2)
    known = cluster([("a", "PLAIN", 3), ("b", "DOUBLE", 3)], per="node", latency=3)
    assert simulate(plan, job, known) == simulate(plan, job, known)


def test_layers_that_are_not_replayed_go_on_like_the_last(monkeypatch):
    job = tiny_job(model=dataclasses.replace(TINY, layers=24), recompute="full")
    plan = proportional_plan(job.workload(), [[[4.0, 1.0], [2.0], [1.0, 1.0]]])
    known = cluster([("a", "PLAIN", 3), ("b", "DOUBLE", 2)], per="node", bandwidth=5)
    whole = simulate(plan, job, known)
    monkeypatch.setattr(replay, "MOST_MESSAGES", 0)
    part = simulate(plan, job, known)
    assert (whole.layers, part.layers, part.stage_layers) == (24, 3, 24)
    assert len(part.spans) < len(whole.spans) / 7
    assert part.iteration_s == pytest.approx(whole.iteration_s, rel=0.01)
    assert part.idle_share == pytest.approx(whole.idle_share, abs=0.01)
    for few, all_of_them in zip(part.ranks, whole.ranks, strict=True):
        assert few.busy == pytest.approx(all_of_them.busy)
        assert few.communication_s == pytest.approx(all_of_them.communication_s, rel=0.1)
    assert {link.name: link.bytes for link in part.links} == pytest.approx(
        {link.name: link.bytes for link in whole.links}
    )


def test_links_carry_the_bytes_of_the_iteration():
    # 4 layers, 3 micro-batches; keys 2048 x 4 heads, there twice and home once (gradients cross back).
    job = tiny_job(model=dataclasses.replace(TINY, layers=4), global_batch_size=3)
    plan = proportional_plan(job.workload(), [[[1.0], [1.0]]])
    known = cluster([("a", "PLAIN", 1), ("b", "PLAIN", 1)])
    found = simulate(plan, job, known)
    half = 1024 * 4 * 2 * 128 * 2
    sizes = {link.name: link.bytes for link in found.links}
    # Out of b: 2048 keys forward and backward, and the gradients of 1024.
    assert sizes["b-0/0 network out"] == 4 * 3 * (2 * 2 * half + half)
    assert sizes["a-0/0 network out"] == 4 * 3 * (2 * half + 2 * half)
    busiest = found.links[0]
    assert busiest.name == "a-0/0 network in" or busiest.name == "b-0/0 network out"
    assert busiest.busy_share == pytest.approx(busiest.bytes / (10 * GB) / found.iteration_s)


def test_progress_is_told():
    told = []
    job = tiny_job(pipeline_parallel=2)
    plan = proportional_plan(job.workload(), [uneven(2, 2)])
    known = cluster([("a", "PLAIN", 4), ("b", "PLAIN", 4)])
    simulate(plan, job, known, progress=lambda done, total: told.append((done, total)))
    done = [pair[0] for pair in told]
    assert done == sorted(done)
    assert len({total for _, total in told}) <= 2
    assert 10 < len(told) <= 250
    assert told[-1][0] == told[-1][1]


def test_64_ranks_that_are_all_cut_differently():
    groups = 8
    job = Job(presets()["gpt-13b"], 2**17)
    known = cluster([(f"n{number}", "PLAIN", 8) for number in range(groups)], latency=10)
    plan = proportional_plan(job.workload(), [uneven(groups, 8)])
    found = simulate(plan, job, known)
    assert len(found.ranks) == 8 * groups
