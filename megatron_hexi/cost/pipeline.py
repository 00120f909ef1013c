"""1F1B: what the stages of a replica do one after the other, and how long that takes at most.

Each stage runs as many passes forward as its place asks for (`passes_ahead`), then one forward and one
backward in turn, then the backward passes that are left. A forward pass needs the activations of the stage
before, a backward pass the gradients of the stage behind.

A stage's layers may be cut into chunks (Megatron's interleaved schedule; Narayanan et al., arXiv 2104.04473,
section 2.2): the model goes through all stages once for each chunk, the last stage's output to the first. As
many micro-batches as there are stages pass a chunk one after the other, then the next chunk.
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
    """The stages of one replica.

    Args:
        stages: where the time of a micro-batch goes in each, forward and backward, sends that nothing hides
            included.
        there: seconds that activations are under way over each border while both sides go on, [p - 1]; with
            chunks [p], the border from the last stage to the first comes last.
        back: the same of gradients.
        micro_batches: how many pass; with chunks a multiple of p.
        chunks: of each stage's layers, which run in turn, each as long as the others.
    """

    stages: tuple[Phases, ...]
    there: Floats
    back: Floats
    micro_batches: int
    chunks: int = 1

    def steps(self, stage: int) -> Iterator[PipelineStep]:
        """Steps of a stage, in order."""
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
        """The step of one way with this number: each group of p micro-batches passes chunk after chunk."""
        stages = len(self.stages)
        group, place = divmod(number, stages * self.chunks)
        chunk, micro_batch = divmod(place, stages)
        chunk = chunk if way == "forward" else self.chunks - 1 - chunk
        return PipelineStep(way, group * stages + micro_batch, chunk)

    @property
    def phases(self) -> Phases:
        """Phases of the replica's time, in closed form.

            sum of all stages and borders + (passes - 1) x period

        The first pass goes through everything; the others follow a period apart (`period_s`). With chunks a
        pass is one chunk's, and those that the last stage runs ahead of its first backward pass take longer,
        as nothing hides what travels.
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
    """Return how many passes a stage runs forward before its first backward pass, if there are as many.

    Args:
        stages: in the pipeline.
        stage: number of the stage.
        chunks: of each stage's layers; with several, as `get_pp_rank_microbatches` of Megatron.
    """
    behind = stages - 1 - stage
    return behind if chunks == 1 else 2 * behind + (chunks - 1) * stages


def period_s(stages: ArrayLike, there: ArrayLike, back: ArrayLike, passes: int, chunks: int = 1) -> float:
    """Return the seconds from one pass of a 1F1B pipeline to the next.

    The slowest stage sets them, or a row of n neighbours with what travels between them: n passes are in
    flight there (2 n - 1 of chunks), so one comes every n-th part of the way through and back; or a border
    that is always busy.

    Args:
        stages: seconds of a pass in each stage, forward and backward, [p].
        there: seconds that activations are under way over each border while both sides go on, [p - 1], or [p]
            with chunks.
        back: the same of gradients.
        passes: how many there are.
        chunks: of each stage's layers.
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
