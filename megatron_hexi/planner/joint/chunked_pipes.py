"""Pipelines whose stages are interleaved: their layers in chunks, and the seconds that these take.

A pipeline fills and drains in the time of a chunk in place of that of a stage (`mesh/pipeline_order.py`). So
deep pipelines of few micro-batches, which are slow in 1F1B, may be the fastest. Here they are estimated;
`Interleaving` then chooses the ministages by the cost model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from megatron_hexi.mesh.pipeline_order import passes_ahead
from megatron_hexi.planner.joint.pipes import Pipe, PipeStage, least_longest
from megatron_hexi.planner.joint.pools import StageShape, is_exact
from megatron_hexi.planner.joint.stage_tables import UNDER_WAY, StageTables

#: Numbers of chunks of a stage that are tried, and the one by which memory and candidates are judged.
_COUNTS, _USUAL = (2, 3, 4, 6, 8), 4


@dataclass(frozen=True)
class ChunkedPipe(Pipe):
    """A pipeline in interleaved 1F1B.

    Args:
        chunks: parts of each stage's layers that take turns.
    """

    chunks: int = 1

    @cached_property
    def period_s(self) -> float:
        """Seconds from one micro-batch to the next.

        In each turn all stages wait for the longest chunk, and for the activations that cross a border.
        """
        layers = np.array([stage.layers for stage in self.stages])[:, None]
        sizes = (layers + np.arange(self.chunks)[::-1]) // self.chunks
        each = np.array([stage.seconds for stage in self.stages])[:, None] / layers
        return float((each * sizes).max(axis=0).sum()) + (self.chunks - 1) * max(self.ways)

    @cached_property
    def fill_s(self) -> float:
        """Seconds of the first micro-batch beyond a period, which the first chunks spend."""
        seconds = [stage.seconds for stage in self.stages]
        return (sum(seconds) + 2 * sum(self.ways) - max(seconds)) / self.chunks

    def seconds_of(self, micro_batches: int) -> float:
        """Return the seconds of this many micro-batches."""
        return self.fill_s + _turns(micro_batches, len(self.stages)) * self.period_s

    def most_within(self, seconds: float) -> int:
        """Return the most micro-batches in this many seconds."""
        most = super().most_within(seconds)
        while most and self.seconds_of(most) > seconds * (1 + 1e-12):
            most -= 1
        return most


def chunked_part(micro_batches: int, stages: int) -> float:
    """Return about what part of a 1F1B pipeline's seconds it takes if its stages are interleaved."""
    return (_turns(micro_batches, stages) + (stages - 1) / _USUAL) / (micro_batches - 1 + stages)


def _turns(micro_batches: int, stages: int) -> float:
    """Return in how many periods an interleaved pipeline runs its micro-batches.

    As many micro-batches as there are stages run through a chunk, then they run through the next one; of the
    time of those that the last turn lacks about half is lost.
    """
    return micro_batches + -micro_batches % stages / 2


def chunked(
    tables: StageTables,
    shapes: Sequence[StageShape],
    ways: Sequence[float],
    micro_batches: int,
    shards: int,
    *,
    timed: bool,
) -> ChunkedPipe | None:
    """Return the fastest interleaved pipeline of these stages; ``None``: none fits in memory.

    Layers are shared by whole stages or, where the model's layers divide, by chunks: in each turn
    all stages wait for the longest chunk.

    Args:
        ways: seconds that a micro-batch travels over each border, [p - 1].
    """
    last, found = len(shapes) - 1, []
    for place, shape in enumerate(shapes):
        under_way = min(micro_batches, _under_way(last + 1, place))
        table = tables.table(shape, under_way, place == 0, place == last, shards, timed)
        if table is None:
            return None
        found.append(table)
    is_timed = timed or all(map(is_exact, shapes))
    best: ChunkedPipe | None = None
    for chunks in _COUNTS:
        for each in {1, chunks} if tables.layers % chunks == 0 else {1}:
            rows = np.array([table.seconds[each - 1 :: each] for table in found])
            dealt = least_longest(rows, tables.layers // each)
            if dealt is None or each * min(dealt) < chunks:
                continue
            layers = [each * count for count in dealt]
            stages = tuple(
                PipeStage(shape, count, table.recompute(count), float(table.seconds[count - 1]))
                for shape, count, table in zip(shapes, layers, found, strict=True)
            )
            pipe = ChunkedPipe(stages, tuple(ways), micro_batches, is_timed, chunks)
            best = pipe if best is None or pipe.seconds < best.seconds else best
    return best


def _under_way(stages: int, stage: int) -> int:
    """Return about how many micro-batches an interleaved stage has in flight, rounded down to a table."""
    passes = max(_USUAL, passes_ahead(stages, stage, _USUAL) + 1)
    return max(number for number in UNDER_WAY if number * _USUAL <= passes)
