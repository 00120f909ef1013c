"""The order of passes in interleaved 1F1B: complete, Megatron's own, and never one that waits for itself."""

from __future__ import annotations

import doctest
from collections import Counter
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_hexi.mesh import (
    most_kept,
    pipeline_order,
    pipeline_runs,
    pipeline_steps,
    stage_runs,
    step_source,
)
from tests.support.plans import examples

SIZES = {"stages": st.integers(2, 6), "chunks": st.integers(2, 4), "micro_batches": st.integers(1, 14)}


def megatrons_steps(stages: int, stage: int, micro_batches: int, chunks: int) -> list[tuple[str, int, int]]:
    """Passes of a stage as Megatron's own functions order them: way, micro-batch, chunk."""
    from megatron.core.pipeline_parallel import schedules

    table = schedules.get_schedule_table(micro_batches, chunks, stages)
    total = micro_batches * chunks
    ahead = min((stages - stage - 1) * 2 + (chunks - 1) * stages, total)
    forward = [("forward", micro_batch, chunk) for micro_batch, chunk in table]
    backward = [("backward", micro_batch, chunks - 1 - chunk) for micro_batch, chunk in table]
    steady = [step for pair in zip(forward[ahead:], backward, strict=False) for step in pair]
    return [*forward[:ahead], *steady, *backward[total - ahead :]]


@examples(60)
@given(stages=st.integers(2, 6), chunks=st.integers(2, 4), groups=st.integers(1, 4))
def test_whole_groups_run_in_megatrons_order(stages, chunks, groups):
    for stage in range(stages):
        own = pipeline_steps(stages, stage, groups * stages, chunks)
        assert list(own) == megatrons_steps(stages, stage, groups * stages, chunks)


@examples(30)
@given(**SIZES)
def test_every_stage_runs_every_pass_once(stages, chunks, micro_batches):
    for stage in range(stages):
        own = pipeline_steps(stages, stage, micro_batches, chunks)
        assert len(own) == len(set(own)) == 2 * chunks * micro_batches
        for chunk in range(chunks):
            for way in ("forward", "backward"):
                taken = [step.micro_batch for step in own if (step.way, step.chunk) == (way, chunk)]
                assert taken == list(range(micro_batches))
        for step in own:
            if step.way == "backward":
                assert own.index(step._replace(way="forward")) < own.index(step)


@examples(30)
@given(**SIZES)
def test_both_ends_of_a_border_take_rows_in_one_order(stages, chunks, micro_batches):
    steps = [pipeline_steps(stages, stage, micro_batches, chunks) for stage in range(stages)]
    for stage, own in enumerate(steps):
        for way in ("forward", "backward"):
            sources = [step_source(stages, stage, step, chunks) for step in own if step.way == way]
            sent = [source for source in sources if source is not None]
            (sender,) = {number for number, _ in sent}
            assert sent == [(sender, step) for step in steps[sender] if (sender, step) in set(sent)]


def finishes(stages: int, chunks: int, micro_batches: int, case: SimpleNamespace) -> bool:
    """Whether all passes end where rows leave only for a posted receive, and senders wait for earlier ones.

    Args:
        stages: number of stages.
        chunks: number of chunks.
        micro_batches: number of micro-batches.
        case: `ahead`: whether a stage posts the next receive of a direction with this one, as without
            documents; `leaving`: number of sends that may be under way in a direction when a pass ends.
    """
    steps = [pipeline_steps(stages, stage, micro_batches, chunks) for stage in range(stages)]
    place = [0] * stages
    posted: Counter[tuple[int, int, str]] = Counter()
    sent: Counter[tuple[int, int, str]] = Counter()
    taken: Counter[tuple[int, int, str]] = Counter()
    waits: list[tuple[tuple[int, int, str], int] | None] = [None] * stages
    targets = {
        source: stage
        for stage in range(stages)
        for step in steps[stage]
        if (source := step_source(stages, stage, step, chunks)) is not None
    }
    moved = True
    while moved:
        moved = False
        for stage, own in enumerate(steps):
            while place[stage] < len(own):
                step = own[place[stage]]
                wait = waits[stage]
                if wait is None:
                    source = step_source(stages, stage, step, chunks)
                    if source is not None:
                        channel: tuple[int, int, str] = (source[0], stage, step.way)
                        posted[channel] = max(posted[channel], taken[channel] + 1)
                        if sent[channel] == taken[channel]:
                            break
                        taken[channel] += 1
                        posted[channel] = taken[channel] + case.ahead
                    target = targets.get((stage, step))
                    wait = (stage, stage, step.way), 0
                    if target is not None:
                        channel = stage, target, step.way
                        sent[channel] += 1
                        wait = channel, sent[channel] - case.leaving
                    waits[stage], moved = wait, True
                if posted[wait[0]] < wait[1]:
                    break
                waits[stage], moved = None, True
                place[stage] += 1
    return place == [len(own) for own in steps]


@examples(60)
@given(**SIZES, ahead=st.booleans(), leaving=st.integers(1, 2))
def test_no_send_waits_for_itself(stages, chunks, micro_batches, ahead, leaving):
    assert finishes(stages, chunks, micro_batches, SimpleNamespace(ahead=ahead, leaving=leaving))


def test_sends_that_are_waited_for_at_once_would_wait_for_ever():
    assert not finishes(3, 2, 6, SimpleNamespace(ahead=False, leaving=0))


@examples(60)
@given(**SIZES, in_turn=st.booleans())
def test_passes_follow_what_they_need(stages, chunks, micro_batches, in_turn):
    order = pipeline_runs(stages, micro_batches, chunks, in_turn=in_turn)
    passes = [(run.stage, step) for run, _ in order for step in run.steps]
    inputs = [place for _, needed in order for place in needed]
    assert len(passes) == len(set(passes)) == len(inputs) == 2 * stages * chunks * micro_batches
    for place, ((stage, step), needed) in enumerate(zip(passes, inputs, strict=True)):
        source = step_source(stages, stage, step, chunks)
        assert source == (None if needed is None else passes[needed])
        assert needed is None or needed < place
        if step.way == "backward":
            assert (stage, step._replace(way="forward")) in passes[:place]
    for stage in range(stages):
        own = stage_runs(stages, stage, micro_batches, chunks, in_turn=in_turn)
        assert [run for run, _ in order if run.stage == stage] == list(own)


def test_the_shown_orders():
    assert doctest.testmod(pipeline_order) == (0, 3)


@pytest.mark.parametrize(
    ("sizes", "kept"),
    [
        # The first of two stages runs two micro-batches through both chunks, and one more; then it returns a
        # chunk for each that it takes.
        ((1, 1), 5),
        ((3, 1), 3 + 3 + 1 + 1 + 3 - 1 + 3),
        ((1, 3), 1 + 1 + 3 + 3 + 1),
    ],
)
def test_layers_kept_at_a_time(sizes, kept):
    assert most_kept(2, 0, 4, sizes) == kept
    assert most_kept(2, 0, 1, sizes) == sum(sizes)
