"""Seconds of a replica whose stages run their ministages in interleaved 1F1B."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from megatron_hexi.cost.arrays import Floats
from megatron_hexi.cost.ministage_pipeline import Lane
from megatron_hexi.cost.phases import Phases
from megatron_hexi.mesh import PipelineStep, interleaved_order, step_source


@dataclass(frozen=True, eq=False)
class InterleavedPipeline:
    """The stages of one replica, with ministages interleaved (`mesh.pipeline_order`).

    There is a border between each stage and the next, and one from the last to the first.

    Args:
        lanes: each stage as a lane that takes all micro-batches, [p].
        there: seconds that a micro-batch's activations are in transit over each border, [p].
        back: seconds that its gradients are in transit over each border, [p].
        parts: part of a stage's work in layers that each ministage has, [p, ministages].
    """

    lanes: tuple[Lane, ...]
    there: Floats
    back: Floats
    parts: Floats

    @property
    def stage_phases(self) -> tuple[Phases, ...]:
        """Seconds of a micro-batch by phase in each stage, [p]."""
        return tuple(lane.phases for lane in self.lanes)

    @property
    def micro_batches(self) -> int:
        """Number of micro-batches."""
        return len(self.lanes[0].takes)

    @property
    def busiest(self) -> Phases:
        """Seconds of work in an iteration by phase, of the stage with the most."""
        return max((lane.work for lane in self.lanes), key=lambda work: work.total)

    @property
    def instant(self) -> InterleavedPipeline:
        """The pipeline with borders that take no time."""
        return replace(self, there=np.zeros(len(self.there)), back=np.zeros(len(self.back)))

    @property
    def phases(self) -> Phases:
        """Seconds of the replica by phase: the busiest stage's work, and its waits for stages and rows."""
        return self.phases_of(self.instant.seconds(), self.seconds())

    def phases_of(self, without_borders: float, seconds: float) -> Phases:
        """Return the seconds of the replica by phase, from those with and without the seconds of borders."""
        bubble = max(0.0, without_borders - self.busiest.total)
        return self.busiest + Phases(bubble=bubble, pipeline=seconds - without_borders)

    def step_s(self, stage: int, step: PipelineStep) -> float:
        """Return the seconds of a pass; the logits belong to the backward pass of the last ministage."""
        lane, part = self.lanes[stage], float(self.parts[stage][step.chunk])
        if step.way == "forward":
            return part * lane.forward_s
        is_end = (stage, step.chunk) == (len(self.lanes) - 1, self.parts.shape[1] - 1)
        logits = lane.phases.logits
        return part * (lane.phases.total - logits - lane.forward_s) + logits * is_end

    def border_s(self, stage: int, step: PipelineStep) -> float:
        """Return the seconds that the input of a stage's pass is in transit over its border."""
        return float(self.there[stage - 1] if step.way == "forward" else self.back[stage])

    def seconds(self) -> float:
        """Return the seconds from the first pass until the last one ends.

        Rows travel once they are computed and the receive is posted: when the receiver starts the pass that
        received before in this direction; for the first rows, when it comes to need them.
        """
        depth, count = self.parts.shape
        free = [0.0] * depth
        posted: dict[tuple[int, str], float] = {}
        ended: dict[tuple[int, PipelineStep], float] = {}
        for stage, step in interleaved_order(depth, self.micro_batches, count):
            begun = free[stage]
            source = step_source(depth, stage, step, count)
            if source is not None:
                asked = posted.get((stage, step.way), begun)
                begun = max(begun, max(ended[source], asked) + self.border_s(stage, step))
                posted[stage, step.way] = begun
            ended[stage, step] = free[stage] = begun + self.step_s(stage, step)
        return max(free)
