"""Chunks of a stage: begin and end of passes beside Megatron's interleaved schedule, event by event."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_hexi.cost import CostModel, Phases
from megatron_hexi.cost.model_part import ModelPart
from megatron_hexi.cost.once import exposed_seconds
from megatron_hexi.errors import HexiError, PlanError
from megatron_hexi.lab.simulator import simulate
from megatron_hexi.mesh import passes_ahead
from megatron_hexi.plan import JobTerms, proportional_plan, validate_plan
from tests.support.costs import TINY, cluster, tiny_job
from tests.support.interleaved import interleaved_end
from tests.support.pipelines import pipeline_of
from tests.support.plans import examples

FAST = 1e6  # GB/s: a network that takes no time
DEEP = dataclasses.replace(TINY, layers=8)


@st.composite
def pipelines(draw, sends=0.0, logits=0.0, uneven=0.0):
    """A pipeline with chunks, with the seconds that Megatron's schedule takes for it.

    Args:
        draw: hypothesis's.
        sends: the longest of a send, in forward passes of a chunk.
        logits: the longest of output matrix and loss, likewise.
        uneven: by which part a stage may be faster or slower than the others.
    """
    stages, chunks = draw(st.integers(2, 6)), draw(st.integers(2, 5))
    micro_batches = stages * draw(st.integers(1, 5))
    send = draw(st.floats(0, 1)) * sends
    last = draw(st.floats(0, 1)) * logits
    ratio = draw(st.floats(1.5, 3))
    speeds = [1 + uneven * draw(st.floats(-1, 1)) for _ in range(stages)]
    ahead = [[speed] * chunks for speed in speeds]
    back = [[ratio * speed] * chunks for speed in speeds]
    waits = [send * (chunks - (stage == stages - 1)) for stage in range(stages)]
    phases = tuple(
        Phases(
            token=sum(ahead[stage]) + sum(back[stage]),
            pipeline=waits[stage],
            logits=last * (stage == stages - 1),
        )
        for stage in range(stages)
    )
    forward = [sum(own) + wait for own, wait in zip(ahead, waits, strict=True)]
    ahead[-1][-1] += last / 3
    back[-1][-1] += 2 * last / 3
    one = pipeline_of(phases, forward, [0.0] * stages, [send] * stages, micro_batches, chunks)
    end, kept = interleaved_end(ahead, back, [send] * stages, micro_batches)
    return one, kept, one.phases.total / end


@given(pipelines())
@examples(60)
def test_equal_stages_idle_a_chunk_of_each_other_stage(found):
    one, kept, ratio = found
    assert ratio == pytest.approx(1)
    (stages, chunks), phases = one.parts.shape, one.phases
    # Narayanan et al., arXiv 2104.04473, section 2.2.
    assert phases.bubble / phases.token == pytest.approx((stages - 1) / (one.micro_batches * chunks))
    passes = one.micro_batches * chunks
    assert kept[0] == min(passes, 2 * (stages - 1) + (chunks - 1) * stages + 1)
    assert kept == [min(passes, passes_ahead(stages, stage, chunks) + 1) for stage in range(stages)]


@given(pipelines(sends=0.1, logits=3.0))
@examples(60)
def test_thin_sends_and_the_logits_of_the_last_chunk(found):
    _, _, ratio = found
    assert ratio == pytest.approx(1, rel=0.01)


@given(pipelines(sends=3.0))
@examples(60)
def test_long_sends(found):
    _, _, ratio = found
    assert ratio == pytest.approx(1, rel=0.06)


@given(pipelines(sends=0.3, uneven=0.3))
@examples(60)
def test_stages_of_other_speeds(found):
    _, _, ratio = found
    assert ratio == pytest.approx(1, rel=0.1)


@given(pipelines())
@examples(30)
def test_every_pass_follows_what_it_needs(found):
    one, *_ = found
    stages, chunks = one.parts.shape
    spans = one.spans()
    at = {(span.way, span.stage, span.micro_batch, span.chunk): span for span in spans}
    assert len(at) == len(spans) == 2 * stages * chunks * one.micro_batches
    for (way, stage, number, chunk), span in at.items():
        place = chunk * stages + stage + (-1 if way == "forward" else 1)
        if 0 <= place < chunks * stages:
            needed = at[way, place % stages, number, place // stages]
            assert needed.end_s <= span.start_s + 1e-9
        elif way == "backward":
            assert at["forward", stage, number, chunk].end_s <= span.start_s + 1e-9
    for stage in range(stages):
        own = sorted((span for span in spans if span.stage == stage), key=lambda span: span.start_s)
        assert all(a.end_s <= b.start_s + 1e-9 for a, b in itertools.pairwise(own))


def nodes(count, bandwidth):
    """A cluster of nodes of one GPU, with so many GB/s between them."""
    return cluster([(f"n{number}", "PLAIN", 1) for number in range(count)], bandwidth=bandwidth)


def interleaved(**changes):
    """A job of four stages with two chunks, its plan, and a cluster of as many GPUs."""
    terms = {"pipeline_parallel": 4, "virtual_stages": 2, "global_batch_size": 8, "model": DEEP}
    job = tiny_job(**(terms | changes))
    plan = proportional_plan(job.workload(), [[[1.0]]])
    known = nodes(job.pipeline_parallel, FAST)
    return job, plan, known


def test_an_iteration_with_chunks_idles_less_and_keeps_more():
    job, plan, known = interleaved()
    plain = dataclasses.replace(job, virtual_stages=1)
    chunks, whole = (CostModel(one, known).timing(plan) for one in (job, plain))
    assert chunks.phases.bubble == pytest.approx(whole.phases.bubble / 2, rel=1e-3)
    assert chunks.phases.token == whole.phases.token
    # 2 x 3 + 4 + 1 passes of a half of the layers; the last stage 4 + 1.
    kept = [timing.memory[0]["activations"][0] for timing in (chunks, whole)]
    assert kept[0] / kept[1] == pytest.approx(5.5 / 4)
    last = [timing.memory[3]["activations"][0] for timing in (chunks, whole)]
    assert last[0] / last[1] == pytest.approx(2.5)
    assert simulate(plan, job, known).iteration_s == pytest.approx(chunks.phases.total, rel=0.01)


def test_chunks_send_more_often_over_thin_borders():
    job, plan, known = interleaved(global_batch_size=64)
    thin = nodes(4, 0.5)
    seconds = [
        [
            CostModel(dataclasses.replace(job, virtual_stages=chunks), on).timing(plan).phases.total
            for chunks in (1, 2)
        ]
        for on in (known, thin)
    ]
    assert seconds[0][1] < seconds[0][0]
    timing = CostModel(job, thin).timing(plan)
    sends = [stage.pipeline_s for stage in timing.stages]
    once = CostModel(dataclasses.replace(job, virtual_stages=1), thin).timing(plan).stages[0].pipeline_s / 2
    assert sends == pytest.approx([2 * once] * 3 + [once])


def test_layers_of_chunks_are_those_of_the_model():
    job = tiny_job(model=DEEP, pipeline_parallel=2, virtual_stages=2, recompute=1)
    part = ModelPart.of_job(job, 1)
    assert (part.layers, part.again, part.ranges, part.chunks) == (4, 2, ((2, 4), (6, 8)), 2)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"pipeline_parallel": 1}, "--num-virtual-stages-per-pipeline-rank 2: .* there is one; give 1"),
        (
            {"virtual_stages": 3},
            "8 layers cannot be cut into 4 stages of 3 equal chunks; give a divisor of 2",
        ),
        ({"virtual_stages": 0}, "--num-virtual-stages-per-pipeline-rank 0: write a whole number above 0"),
    ],
)
def test_chunks_that_a_job_cannot_have(changes, message):
    with pytest.raises(HexiError, match=message):
        interleaved(**changes)


def test_micro_batches_that_chunks_cannot_take():
    job, plan, known = interleaved(global_batch_size=6)
    with pytest.raises(PlanError, match=r"a replica takes 6 micro-batches, .* a multiple of 4"):
        CostModel(job, known).timing(plan)


@pytest.mark.parametrize(
    ("terms", "message"),
    [
        ({"pipeline_parallel": 1}, r"job\.virtual_stages is 2: .* there is one; give 1"),
        ({"pipeline_parallel": 3}, r"job\.virtual_stages is 2: 8 layers cannot be cut into 3 stages of 2"),
        (
            {"pipeline_parallel": 4, "micro_batch_size": 1, "global_batch_size": 6},
            r"job\.virtual_stages is 2: a replica takes 6 micro-batches, .* a multiple of 4",
        ),
    ],
)
def test_chunks_that_a_plan_cannot_have(terms, message):
    _, plan, _ = interleaved()
    with pytest.raises(PlanError, match=message):
        validate_plan(dataclasses.replace(plan, job=JobTerms(virtual_stages=2, **terms)))
    validate_plan(dataclasses.replace(plan, job=JobTerms(virtual_stages=1, **terms)))


@given(st.integers(1, 6), st.integers(1, 4), st.integers(2, 5), st.floats(0.01, 100))
def test_gradients_of_a_chunk_travel_behind_the_chunks_after_it(chunks, each, depth, seconds):
    # One wire takes layers in the order in which their last micro-batch has passed: the groups of the last
    # micro-batches run chunk after chunk. A layer's pass leaves it free for a second.
    layers = chunks * each
    wire = 0.0
    for chunk in range(chunks):
        last = (depth * (chunk + 1) - 1) * each  # seconds until the chunk's last micro-batch
        for layer in range(each):
            wire = max(wire, last + layer + 1) + seconds / layers
    shown = wire - depth * layers
    found = exposed_seconds([(seconds, "backward")], layers, lambda way: 1.0, chunks, depth)
    assert found - 1e-9 <= shown <= found + 1 + 1e-9  # of one layer the model hides all
