"""Ministages: seconds are those of the longest way through all passes, bytes those of the plan's shares."""

from __future__ import annotations

import functools
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_hexi.cluster import read_cluster
from megatron_hexi.cost import CostModel, Job, Phases, read_model
from megatron_hexi.cost.ministage_pipeline import MinistagePipeline
from megatron_hexi.errors import PlanError
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
    job = Job(model=read_model("llama3-8b"), seq_length=4096, micro_batch_size=4, global_batch_size=32)

    def run(text: str):
        (tmp_path / "plan.yaml").write_text(text)
        plan = read_plan(tmp_path / "plan.yaml")
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


def test_the_simulator_refuses_ministages(estimate):
    plan, job, cluster, _ = estimate(TURNS)
    with pytest.raises(PlanError, match="has ministages, and this version cannot replay"):
        simulate(plan, job, cluster)
