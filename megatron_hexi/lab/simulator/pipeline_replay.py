"""Replay of a replica's micro-batches through its stages, step by step in the order of 1F1B.

A stage runs its steps one after the other. Rows over a border leave when they are computed, when those before
them have arrived, and when the other side has posted the receive, which it does when it starts the
micro-batch before; where stages have chunks, when it has ended that pass. With chunks a stage also waits for
what it sends behind its last forward pass.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from megatron_hexi.cost import Phases
from megatron_hexi.cost.arrays import Floats
from megatron_hexi.cost.pipeline import Pipeline
from megatron_hexi.lab.simulator.simulation import PipelineSpan
from megatron_hexi.mesh import PipelineStep, pipeline_steps, step_source


def replay_pipeline(pipeline: Pipeline, forward: Sequence[float], replica: int) -> list[PipelineSpan]:
    """Return the passes of micro-batches in each stage.

    Args:
        forward: seconds of a micro-batch's forward pass in each stage; the rest is the backward pass.
    """
    count = len(pipeline.stage_phases)
    seconds = [
        {"forward": ahead, "backward": phases.total - ahead}
        for ahead, phases in zip(forward, pipeline.stage_phases, strict=True)
    ]
    chunks = pipeline.chunks
    seconds = [{way: one / chunks for way, one in both.items()} for both in seconds]
    steps = [pipeline_steps(count, stage, pipeline.micro_batches, chunks) for stage in range(count)]
    before = [_steps_before(own) for own in steps]
    last_forward = [max(n for n, step in enumerate(own) if step.way == "forward") for own in steps]
    place, free = [0] * count, [0.0] * count
    begun: dict[tuple[int, PipelineStep], float] = {}
    ended: dict[tuple[int, PipelineStep], float] = {}

    def arrival(stage: int, step: PipelineStep) -> float | None:
        """Return when a stage has the input of a step; ``None``: not known yet."""
        ahead = step.way == "forward"
        source = step_source(count, stage, step, chunks)
        if source is None:
            return 0.0
        if source not in ended:
            return None
        travels = float(pipeline.there[source[0]] if ahead else pipeline.back[stage])
        last = before[stage].get(step)
        posted = 0.0 if last is None else (begun if chunks == 1 else ended)[stage, last]
        return max(ended[source], posted) + travels

    spans: list[PipelineSpan] = []
    waiting = True
    while waiting:
        waiting = False
        for stage in range(count):
            while place[stage] < len(steps[stage]):
                step = steps[stage][place[stage]]
                there = arrival(stage, step)
                if there is None:
                    waiting = True
                    break
                start = max(free[stage], there)
                end = start + seconds[stage][step.way]
                begun[stage, step], ended[stage, step] = start, end
                spans.append(
                    PipelineSpan(replica, stage, step.way, step.micro_batch, 0, start, end, step.chunk)
                )
                place[stage] += 1
                free[stage] = end
                if place[stage] > last_forward[stage] + 1 and stage + step.chunk > 0 and chunks > 1:
                    free[stage] += float(pipeline.back[stage - 1])
    return sorted(spans, key=lambda span: (span.stage, span.start_s))


def _steps_before(steps: Sequence[PipelineStep]) -> dict[PipelineStep, PipelineStep]:
    """Return the step before each in the same way, where there is one."""
    ways = ([step for step in steps if step.way == way] for way in ("forward", "backward"))
    return {step: last for own in ways for last, step in itertools.pairwise(own)}


def pipeline_phases(pipeline: Pipeline, forward: Sequence[float], spans: Sequence[PipelineSpan]) -> Phases:
    """Return the phases of a replica: of the slowest stage, exposed sends, and the bubble.

    Args:
        forward: see `replay_pipeline`.
    """
    slowest = max(pipeline.stage_phases, key=lambda phases: phases.total) * pipeline.micro_batches
    end = at_once = max(span.end_s for span in spans)
    if pipeline.there.any() or pipeline.back.any():
        nothing: Floats = np.zeros(len(pipeline.there))
        instant = replace(pipeline, there=nothing, back=nothing)
        at_once = max(span.end_s for span in replay_pipeline(instant, forward, 0))
    return slowest + Phases(pipeline=end - at_once, bubble=max(0.0, at_once - slowest.total))
