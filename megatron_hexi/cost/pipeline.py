"""1F1B: the order of passes in the stages of a replica, and an upper bound of their seconds.

Each stage first runs some passes forward, the more the earlier it stands (`passes_ahead`), then one forward
and one backward in turn, then the remaining backward passes. A forward pass needs the activations of the
stage before, a backward pass the gradients of the stage after.

A stage's layers may be cut into chunks (Megatron's interleaved schedule; Narayanan et al., arXiv 2104.04473,
section 2.2): the model runs through all stages once for each chunk, and the last stage sends its output to
the first. As many micro-batches as there are stages run through a chunk, then they run through the next one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from megatron_hexi.cost.arrays import Floats, Ints
from megatron_hexi.cost.phases import Phases


class PipelineStep(NamedTuple):
    """A micro-batch's pass through a stage, or through a chunk of its layers."""

    way: Literal["forward", "backward"]
    micro_batch: int
    chunk: int = 0


@dataclass(frozen=True, eq=False)
class Pipeline:
    """The p stages of one replica under 1F1B.

    Args:
        stages: seconds of a micro-batch in each stage by phase, forward and backward, with its exposed sends,
            [p].
        there: seconds that activations are under way over each border while both stages compute, [p - 1];
            with chunks [p], where the border from the last stage to the first comes last.
        back: seconds that gradients are under way over each border, of the same shape.
        micro_batches: number of micro-batches; with chunks a multiple of p.
        chunks: number of chunks of each stage's layers, all of equal length.
    """

    stages: tuple[Phases, ...]
    there: Floats
    back: Floats
    micro_batches: int
    chunks: int = 1

    def steps(self, stage: int) -> Iterator[PipelineStep]:
        """Yield the passes of a stage, in order."""
        count = self.micro_batches * self.chunks
        ahead = min(passes_ahead(len(self.stages), stage, self.chunks), count)
        for number in range(ahead):
            yield self._step("forward", number)
        for number in range(count - ahead):
            yield self._step("forward", ahead + number)
            yield self._step("backward", number)
        for number in range(count - ahead, count):
            yield self._step("backward", number)

    def _step(self, way: Literal["forward", "backward"], number: int) -> PipelineStep:
        """Return a stage's forward or backward pass with this number.

        Each group of p micro-batches runs through one chunk after the other.
        """
        stages = len(self.stages)
        group, place = divmod(number, stages * self.chunks)
        chunk, micro_batch = divmod(place, stages)
        chunk = chunk if way == "forward" else self.chunks - 1 - chunk
        return PipelineStep(way, group * stages + micro_batch, chunk)

    @property
    def phases(self) -> Phases:
        """Seconds of the replica by phase, in closed form.

            sum of all stages and borders + (passes - 1) x period

        The first pass runs through all stages; each other pass follows a period later (`period_s`). With
        chunks a pass is that of one chunk, and the passes that the last stage runs before 1F1B begins take
        longer, because their sends are exposed.
        """
        totals = np.array([phases.total for phases in self.stages]) / self.chunks
        slowest = int(np.argmax(totals))
        others = float(totals.sum() - totals[slowest])
        between = self.there + self.back
        passes, inner = self.micro_batches * self.chunks, len(totals) - 1
        period = period_s(totals, self.there, self.back, passes, self.chunks)
        shown = float(between[:inner].sum()) + (passes - 1) * (period - float(totals[slowest]))
        if self.chunks > 1:
            filling = totals + self.there + np.roll(self.back, 1)
            shown += (self.chunks - 1) * len(totals) * (float(filling.max()) - period)
        return self.stages[slowest] * self.micro_batches + Phases(bubble=others, pipeline=shown)


def passes_ahead[N: (int, Ints, Ints | int)](stages: int, stage: N, chunks: int) -> N:
    """Return the number of passes that a stage runs forward before 1F1B begins, if there are enough.

    Args:
        stages: number of stages in the pipeline.
        stage: number of the stage, from 0.
        chunks: number of chunks of each stage's layers; several are run as by Megatron's
            `get_pp_rank_microbatches`.
    """
    behind = stages - 1 - stage
    return behind if chunks == 1 else 2 * behind + (chunks - 1) * stages


def period_s(stages: ArrayLike, there: ArrayLike, back: ArrayLike, passes: int, chunks: int = 1) -> float:
    """Return the seconds from one pass of a 1F1B pipeline to the next.

    They are the largest of: the seconds of the slowest stage; the seconds of a border that is always busy;
    and for n neighbouring stages the seconds of a pass through them and back, sends included, divided by the
    number of passes in flight there, n (2 n - 1 with chunks).

    Args:
        stages: seconds of a pass in each stage, forward and backward, [p].
        there: seconds that activations are under way over each border while both stages compute, [p - 1], or
            [p] with chunks.
        back: seconds that gradients are under way over each border, of the same shape.
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
