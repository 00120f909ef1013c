"""Ministages: seconds are those of the longest way through all passes, bytes those of the plan's shares."""

from __future__ import annotations

import functools
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_hexi.cluster import catalog, read_cluster
from megatron_hexi.cost import CostModel, Phases, find_shortage
from megatron_hexi.cost.lanes import Lane, Passing
from megatron_hexi.cost.memory import GIB
from megatron_hexi.cost.pipeline import Pipeline
from megatron_hexi.errors import ClusterError
from megatron_hexi.lab.simulator import simulate
from megatron_hexi.models import Job, read_model
from megatron_hexi.plan import read_plan
from megatron_hexi.plan.shares import assign_in_turn
from tests.support.pass_graph import end_in_turn
from tests.support.plans import examples

SECONDS = st.integers(1, 50).map(float)


def longest_way(
    depth, micro_batches, ministages, forward, backward, logits, there, back, takes=None, slower=None
):
    """The last end of all passes, each after the one before it in its lane and the rows that it needs.

    Rows travel once they are there and asked for: when the stage takes up the micro-batch before; where that
    or the stage that sends is dealt, when its lane is done with it.
    """
    last = depth - 1, ministages - 1
    takes = takes or [[list(range(micro_batches))]] * depth
    slower = slower or [[1.0]] * depth
    there, back = (np.reshape(way, (depth, -1)) * np.ones(micro_batches) for way in (there, back))

    def order(stage, batches):
        """What a stage does, in order: way, ministage, micro-batch."""
        numbers = range(ministages)
        ways = [("forward", number) for number in numbers]
        if stage == depth - 1:
            ways[-1] = ("turn", ministages - 1)
            numbers = numbers[:-1]
        ways += [("backward", number) for number in reversed(numbers)]
        return [(way, number, batch) for way, number in ways for batch in batches]

    orders = {
        (stage, batch): order(stage, own) for stage in range(depth) for own in takes[stage] for batch in own
    }

    def seconds(stage, way, batch):
        (lane,) = (number for number, own in enumerate(takes[stage]) if batch in own)
        plain = {"forward": forward[stage], "backward": forward[stage] + backward[stage]}
        return slower[stage][lane] * plain.get(way, forward[stage] + backward[stage] + logits)

    def fed_by(stage, way, number, batch):
        if way != "backward":
            if (stage, number) == (0, 0):
                return None
            source, turn = (stage - 1, number) if stage else (depth - 1, number - 1)
            return source, ("forward", turn, batch), there[stage - 1][batch] if depth > 1 else 0.0
        source, turn = (stage + 1, number) if stage < depth - 1 else (0, number + 1)
        kind = "turn" if (source, turn) == last else "backward"
        return source, (kind, turn, batch), back[stage][batch] if depth > 1 else 0.0

    @functools.cache
    def begin(stage, task):
        own = orders[stage, task[2]]
        place = own.index(task)
        free = end(stage, own[place - 1]) if place else 0.0
        feeder = fed_by(stage, *task)
        if feeder is None:
            return free
        ahead = place and own[place - 1][:2] == task[:2] and len(takes[stage]) == len(takes[feeder[0]]) == 1
        asked = begin(stage, own[place - 1]) if ahead else free
        return max(free, max(end(*feeder[:2]), asked) + feeder[2])

    def end(stage, task):
        return begin(stage, task) + seconds(stage, task[0], task[2])

    return max(end(stage, own[-1]) for (stage, _), own in orders.items())


def pipeline_of(depth, micro_batches, ministages, forward, backward, logits, there, back, passing=None):
    """Of ministages that are all alike in each stage; seconds of one ministage."""
    stages = []
    for stage in range(depth):
        again = ministages - (stage == depth - 1)
        total = (ministages + again) * forward[stage] + ministages * backward[stage]
        stages.append(Phases(token=total, logits=logits if stage == depth - 1 else 0.0))
    borders = [
        np.repeat((way if depth > 1 else way[:0])[:, None], micro_batches, axis=1) for way in (there, back)
    ]
    parts = np.full((depth, ministages), 1 / ministages)
    passing = passing or (Passing.nothing(ministages),) * depth
    every = tuple(range(micro_batches))
    lanes = tuple(
        (Lane(every, phases, ministages * float(ahead)),)
        for phases, ahead in zip(stages, forward, strict=True)
    )
    return Pipeline(lanes, borders[0], borders[1], parts, tuple(passing))


SIZES = {"depth": st.integers(1, 4), "micro_batches": st.integers(1, 5), "ministages": st.integers(1, 4)}


@examples(60)
@given(data=st.data(), **SIZES)
def test_seconds_are_those_of_the_longest_way(data, depth, micro_batches, ministages):
    times = [np.array(data.draw(st.lists(SECONDS, min_size=depth, max_size=depth))) for _ in range(4)]
    logits = data.draw(SECONDS)
    forward, backward, there, back = times
    terms = depth, micro_batches, ministages, forward, backward, logits, there, back
    pipeline, expected = pipeline_of(*terms), longest_way(*terms)
    assert pipeline.seconds() == pytest.approx(expected)
    assert pipeline.phases.total == pytest.approx(expected)
    assert end_in_turn(pipeline) == pytest.approx(expected)


@examples(60)
@given(data=st.data(), **SIZES)
def test_dealt_micro_batches_take_the_longest_way_through_the_lanes(data, depth, micro_batches, ministages):
    def drawn(*shape):
        count = int(np.prod(shape))
        return np.reshape(data.draw(st.lists(SECONDS, min_size=count, max_size=count)), shape)

    forward, backward, logits = drawn(depth), drawn(depth), data.draw(SECONDS)
    there, back = drawn(depth, micro_batches), drawn(depth, micro_batches)
    takes, slower = [], []
    for _ in range(depth):
        owners = data.draw(st.lists(st.integers(0, 2), min_size=micro_batches, max_size=micro_batches))
        own = ([batch for batch, owner in enumerate(owners) if owner == lane] for lane in range(3))
        takes.append([one for one in own if one])
        slower.append(drawn(len(takes[-1])).tolist())
    terms = depth, micro_batches, ministages, forward, backward, logits
    plain = pipeline_of(*terms, np.zeros(depth), np.zeros(depth))
    lanes = tuple(
        tuple(
            Lane(tuple(own), lane.phases * times, lane.forward_s * times)
            for own, times in zip(takes[stage], slower[stage], strict=True)
        )
        for stage, (lane,) in enumerate(plain.lanes)
    )
    pipeline = replace(plain, lanes=lanes, there=there[: len(plain.there)], back=back[: len(plain.back)])
    expected = longest_way(*terms, there, back, takes, slower)
    assert pipeline.seconds() == pytest.approx(expected)
    assert end_in_turn(pipeline) == pytest.approx(expected)
    assert all(span.micro_batch in takes[span.stage][span.lane] for span in pipeline.spans())


@examples(60)
@given(data=st.data(), **SIZES)
def test_transfers_take_as_long_event_by_event(data, depth, micro_batches, ministages):
    def drawn(count, most=50):
        return np.array(data.draw(st.lists(st.integers(0, most).map(float), min_size=count, max_size=count)))

    passing = [
        replace(
            Passing.nothing(ministages),
            gathers=drawn(ministages),
            sums=drawn(ministages),
            copies_in=drawn(ministages),
            copies_out=drawn(ministages),
            rows=float(drawn(1)[0]),
        )
        for _ in range(depth)
    ]
    forward, backward = drawn(depth) + 1, drawn(depth) + 1
    pipeline = pipeline_of(
        depth, micro_batches, ministages, forward, backward, 1.0, drawn(depth), drawn(depth), passing
    )
    assert end_in_turn(pipeline) == pytest.approx(pipeline.seconds())
    assert pipeline.phases.total == pytest.approx(pipeline.seconds())


def test_weights_come_behind_one_ministage_and_gradients_leave_behind_the_next():
    """One stage, three ministages, two micro-batches: forward 2 s, backward 3 s each, copies of 0.5 s."""
    one = np.ones(3)
    passing = Passing(4.5 * one, 0 * one, 0.5 * one, 0 * one)
    times = (1, 2, 3, np.array([2.0]), np.array([3.0]), 0.0, np.zeros(1), np.zeros(1), [passing])
    pipeline = pipeline_of(*times)
    # Weights 5 s, of which the next ministage's copy runs beside a gather: those of the second are there at
    # 9.5 s, and those of the third 4.5 s later; backward passes of 10 s hide all of them.
    assert pipeline.seconds() == pytest.approx(5 + (4 + 0.5) + (4 + 0.5) + 10 + 10 + 10)
    waits = pipeline.phases
    assert waits.offload == pytest.approx(0.5)
    assert waits.gradients == pytest.approx(4.5 + 0.5 + 0.5)
    late = replace(pipeline, passing=(Passing(0 * one, np.array([7.0, 1, 1]), 0 * one, 0 * one),))
    assert late.seconds() == pytest.approx(
        4 + 4 + 10 + 10 + 10 + 7
    )  # nothing hides the first one's gradients
    rows = replace(pipeline, passing=(replace(Passing.nothing(3), rows=6.0),))
    # Rows that entered the second ministage go out behind it and the third one, 6 s a micro-batch. They come
    # back when its backward pass begins, and with its first micro-batch; the first ministage has tokens.
    assert rows.seconds() == pytest.approx(4 + 4 + 10 + (6 + 6 + 5) + 10)


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

JOB = Job(model=read_model("llama3-8b"), seq_length=4096, micro_batch_size=4, global_batch_size=32)


@pytest.fixture
def estimate(tmp_path: Path):
    (tmp_path / "cluster.yaml").write_text(CLUSTER)
    cluster = read_cluster(tmp_path / "cluster.yaml")

    def run(text: str, data_parallel: int = 1, **terms):
        (tmp_path / "plan.yaml").write_text(text)
        plan = read_plan(tmp_path / "plan.yaml")
        job = replace(JOB, data_parallel=data_parallel, **terms)
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
    turns, offloaded = (estimate(text)[-1] for text in (TURNS, OFFLOADED))
    before, after = (one.ranks[1].memory for one in (turns, offloaded))
    host = offloaded.ranks[1].host_memory
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


def test_frozen_weights_stay_on_the_device_and_adapters_alone_travel(estimate):
    whole, turns, offloaded = (estimate(text, lora_rank=16)[-1] for text in (STAGE, TURNS, OFFLOADED))
    for one in (turns, offloaded):
        assert one.ranks[1].memory.weights == pytest.approx(whole.ranks[1].memory.weights)
        assert one.ranks[1].host_memory.weights == 0
    assert offloaded.ranks[1].host_memory.gradients > offloaded.ranks[1].memory.optimizer == 0
    sent, trained = (one.phases.pipeline + one.phases.gradients for one in (turns, estimate(TURNS)[-1]))
    assert sent < 0.1 * trained


def test_a_domain_has_work_and_rows_of_the_micro_batches_that_it_takes(estimate):
    counts = 4, 2, 1, 1
    text = TURNS
    for rank, count in enumerate(counts):
        text = text.replace(f"ranks: [{rank}], samples: 1", f"ranks: [{rank}], micro_batches: {count}")
    *_, turns = estimate(TURNS)
    plan, job, cluster, dealt = estimate(text)
    rows = 4 * 4096 * 4096 * 2
    first, *others = dealt.ranks
    one = first.memory.activations - 31 * 4 * rows
    for rank, count in zip(dealt.ranks, counts, strict=True):
        assert rank.memory.activations == pytest.approx(one + 31 * count * rows)
        assert rank.token_s == pytest.approx(count / 4 * first.token_s)
    # Four whole ones are twice as much work as a quarter of each of eight, and their products are larger.
    assert 0.96 < first.token_s / turns.ranks[0].token_s / 2 < 1
    assert dealt.phases.token == pytest.approx(first.token_s)
    assert min(rank.idle_s for rank in others) > first.token_s / 2 * 0.9
    simulation = simulate(plan, job, cluster)
    assert simulation.iteration_s == pytest.approx(dealt.iteration_s, rel=0.002)
    busy = {
        lane: sum(span.end_s - span.start_s for span in simulation.pipeline[0] if span.lane == lane)
        for lane in range(4)
    }
    assert [busy[lane] / busy[3] for lane in range(4)] == pytest.approx(counts)


def test_each_micro_batch_crosses_between_those_that_take_it(estimate, tmp_path):
    """Two GPUs of one node feed one there and one behind the network."""
    text = (
        STAGE.partition("  stages:")[0]
        + """\
  stages:
  - {layers: [0, 16], ministages: 1, domains: [{ranks: [0], micro_batches: 8}]}
  - layers: [16, 32]
    ministages: 1
    domains: [{ranks: [1], micro_batches: 6}, {ranks: [2], micro_batches: 2}]
"""
    )
    (tmp_path / "split.yaml").write_text(text)
    near = CLUSTER.replace("gpus: 4}", "gpus: 2}, {name: far, gpu: H100-SXM-80GB, gpus: 1}")
    (tmp_path / "far.yaml").write_text(near)
    timing = CostModel(JOB, read_cluster(tmp_path / "far.yaml")).timing(read_plan(tmp_path / "split.yaml"))
    (pipeline,) = timing.pipelines
    far = assign_in_turn([6, 2])[1]
    rows = 4 * 4096 * 4096 * 2
    times = pipeline.there[0]
    assert times[list(far)] == pytest.approx(rows / 5e9, rel=0.01)
    assert max(np.delete(times, far)) < 0.2 * rows / 5e9


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


def test_the_simulator_replays_ministages(estimate):
    plan, job, cluster, cost = estimate(TURNS)
    simulation = simulate(plan, job, cluster)
    assert simulation.iteration_s == pytest.approx(cost.iteration_s, rel=0.002)
    assert simulation.phases.total == pytest.approx(simulation.iteration_s)
    steps = [span for span in simulation.pipeline[0] if span.way == "backward"]
    assert len(steps) == 32 * 8


def test_a_step_on_the_host_is_as_fast_as_its_memory_and_the_way_there(estimate):
    *_, whole = estimate(STAGE)
    *_, offloaded = estimate(STAGE.replace("layers: [0, 32]", "layers: [0, 32]\n    offload: [optimizer]"))
    host = catalog()["H100-SXM-80GB"].host
    assert host is not None
    owned = whole.ranks[0].memory.optimizer / 12
    # 4 bytes of gradient there and 2 of weight back; 46 bytes of host memory read and written.
    least = owned * (6 / (host.bandwidth_gb_s * 1e9) + 46 / (host.memory_gb_s * 1e9))
    on_gpu = owned * 46 / (3350e9 * 0.9)  # the same bytes
    assert offloaded.phases.optimizer - whole.phases.optimizer == pytest.approx(least - on_gpu, rel=0.01)
    assert offloaded.ranks[0].memory.optimizer == 0


def test_a_node_whose_memory_is_too_small_is_named(estimate, tmp_path):
    plan, job, *_ = estimate(OFFLOADED)
    small = CLUSTER.replace("gpus: 4}", "gpus: 4, host: {usable_gib: 100}}")
    (tmp_path / "small.yaml").write_text(small)
    cost = CostModel(job, read_cluster(tmp_path / "small.yaml")).estimate(plan)
    (load,) = cost.host_loads
    assert load.needed_gib == pytest.approx(4 * cost.ranks[0].host_memory.total / GIB)
    assert not cost.fits
    shortage = str(find_shortage(cost))
    assert shortage.startswith(
        f"node node-0 would keep {load.needed_gib:.1f} GiB in host memory and has 100.0"
    )


def test_offload_where_nothing_is_known_of_the_host_is_refused(estimate):
    plan, job, cluster, _ = estimate(OFFLOADED)
    device = replace(cluster.ranks[0].device, host=None)
    unknown = replace(cluster, ranks=tuple(replace(rank, device=device) for rank in cluster.ranks))
    with pytest.raises(
        ClusterError, match="node-0: the plan offloads, but the host memory beside H100-SXM-80GB"
    ):
        CostModel(job, unknown).estimate(plan)
