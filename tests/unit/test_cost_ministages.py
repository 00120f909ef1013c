"""Ministages: seconds are those of the longest way through all passes, bytes those of the plan's shares."""

from __future__ import annotations

import functools
import itertools
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_hexi.cluster import read_cluster
from megatron_hexi.cost import CostModel, Job, Phases, read_model
from megatron_hexi.cost.ministage_pipeline import MinistagePipeline
from megatron_hexi.errors import PlanError
from megatron_hexi.mesh import sweeps
from megatron_hexi.plan import read_plan
from megatron_hexi.simulator import simulate
from tests.support.plans import examples

SECONDS = st.integers(1, 50).map(float)


def longest_way(depth, micro_batches, ministages, forward, backward, logits, there, back):
    """The last end of all passes, each after the one before it in its stage and the one that feeds it."""
    last = depth - 1, ministages - 1

    def order(stage):
        """What a stage does, in order: way, ministage, micro-batch."""
        numbers, batches = range(ministages), range(micro_batches)
        ways = [("forward", number) for number in numbers]
        if stage == depth - 1:
            ways[-1] = ("turn", ministages - 1)
            numbers = numbers[:-1]
        ways += [("backward", number) for number in reversed(numbers)]
        return [(way, number, batch) for way, number in ways for batch in batches]

    orders = [order(stage) for stage in range(depth)]

    def seconds(stage, way):
        plain = {"forward": forward[stage], "backward": forward[stage] + backward[stage]}
        return plain.get(way, forward[stage] + backward[stage] + logits)

    def fed_by(stage, way, number, batch):
        if way != "backward":
            if (stage, number) == (0, 0):
                return None
            source, turn = (stage - 1, number) if stage else (depth - 1, number - 1)
            return source, ("forward", turn, batch), there[stage - 1] if depth > 1 else 0.0
        source, turn = (stage + 1, number) if stage < depth - 1 else (0, number + 1)
        kind = "turn" if (source, turn) == last else "backward"
        return source, (kind, turn, batch), back[stage] if depth > 1 else 0.0

    @functools.cache
    def end(stage, task):
        place = orders[stage].index(task)
        begin = end(stage, orders[stage][place - 1]) if place else 0.0
        feeder = fed_by(stage, *task)
        if feeder is not None:
            begin = max(begin, end(*feeder[:2]) + feeder[2])
        return begin + seconds(stage, task[0])

    return max(end(stage, orders[stage][-1]) for stage in range(depth))


@examples(60)
@given(data=st.data(), depth=st.integers(1, 4), micro_batches=st.integers(1, 5), ministages=st.integers(1, 4))
def test_seconds_are_those_of_the_longest_way(data, depth, micro_batches, ministages):
    forward, backward = (np.array(data.draw(st.lists(SECONDS, min_size=depth, max_size=depth))) for _ in "fb")
    there, back = (np.array(data.draw(st.lists(SECONDS, min_size=depth, max_size=depth))) for _ in "tb")
    logits = data.draw(SECONDS)
    stages = []
    for stage in range(depth):
        again = ministages - (stage == depth - 1)
        total = (ministages + again) * forward[stage] + ministages * backward[stage]
        stages.append(Phases(token=total, logits=logits if stage == depth - 1 else 0.0))
    borders = [way if depth > 1 else way[:0] for way in (there, back)]
    pipeline = MinistagePipeline(
        tuple(stages), borders[0], borders[1], micro_batches, ministages, ministages * forward
    )
    expected = longest_way(depth, micro_batches, ministages, forward, backward, logits, there, back)
    assert pipeline.seconds() == pytest.approx(expected)
    assert pipeline.phases.total == pytest.approx(expected)


CLUSTER = """\
name: four
nodes: [{name: node, gpu: H100-SXM-80GB, gpus: 4}]
network: {bandwidth_gb_s: 5, latency_us: 10, per: node}
"""
STAGE = """\
version: 2
workload: {seq_length: 4096, heads: 32, kv_heads: 8, head_dim: 128, layers: 32}
job: {micro_batch_size: 4, global_batch_size: 32}
replicas:
- micro_batches: 8
  stages:
  - layers: [0, 32]
    domains:
    - {ranks: [0], samples: 1}
    - {ranks: [1], samples: 1}
    - {ranks: [2], samples: 1}
    - {ranks: [3], samples: 1}
"""
TURNS = STAGE.replace("layers: [0, 32]", "layers: [0, 32]\n    ministages: 32")


@pytest.fixture
def estimate(tmp_path: Path):
    (tmp_path / "cluster.yaml").write_text(CLUSTER)
    cluster = read_cluster(tmp_path / "cluster.yaml")
    one = Job(model=read_model("llama3-8b"), seq_length=4096, micro_batch_size=4, global_batch_size=32)

    def run(text: str, data_parallel: int = 1):
        (tmp_path / "plan.yaml").write_text(text)
        plan = read_plan(tmp_path / "plan.yaml")
        job = replace(one, data_parallel=data_parallel)
        return plan, job, cluster, CostModel(job, cluster).estimate(plan)

    return run


def test_ministages_take_less_memory_and_more_time(estimate):
    *_, whole = estimate(STAGE)
    *_, turns = estimate(TURNS)
    memory = whole.ranks[0].memory, turns.ranks[0].memory
    # Shares of weights and gradients: a quarter of all layers, and of vocabulary matrices, and what passes.
    assert memory[1].weights < 0.5 * memory[0].weights
    assert memory[1].gradients < 0.5 * memory[0].gradients
    assert memory[1].optimizer == memory[0].optimizer
    # 32 layers of one micro-batch, against one layer and the rows of 31 borders of 8 micro-batches.
    rows = 4096 * 4096 * 2
    assert memory[1].activations == pytest.approx(memory[0].activations / 32 + 31 * 8 * rows)
    ratio = turns.phases.token / whole.phases.token
    assert ratio == pytest.approx(4 / 3, rel=0.02)  # one forward pass more of all but the last ministage


OFFLOADED = TURNS.replace(
    "ministages: 32", "ministages: 32\n    offload: [parameters, optimizer, activations]"
)


def test_what_is_offloaded_leaves_the_device_for_the_host(estimate):
    *_, turns = estimate(TURNS)
    *_, offloaded = estimate(OFFLOADED)
    (before, after), host = (
        (one.ranks[1].memory for one in (turns, offloaded)),
        offloaded.ranks[1].host_memory,
    )
    assert turns.ranks[1].host_memory.total == 0
    # Shares of weights, gradients and all of the state.
    assert before.weights - after.weights == pytest.approx(host.weights)
    assert before.gradients - after.gradients == pytest.approx(host.gradients)
    assert after.optimizer == 0
    assert host.optimizer == before.optimizer
    assert host.optimizer == pytest.approx(6 * host.weights)  # bf16: 12 bytes a weight beside 2
    rows = 4096 * 4096 * 2
    assert host.activations == 31 * 8 * rows
    assert before.activations - after.activations == pytest.approx((31 * 8 - 2) * rows)
    assert after.total < 0.4 * before.total


def test_what_replicas_hold_in_common_waits_whole_on_the_host(estimate):
    replicas = """\
- micro_batches: {count}
  stages:
  - layers: [0, 32]
    ministages: 32
    offload: [parameters, optimizer]
    domains: [{{ranks: [{first}], samples: 2}}, {{ranks: [{second}], samples: 2}}]
"""
    head, _, _ = OFFLOADED.partition("- micro")
    both = "".join(replicas.format(count=4, first=first, second=first + 1) for first in (0, 2))
    *_, whole = estimate(head + both, data_parallel=2)
    host = whole.ranks[0].host_memory
    assert host.weights == pytest.approx(host.gradients / 2)  # all of them, and not shares
    assert host.optimizer == pytest.approx(6 * host.weights / 4, rel=0.01)  # of which it steps a quarter


@pytest.mark.parametrize("gives_loss", [False, True])
@pytest.mark.parametrize("ministages", [1, 2, 3])
def test_sweeps_have_what_they_need_and_what_comes_and_goes(ministages, gives_loss):
    found = sweeps(ministages, gives_loss)
    numbers = range(ministages)
    assert [one.ministage for one in found if not one.is_backward] == list(numbers)[
        : -1 if gives_loss else None
    ]
    assert [one.ministage for one in found if one.is_backward] == list(reversed(numbers))
    for before, after in itertools.pairwise(found):
        assert set(before.weights) == {before.ministage, after.ministage}
        assert after.ministage in after.weights
        if after.is_backward:
            assert set(after.gradients) == {after.ministage, before.ministage} if before.is_backward else True
    assert found[-1].weights == (0,)
    assert [one.ministage for one in sweeps(ministages, gives_loss, forward_only=True)] == list(numbers)


def test_the_simulator_refuses_ministages(estimate):
    plan, job, cluster, _ = estimate(TURNS)
    with pytest.raises(PlanError, match="has ministages, and this version cannot replay"):
        simulate(plan, job, cluster)
