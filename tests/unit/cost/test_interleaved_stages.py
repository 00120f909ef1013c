"""Seconds and memory of stages that differ with their ministages interleaved, and their replay."""

from __future__ import annotations

import dataclasses
import functools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_hexi.cost import CostModel, Phases
from megatron_hexi.cost.lanes import Lane
from megatron_hexi.cost.pipeline import Pipeline
from megatron_hexi.kinds import Window
from megatron_hexi.lab.simulator import simulate
from megatron_hexi.mesh import most_kept, pipeline_steps
from megatron_hexi.plan import Domain, Group, Member, Plan, Replica, Stage
from tests.support.costs import TINY, cluster, tiny_job
from tests.support.pass_graph import end_of_1f1b
from tests.support.plans import examples

DEEP = dataclasses.replace(TINY, layers=12)
SECONDS = st.floats(0.01, 3)


def longest_way(pipeline: Pipeline) -> float:
    """Seconds of the longest way through the passes, from what each of them needs, without a clock."""
    depth, count = pipeline.parts.shape
    orders = [pipeline_steps(depth, stage, pipeline.micro_batches, count) for stage in range(depth)]

    def sender(stage, step):
        place = step.chunk * depth + stage + (-1 if step.way == "forward" else 1)
        if 0 <= place < depth * count:
            return place % depth, step._replace(chunk=place // depth)
        return None

    def travel(stage, step):
        ways = np.roll(pipeline.there, 1, axis=0) if step.way == "forward" else pipeline.back
        return ways[stage][step.micro_batch]

    @functools.cache
    def begin(stage, step):
        own = orders[stage]
        place = own.index(step)
        free = end(stage, own[place - 1]) if place else 0.0
        source = sender(stage, step)
        if source is None:
            return free
        alike = [other for other in own[:place] if other.way == step.way and sender(stage, other)]
        asked = begin(stage, alike[-1]) if alike else free
        return max(free, max(end(*source), asked) + travel(stage, step))

    @functools.cache
    def end(stage, step):
        (lane,), part = pipeline.lanes[stage], pipeline.parts[stage][step.chunk]
        seconds = part * lane.forward_s
        if step.way == "backward":
            seconds = part * (lane.phases.token - lane.forward_s)
            if (stage, step.chunk) == (depth - 1, count - 1):
                seconds += lane.phases.logits
        return begin(stage, step) + seconds

    return max(end(stage, own[-1]) for stage, own in enumerate(orders))


@st.composite
def pipelines(draw):
    depth, count = draw(st.integers(2, 4)), draw(st.integers(2, 3))
    micro_batches = tuple(range(draw(st.integers(1, 9))))
    lanes = []
    for stage in range(depth):
        ahead, back = draw(SECONDS), draw(SECONDS)
        logits = draw(SECONDS) if stage == depth - 1 else 0.0
        lanes.append((Lane(micro_batches, Phases(token=ahead + back, logits=logits), ahead),))
    there, back = (
        np.array([[draw(st.floats(0, 2))] * len(micro_batches) for _ in range(depth)]) for _ in range(2)
    )
    sizes = np.array([[draw(st.integers(1, 4)) for _ in range(count)] for _ in range(depth)], dtype=float)
    return Pipeline(tuple(lanes), there, back, sizes / sizes.sum(axis=1, keepdims=True))


@examples(40)
@given(pipeline=pipelines())
def test_seconds_are_those_of_the_longest_way_and_of_the_graph(pipeline):
    expected = longest_way(pipeline)
    assert pipeline.seconds() == pytest.approx(expected)
    assert pipeline.phases.total == pytest.approx(expected)
    assert end_of_1f1b(pipeline) == pytest.approx(expected)
    depth, count = pipeline.parts.shape
    assert len(pipeline.spans()) == 2 * depth * count * pipeline.micro_batches


@examples(20)
@given(
    depth=st.integers(2, 5), count=st.integers(2, 4), groups=st.integers(1, 3), ahead=SECONDS, back=SECONDS
)
def test_equal_stages_idle_a_ministage_of_each_other_stage(depth, count, groups, ahead, back):
    lane = Lane(tuple(range(groups * depth)), Phases(token=ahead + back), ahead)
    none = np.zeros((depth, groups * depth))
    phases = Pipeline(((lane,),) * depth, none, none, np.full((depth, count), 1 / count)).phases
    # Narayanan et al., arXiv 2104.04473, section 2.2.
    assert phases.bubble / phases.token == pytest.approx((depth - 1) / (groups * depth * count))


def plan_of(job, stages, **replica):
    """Stages of one GPU each with these layers and ministages."""
    found, first = [], 0
    for number, (layers, ministages) in enumerate(stages):
        member = Member((number,), job.seq_length, (0, job.model.heads))
        domain = Domain((Group(((0, job.seq_length),), (member,)),))
        found.append(Stage((domain,), layers=(first, first + layers), ministages=ministages))
        first += layers
    workload = dataclasses.replace(job.workload(), layers=first)
    return Plan(workload, (Replica(tuple(found), **replica),))


def nodes(count, bandwidth):
    """A cluster of nodes of one GPU, with so many GB/s between them."""
    return cluster([(f"n{number}", "PLAIN", 1) for number in range(count)], bandwidth=bandwidth)


STAGES = ((5, (3, 2)), (4, 2), (3, (1, 2)))


@pytest.mark.parametrize("bandwidth", [0.5, 100.0])
@pytest.mark.parametrize("micro_batches", [2, 7])
def test_an_iteration_is_simulated_as_it_is_predicted(bandwidth, micro_batches):
    job = tiny_job(model=DEEP, global_batch_size=micro_batches)
    plan, known = plan_of(job, STAGES, order="interleaved"), nodes(3, bandwidth)
    timing = CostModel(job, known).timing(plan)
    assert simulate(plan, job, known).iteration_s == pytest.approx(timing.phases.total, rel=0.01)


def test_a_stage_keeps_the_layers_of_its_order():
    job = tiny_job(model=DEEP, global_batch_size=7)
    known = nodes(3, 100.0)
    kept, whole = (
        [
            terms["activations"][0] + terms["attention"][0]
            for terms in CostModel(job, known).timing(plan_of(job, stages, **order)).memory
        ]
        for stages, order in (
            (STAGES, {"order": "interleaved"}),
            (tuple((layers, None) for layers, _ in STAGES), {}),
        )
    )
    for stage, (sizes, in_flight) in enumerate(zip(((3, 2), (2, 2), (1, 2)), (3, 2, 1), strict=True)):
        expected = most_kept(3, stage, 7, sizes) / sum(sizes)
        assert kept[stage] / whole[stage] == pytest.approx(expected / in_flight)


def test_ministages_pay_over_fast_borders_only():
    job = tiny_job(model=DEEP, global_batch_size=6)
    for bandwidth, pays in ((1e6, True), (0.02, False)):
        known = nodes(3, bandwidth)
        seconds = [
            CostModel(job, known).timing(plan_of(job, ((4, parts),) * 3, order=order)).phases.total
            for parts, order in ((2, "interleaved"), (None, None))
        ]
        assert (seconds[0] < seconds[1]) == pays


@given(
    st.lists(st.booleans(), min_size=12, max_size=12).filter(any),
    st.sampled_from(["none", "full"]),
    st.sampled_from(["interleaved", None]),
)
@examples(20)
def test_ministages_cost_what_their_own_layers_cost(windows, recompute, order):
    job = tiny_job(model=DEEP, global_batch_size=3, recompute=recompute)
    jobs = {
        is_window: dataclasses.replace(job, model=dataclasses.replace(DEEP, window=window))
        for is_window, window in ((False, None), (True, Window(64)))
    }
    plan, known = plan_of(job, STAGES, order=order), nodes(3, 100.0)
    mixed = dataclasses.replace(job, model=dataclasses.replace(DEEP, window=Window(64, tuple(windows))))
    (pipeline,) = CostModel(mixed, known).timing(plan).pipelines
    assert (pipeline.passing is None) == (order == "interleaved")
    alone = {kind: CostModel(own, known).timing(plan).stages for kind, own in jobs.items()}
    # The layers of each stage's ministages: first all stages run 3, 2 and 1 of them, then 2 each.
    for stage, ministages in enumerate((((0, 3), (6, 8)), ((3, 5), (8, 10)), ((5, 6), (10, 12)))):
        seconds = {kind: own[stage].layer_seconds(0)[0] for kind, own in alone.items()}
        work = [sum(seconds[windows[layer]] for layer in range(*layers)) for layers in ministages]
        assert pipeline.parts[stage] == pytest.approx([own / sum(work) for own in work])
        if order == "interleaved":
            (lane,) = pipeline.lanes[stage]
            for ministage, expected in enumerate(work):
                took = sum(pipeline.pass_s(stage, lane, way, ministage) for way in ("forward", "backward"))
                assert took - lane.phases.logits * (ministage == 1) == pytest.approx(expected)
