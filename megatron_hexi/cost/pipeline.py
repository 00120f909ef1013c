"""1F1B, with or without chunks (`mesh.pipeline_order`): an upper bound of the seconds of a replica."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from megatron_hexi.cost.arrays import Floats
from megatron_hexi.cost.phases import Phases


@dataclass(frozen=True, eq=False)
class Pipeline:
    """The p stages of one replica under 1F1B.

    Args:
        stage_phases: seconds of a micro-batch in each stage by phase, forward and backward, with its exposed
            sends, [p].
        there: seconds that activations are in transit over each border while both stages compute, [p - 1];
            with chunks [p], where the border from the last stage to the first comes last.
        back: seconds that gradients are in transit over each border, of the same shape.
        micro_batches: number of micro-batches; with chunks a multiple of p.
        chunks: number of chunks of each stage's layers, all of equal length.
    """

    stage_phases: tuple[Phases, ...]
    there: Floats
    back: Floats
    micro_batches: int
    chunks: int = 1

    @property
    def phases(self) -> Phases:
        """Seconds of the replica by phase, in closed form.

            sum of all stages and borders + (passes - 1) x period

        The first pass runs through all stages; each other pass follows a period later (`period_s`). With
        chunks a pass is that of one chunk, and the passes that the last stage runs before 1F1B begins take
        longer, because their sends are exposed.
        """
        totals = np.array([phases.total for phases in self.stage_phases]) / self.chunks
        slowest = int(np.argmax(totals))
        others = float(totals.sum() - totals[slowest])
        between = self.there + self.back
        passes, inner = self.micro_batches * self.chunks, len(totals) - 1
        period = period_s(totals, self.there, self.back, passes, self.chunks)
        shown = float(between[:inner].sum()) + (passes - 1) * (period - float(totals[slowest]))
        if self.chunks > 1:
            filling = totals + self.there + np.roll(self.back, 1)
            shown += (self.chunks - 1) * len(totals) * (float(filling.max()) - period)
        return self.stage_phases[slowest] * self.micro_batches + Phases(bubble=others, pipeline=shown)


def period_s(stages: ArrayLike, there: ArrayLike, back: ArrayLike, passes: int, chunks: int = 1) -> float:
    """Return the seconds from one pass of a 1F1B pipeline to the next.

    They are the largest of: the seconds of the slowest stage; the seconds of a border that is always busy;
    and for n neighbouring stages the seconds of a pass through them and back, sends included, divided by the
    number of passes in flight there, n (2 n - 1 with chunks).

    Args:
        stages: seconds of a pass in each stage, forward and backward, [p].
        there: seconds that activations are in transit over each border while both stages compute, [p - 1], or
            [p] with chunks.
        back: seconds that gradients are in transit over each border, of the same shape.
        passes: number of passes.
        chunks: number of chunks of each stage's layers.
    """
    totals, forth, return_ = (np.asarray(values, dtype=float) for values in (stages, there, back))
    period = float(totals.max())
    if not len(forth) or not (forth.any() or return_.any()):
        return period
    period = max(period, float(forth.max()), float(return_.max()))
    way = np.concatenate([[0.0], np.cumsum(totals)])
    sent = np.concatenate([[0.0], np.cumsum((forth + return_)[: len(totals) - 1])])
    for length in range(2, min(len(totals), passes - 1) + 1):
        rows = way[length:] - way[:-length] + sent[length - 1 :] - sent[: len(sent) - length + 1]
        period = max(period, float(rows.max()) / (length if chunks == 1 else 2 * length - 1))
    return period
