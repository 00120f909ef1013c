"""1F1B: what the stages of a replica do one after the other, and how long that takes at most.

Each stage runs as many micro-batches forward as stages come after it, then one forward and one backward in
turn, then the backward passes that are left. A forward pass needs the activations of the stage before, a
backward pass the gradients of the stage behind.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from megatron_hexi.cost.arrays import Floats
from megatron_hexi.cost.phases import Phases


class PipelineStep(NamedTuple):
    """A micro-batch's pass through a stage."""

    way: Literal["forward", "backward"]
    micro_batch: int


@dataclass(frozen=True, eq=False)
class Pipeline:
    """The stages of one replica.

    Args:
        stages: where the time of a micro-batch goes in each, forward and backward, sends that nothing hides
            included.
        there: seconds that activations are under way over each border while both sides go on, [p - 1].
        back: the same of gradients.
        micro_batches: how many pass.
    """

    stages: tuple[Phases, ...]
    there: Floats
    back: Floats
    micro_batches: int

    def steps(self, stage: int) -> Iterator[PipelineStep]:
        """Steps of a stage, in order."""
        count = self.micro_batches
        ahead = min(len(self.stages) - 1 - stage, count)
        for number in range(ahead):
            yield PipelineStep("forward", number)
        for number in range(count - ahead):
            yield PipelineStep("forward", ahead + number)
            yield PipelineStep("backward", number)
        for number in range(count - ahead, count):
            yield PipelineStep("backward", number)

    @property
    def phases(self) -> Phases:
        """Phases of the replica's time, in closed form.

            sum of all stages and borders + (micro-batches - 1) x period

        The first micro-batch passes everything; the others follow a period apart (`period_s`).
        """
        totals = np.array([phases.total for phases in self.stages])
        slowest = self.stages[int(np.argmax(totals))]
        others = float(totals.sum()) - slowest.total
        between = self.there + self.back
        period = period_s(totals, self.there, self.back, self.micro_batches)
        shown = float(between.sum()) + (self.micro_batches - 1) * (period - slowest.total)
        return slowest * self.micro_batches + Phases(bubble=others, pipeline=shown)


def period_s(stages: ArrayLike, there: ArrayLike, back: ArrayLike, micro_batches: int) -> float:
    """Return the seconds from one micro-batch of a 1F1B pipeline to the next.

    The slowest stage sets them, or a row of n neighbours with what travels between them: 1F1B keeps n
    micro-batches in flight there, so one every n-th part of the way through and back; or a border that is
    always busy.

    Args:
        stages: seconds of a micro-batch in each stage, forward and backward, [p].
        there: seconds that activations are under way over each border while both sides go on, [p - 1].
        back: the same of gradients.
        micro_batches: how many pass.
    """
    totals, forth, return_ = (np.asarray(values, dtype=float) for values in (stages, there, back))
    period = float(totals.max())
    if not len(forth) or not (forth.any() or return_.any()):
        return period
    period = max(period, float(forth.max()), float(return_.max()))
    way = np.concatenate([[0.0], np.cumsum(totals)])
    sent = np.concatenate([[0.0], np.cumsum(forth + return_)])
    for length in range(2, min(len(totals), micro_batches - 1) + 1):
        rows = way[length:] - way[:-length] + sent[length - 1 :] - sent[: len(sent) - length + 1]
        period = max(period, float(rows.max()) / length)
    return period
