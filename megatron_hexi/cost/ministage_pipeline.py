"""Ministages: how long the stages of a replica take where they pass all micro-batches in turns."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from megatron_hexi.cost.arrays import Floats
from megatron_hexi.cost.phases import Phases
from megatron_hexi.cost.pipeline import Pipeline


@dataclass(frozen=True, eq=False)
class MinistagePipeline(Pipeline):
    """The stages of one replica that runs in ministages.

    Borders are those between neighbours, and with several stages that from the last to the first.

    Args:
        ministages: in how many parts each stage runs, taken as equal.
        forward_s: of a stage's time, one forward pass of all its layers, s, [p].
    """

    ministages: int
    forward_s: Floats

    @property
    def phases(self) -> Phases:
        """Where the replica's time goes: the slowest stage's work, and its waits for the others."""
        totals = np.array([phases.total for phases in self.stages])
        slowest = self.stages[int(np.argmax(totals))]
        work = slowest.total * self.micro_batches
        return slowest * self.micro_batches + Phases(bubble=max(0.0, self.seconds() - work))

    def seconds(self) -> float:
        """From the first micro-batch's entry until all gradients are there; each stage works in order.

        The last ministage of the last stage runs forward and backward at once; all others run forward once
        more before they run backward.
        """
        depth, last = len(self.stages), len(self.stages) - 1
        ahead = self.forward_s / self.ministages
        logits = self.stages[last].logits / self.ministages
        totals = np.array([phases.total for phases in self.stages]) / self.ministages
        back = totals - ahead
        # The last stage runs one ministage less twice, and has the loss in one only.
        turn = totals[last] + (self.ministages - 1) * logits - ahead[last] * (1 - 1 / self.ministages)
        back[last] = totals[last] - logits - ahead[last] + ahead[last] / self.ministages
        free = np.zeros(depth)
        ready = np.zeros(self.micro_batches)

        def run(stage: int, seconds: float, border: float) -> None:
            for micro_batch in range(self.micro_batches):
                free[stage] = max(free[stage], ready[micro_batch]) + seconds
                ready[micro_batch] = free[stage] + border

        def border(seconds: Floats, number: int) -> float:
            return float(seconds[number]) if number < len(seconds) else 0.0

        for number in range(self.ministages):
            for stage in range(depth):
                if number < self.ministages - 1 or stage < last:
                    run(stage, float(ahead[stage]), border(self.there, stage))
        run(last, float(turn), border(self.back, last - 1) if last else 0.0)
        for number in reversed(range(self.ministages)):
            for stage in reversed(range(depth)):
                if number < self.ministages - 1 or stage < last:
                    run(stage, float(back[stage]), border(self.back, (stage - 1) % depth))
        return float(free.max())
