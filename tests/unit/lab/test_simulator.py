"""Replayed plans: bytes, agreement with the cost model, what is idle, and where both must differ."""

import dataclasses
import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_hexi.cost import CostModel, estimate
from megatron_hexi.cost.compute import (
    device_speeds,
    keys_merge_times,
    logits_times,
    merge_times,
    own_block_times,
    rectangle_times,
    token_times,
)
from megatron_hexi.lab.simulator import compare_with_model, simulate
from megatron_hexi.lab.simulator.replay import replay_layers
from megatron_hexi.lab.simulator.unit_program import FINISH
from megatron_hexi.lab.simulator.work import layer_work
from megatron_hexi.models import Job, presets
from megatron_hexi.plan import Replica, attention_traffic, build_schedule, proportional_plan
from tests.support.costs import TINY, cluster, tiny_job
from tests.support.plans import SPARSE, TORN, examples, plans
from tests.support.replayed import sent_bytes

GB = 1e9


def replay(plan, job, known, layers=2):
    """The first stage, replayed; units on the cluster's GPUs in order."""
    timing = CostModel(job, known).timing(plan)
    section, cost = timing.sections[0], timing.stages[0]
    work = layer_work(section.arrays, job, section.placement.stage, cost.layer)
    (found,) = replay_layers([section], [cost], [None], 0, known, layers=layers)
    return found.whole, work, cost


def job_for(plan, **changes):
    """A job of any plan's shape."""
    workload = plan.workload
    model = dataclasses.replace(
        TINY,
        heads=workload.heads,
        kv_heads=workload.kv_heads,
        head_dim=workload.head_dim,
        ffn_hidden_size=2048,
    )
    replicas = len(plan.replicas)
    return tiny_job(
        **{
            "model": model,
            "seq_length": workload.seq_length,
            "tensor_parallel": workload.tensor_parallel,
            "data_parallel": replicas,
            "global_batch_size": replicas,
            **changes,
        }
    )


def nodes_for(plan, bandwidth=10, latency=5, per="gpu"):
    """Two units of the plan a node."""
    tp, units = plan.workload.tensor_parallel, plan.units
    sizes = [min(2, units - first) * tp for first in range(0, units, 2)]
    nodes = [(f"n{number}", ("PLAIN", "DOUBLE")[number % 2], size) for number, size in enumerate(sizes)]
    return cluster(nodes, bandwidth=bandwidth, latency=latency, per=per)


def check_traffic(plan, recompute):
    """What the replay delivers is what the plan's traffic counts, lap by lap, for every rank."""
    job = job_for(plan, recompute=recompute)
    found, work, cost = replay(plan, job, nodes_for(plan, per="node"))
    assert np.isfinite(found.log.arrived).all()
    inside, inside_in = (sent_bytes(found, "all_to_all", received) for received in (False, True))
    between, between_in = (sent_bytes(found, "exchange", received) for received in (False, True))
    for part in plan.replicas:
        members = part.domain.members
        for index, member in enumerate(members):
            schedule = build_schedule(plan.workload, part.domain, index, plan.exchange.parts)
            there, back = attention_traffic(schedule, plan.workload.head_dim, 1, 2)
            for number, lap in enumerate(found.laps):
                expected = back if lap.way == "backward" else there
                wanted = (
                    (0, 0) if lap.way == "logits" else (expected.all_to_all_bytes, expected.message_bytes)
                )
                assert (inside[number, member.number], between[number, member.number]) == wanted
    # Every byte that is sent is received.
    assert inside.sum() == inside_in.sum()
    assert between.sum() == between_in.sum()
    for way, direction in enumerate((cost.layer.forward, cost.layer.backward)):
        attention = work.own[way] + sum(part[way] for step in work.blocks for part in step)
        assert attention == pytest.approx(direction.attention)


@given(plans(most_replicas=3), st.sampled_from(["none", "selective", "full"]))
@examples(60)
def test_bytes_and_work_are_those_of_the_plan(plan, recompute):
    check_traffic(plan, recompute)


@pytest.mark.parametrize("plan", [TORN, SPARSE])
def test_odd_plans_too(plan):
    check_traffic(plan, "selective")


def covered(times, by):
    """Seconds of some times in which any of others runs, from one end of a time to the next."""
    ends = sorted({end for time in (*times, *by) for end in time})
    total = 0.0
    for start, end in itertools.pairwise(ends):
        middle = (start + end) / 2
        if all(any(low < middle < high for low, high in ranges) for ranges in (times, by)):
            total += end - start
    return total


@given(
    plans(most_replicas=2), st.sampled_from(["none", "selective", "full"]), st.sampled_from(["gpu", "node"])
)
@examples(40)
def test_every_second_of_every_unit_is_accounted_for(plan, recompute, per):
    job = job_for(plan, recompute=recompute)
    found, _, _ = replay(plan, job, nodes_for(plan, per=per))
    exposed, wire = found.exposed, found.wire
    for unit in range(plan.units):
        own = [piece for piece in found.log.activities if piece.unit == unit and piece.lane == "compute"]
        waits = [(wait.start, wait.end) for wait in found.log.waits if wait.unit == unit]
        times = sorted([(piece.start, piece.end) for piece in own] + waits)
        # Work and waits follow each other without a gap from the start to the unit's own end.
        assert times == [] or times[0][0] == 0
        for before, after in itertools.pairwise(times):
            assert before[1] == pytest.approx(after[0], rel=1e-12)
        # Of what it waits its own messages are under way in the exposed part, sums inside it included.
        mine = (found.program.src == unit) | (found.program.dst == unit)
        under_way = list(zip(found.log.left[mine], found.log.arrived[mine], strict=True))
        sums = [
            (wait.start, wait.end) for wait in found.log.waits if wait.unit == unit and wait.batch is None
        ]
        assert exposed[:, unit].sum() == pytest.approx(covered(waits, under_way + sums), abs=1e-12)
        whole = [(0.0, found.log.end)]
        assert wire[:, unit].sum() == pytest.approx(covered(whole, under_way), abs=1e-12)
        # All-to-alls and the exchange may be under way at once; of each there is one at a time.
        for lane in ({"compute"}, {"exchange"}, {"all_to_all"}, {"tensor_parallel"}):
            ends = sorted(
                (piece.start, piece.end)
                for piece in found.log.activities
                if piece.unit == unit and lane & {piece.lane, piece.kind}
            )
            for before, after in itertools.pairwise(ends):
                assert before[1] <= after[0] * (1 + 1e-12)


SHAPES = st.lists(st.lists(st.sampled_from([1.0, 2.0, 3.5]), min_size=1, max_size=3), min_size=1, max_size=3)
JOBS = st.fixed_dictionaries(
    {
        "recompute": st.sampled_from(["none", "selective", "full"]),
        "overlap_gradients": st.booleans(),
        "distributed_optimizer": st.booleans(),
        "seq_length": st.sampled_from([4096, 5000]),
    }
)


@given(SHAPES, JOBS, st.integers(1, 3), st.sampled_from([1, 2]), st.sampled_from([1, 3]))
@examples(40)
def test_busy_exposed_and_idle_are_the_iteration(speeds, changes, window, stages, replicas):
    job = tiny_job(**changes, pipeline_parallel=stages, data_parallel=replicas, global_batch_size=6)
    plan = proportional_plan(job.workload(), [speeds] * replicas, window)
    if replicas == 3:
        shares = zip(plan.replicas, (1, 3, 2), strict=True)
        plan = dataclasses.replace(plan, replicas=tuple(Replica(r.stages, n) for r, n in shares))
    known = cluster([("a", "PLAIN", plan.units), ("b", "DOUBLE", plan.units)][:stages])
    found, cost = simulate(plan, job, known), estimate(plan, job, known)
    assert found.phases.total == pytest.approx(found.iteration_s)
    assert found.tokens_per_s == pytest.approx(6 * job.seq_length / found.iteration_s)
    for rank, model in zip(found.ranks, cost.ranks, strict=True):
        assert (rank.rank, rank.name, rank.stage, rank.unit) == (
            model.rank,
            model.name,
            model.stage,
            model.unit,
        )
        # The work is the model's; what is left is communication and idleness.
        assert rank.busy_s == pytest.approx(model.compute_s)
        assert rank.busy_s + rank.communication_s + rank.idle_s == pytest.approx(found.iteration_s)
        assert rank.idle_share == rank.idle_s / found.iteration_s
    assert 0 <= found.idle_share < 1


def test_idle_time_is_that_of_the_replay():
    # One stage, one micro-batch, all layers replayed: what a unit waits with nothing of its own under way.
    job = tiny_job(overlap_gradients=False)
    plan = proportional_plan(job.workload(), [[[2.0, 1.0], [1.0]]])
    known = cluster([("a", "DOUBLE", 2), ("b", "PLAIN", 1)], bandwidth=2)
    found, whole = replay(plan, job, known)[0], simulate(plan, job, known)
    step = max(rank.busy["optimizer"] for rank in whole.ranks)
    finish = found.log.marks[-1, FINISH]
    for rank in whole.ranks:
        waits = sum(wait.end - wait.start for wait in found.log.waits if wait.unit == rank.unit)
        inside = waits - found.exposed[:, rank.unit].sum() + found.log.end - finish[rank.unit]
        assert rank.idle_s == pytest.approx(inside + step - rank.busy["optimizer"])
    assert max(rank.idle_s for rank in whole.ranks) > 0.05 * whole.iteration_s


def test_two_groups_of_one_by_hand():
    # Two nodes, 1 GB/s and 50 us: the network is slower than the blocks. Group 0 is the outer one: its back
    # 1024 tokens see the 2048 keys of group 1, whose 2048 see the front 1024 of group 0.
    job = tiny_job(overlap_gradients=False)
    known = cluster([("a", "PLAIN", 1), ("b", "DOUBLE", 1)], bandwidth=1, latency=50)
    plan = proportional_plan(job.workload(), [[[1.0], [1.0]]])
    units: list[dict[str, Any]] = []
    for gpu, (queries, keys) in enumerate([(1024, 2048), (2048, 1024)]):
        speeds = device_speeds(known.ranks[gpu].device, job)
        q, k, rows = (np.array([float(n)]) for n in (queries, keys, 2048))
        blocks, merge = rectangle_times(speeds, job, q, k), merge_times(speeds, job, q)
        far = [4 * float((blocks[way] + merge[way])[0]) for way in range(2)]
        far[1] += 4 * float(keys_merge_times(speeds, job, k)[0])
        token, own = token_times(speeds, job, rows), own_block_times(speeds, job, rows, True)
        logits = logits_times(speeds, job, rows)
        units.append(
            {
                "token": [float(token[way][0]) for way in range(2)],
                "own": [4 * float(own[way][0]) for way in range(2)],
                "far": far,
                "logits": float((logits.forward + logits.backward)[0]),
            }
        )
    # Keys and values of 4 heads of 128 in 16 bits: 2048 tokens one way, 1024 the other; the longer counts.
    wire = 50e-6 + 2048 * 4 * 2 * 128 * 2 / GB
    now = [0.0, 0.0]
    for way in (0, 0, None, 1, 1):
        if way is None:
            now = [t + unit["logits"] for t, unit in zip(now, units, strict=True)]
            continue
        begin = [t + unit["token"][way] for t, unit in zip(now, units, strict=True)]
        arrive = max(begin) + wire
        # Backward, two of the four heads' own block wait until after the exchange.
        first = [unit["own"][way] * (0.5 if way else 1) for unit in units]
        now = [
            max(t + before, arrive) + unit["far"][way]
            for t, before, unit in zip(begin, first, units, strict=True)
        ]
        if way:  # gradients go home when both have computed them
            home = max(now) + wire
            now = [max(t + rest, home) for t, rest in zip(now, first, strict=True)]
    found, cost = simulate(plan, job, known), estimate(plan, job, known)
    rest = cost.phases.gradients + cost.phases.optimizer
    assert found.iteration_s == pytest.approx(max(now) + rest, rel=1e-12)
    assert found.phases.exchange > 0.5 * found.iteration_s


LARGE = dataclasses.replace(presets()["gpt-7b"], layers=4)


@given(
    st.tuples(st.integers(1, 5), st.sampled_from([1, 2, 4])),
    st.sampled_from(["none", "selective", "full"]),
    st.integers(8192, 131072),
    st.sampled_from([5, 25, 100]),
    st.sampled_from([0, 10]),
    st.sampled_from([1, 2]),
    st.integers(1, 3),
    st.booleans(),
)
@examples(50)
def test_agrees_with_the_model_where_nothing_contends(
    shape, recompute, tokens, bandwidth, latency, parallel, batches, causal
):
    # Equal groups on a node each and a card a GPU: nobody shares a link but with messages of the same step.
    groups, members = shape
    job = Job(
        LARGE,
        tokens,
        recompute=recompute,
        tensor_parallel=parallel,
        global_batch_size=batches,
        overlap_gradients=False,
    )
    workload = dataclasses.replace(job.workload(), causal=causal)
    plan = proportional_plan(workload, [[[1.0] * members] * groups])
    nodes = [(f"n{number}", "PLAIN", members * parallel) for number in range(groups)]
    known = cluster(nodes, bandwidth=bandwidth, latency=latency)
    found, cost = simulate(plan, job, known), estimate(plan, job, known)
    # Not all causal groups have the same to do: what they make up for is all that differs.
    assert found.iteration_s == pytest.approx(cost.iteration_s, rel=0.02 if causal else 1e-9)
    assert found.iteration_s <= cost.iteration_s * (1 + 1e-9)


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_an_even_group_is_the_model_s_to_the_last_digit(recompute):
    job = tiny_job(recompute=recompute, global_batch_size=3)
    plan = proportional_plan(job.workload(), [[[1.0] * 4]])
    known = cluster([("a", "PLAIN", 2), ("b", "PLAIN", 2)], latency=7, per="node")
    found, cost = simulate(plan, job, known), estimate(plan, job, known)
    for name, seconds in cost.phases.by_name.items():
        assert found.phases.by_name[name] == pytest.approx(seconds, rel=1e-9, abs=1e-15)
    assert len(compare_with_model(found, cost)) == 7
    # Four transfers on a node's link, and all four of them share it.
    assert found.links[0].most_at_once == 4
