"""Replay of a replica's micro-batches through its stages, step by step in the order of 1F1B.

A stage runs its steps one after the other. Rows over a border leave when they are computed, when those before
them have arrived, and when the other side has posted the receive, which it does when it starts the
micro-batch before.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from megatron_hexi.cost import Phases
from megatron_hexi.cost.arrays import Floats
from megatron_hexi.cost.pipeline import Pipeline, PipelineStep
from megatron_hexi.lab.simulator.simulation import PipelineSpan


def replay_pipeline(pipeline: Pipeline, forward: Sequence[float], replica: int) -> list[PipelineSpan]:
    """Return the passes of micro-batches in each stage.

    Args:
        pipeline: the stages.
        forward: seconds of a micro-batch's forward pass in each stage; the rest is the backward pass.
        replica: number of the replica.
    """
    count = len(pipeline.stages)
    seconds = [
        {"forward": ahead, "backward": phases.total - ahead}
        for ahead, phases in zip(forward, pipeline.stages, strict=True)
    ]
    steps = [list(pipeline.steps(stage)) for stage in range(count)]
    place, free = [0] * count, [0.0] * count
    begun: dict[tuple[int, PipelineStep], float] = {}
    ended: dict[tuple[int, PipelineStep], float] = {}

    def arrival(stage: int, step: PipelineStep) -> float | None:
        """Return when a stage has the input of a step; ``None``: not known yet."""
        ahead = step.way == "forward"
        neighbour = stage - 1 if ahead else stage + 1
        if not 0 <= neighbour < count:
            return 0.0
        if (neighbour, step) not in ended:
            return None
        travels = float(pipeline.there[neighbour] if ahead else pipeline.back[stage])
        posted = begun.get((stage, PipelineStep(step.way, step.micro_batch - 1)), 0.0)
        return max(ended[neighbour, step], posted) + travels

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
                spans.append(PipelineSpan(replica, stage, step.way, step.micro_batch, 0, start, end))
                place[stage] += 1
                free[stage] = end
    return sorted(spans, key=lambda span: (span.stage, span.start_s))


def pipeline_phases(pipeline: Pipeline, forward: Sequence[float], spans: Sequence[PipelineSpan]) -> Phases:
    """Return the phases of a replica: of the slowest stage, exposed sends, and the bubble.

    Args:
        pipeline: the stages.
        forward: as in `replay_pipeline`.
        spans: the replay.
    """
    slowest = max(pipeline.stages, key=lambda phases: phases.total) * pipeline.micro_batches
    end = at_once = max(span.end_s for span in spans)
    if pipeline.there.any() or pipeline.back.any():
        nothing: Floats = np.zeros(len(pipeline.there))
        instant = replace(pipeline, there=nothing, back=nothing)
        at_once = max(span.end_s for span in replay_pipeline(instant, forward, 0))
    return slowest + Phases(pipeline=end - at_once, bubble=max(0.0, at_once - slowest.total))
