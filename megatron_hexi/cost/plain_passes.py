"""Begin and end of all passes of a pipeline whose stages wait for rows only.

A search asks for them thousands of passes at a time, so orders are numbers in arrays, kept between calls, and
the recurrence is one loop over plain lists.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import numpy as np

from megatron_hexi.cost.arrays import Floats, Ints
from megatron_hexi.mesh import PipelineStep, Way, passes_ahead

#: The directions of passes, by number.
WAYS: tuple[Way, Way] = ("forward", "backward")


class PassOrder(NamedTuple):
    """The N passes of all stages, each after those that it waits for; arrays [N].

    Args:
        receiver: 2 x the pass's stage + the number of its way.
        input: number of the pass whose output it needs; -1: it needs none.
    """

    receiver: Ints
    chunk: Ints
    micro_batch: Ints
    input: Ints

    def passes(self) -> list[tuple[int, PipelineStep]]:
        """Return the stage and the pass of each."""
        rows = zip(self.receiver.tolist(), self.micro_batch.tolist(), self.chunk.tolist(), strict=True)
        return [(one // 2, PipelineStep(WAYS[one % 2], *which)) for one, *which in rows]


@lru_cache(maxsize=64)
def pass_order(stages: int, micro_batches: int, chunks: int) -> PassOrder:
    """Return the passes of all stages (`mesh.pipeline_steps`), ordered as by `mesh.pipeline_runs`."""
    steps = [_stage_passes(stages, stage, micro_batches, chunks) for stage in range(stages)]
    names, sources = ([one[:, column].tolist() for one in steps] for column in (0, 1))
    # The place of each pass in the order; the last entry is that of the absent input.
    place = [-1] * (2 * stages * chunks * micro_batches) + [-1]
    done, left, order = [0] * stages, sum(map(len, names)), list[int]()
    while left:
        before = left
        for stage, (own, inputs) in enumerate(zip(names, sources, strict=True)):
            number = done[stage]
            while number < len(own) and (inputs[number] < 0 or place[inputs[number]] >= 0):
                place[own[number]] = len(order)
                order.append(own[number])
                number += 1
            left -= number - done[stage]
            done[stage] = number
        assert left < before, "no pass waits for itself"
    name, source = np.array(order), np.full(len(place), -1)
    for own, inputs in zip(names, sources, strict=True):
        source[own] = inputs
    receiver, rest = np.divmod(name, chunks * micro_batches)
    return PassOrder(receiver, rest // micro_batches, rest % micro_batches, np.array(place)[source[name]])


def _stage_passes(stages: int, stage: int, micro_batches: int, chunks: int) -> Ints:
    """Return the numbers of a stage's passes and of their inputs, in order, [passes, 2]; -1: no input.

    A pass has the number ((2 x stage + way) x chunks + chunk) x micro-batches + micro-batch.
    """
    count = micro_batches if chunks == 1 else -(-micro_batches // stages) * stages * chunks
    ahead = min(passes_ahead(stages, stage, chunks), count)
    paired = np.arange(count - ahead)
    alternating = np.stack([ahead + paired, paired], axis=1).ravel()
    number = np.concatenate([np.arange(ahead), alternating, np.arange(count - ahead, count)])
    way = np.concatenate([np.zeros(ahead), np.tile([0, 1], count - ahead), np.ones(ahead)]).astype(np.int64)
    group, place = np.divmod(number, stages * chunks)
    chunk, micro_batch = np.divmod(place, stages)
    micro_batch += group * stages
    chunk = np.where(way == 0, chunk, chunks - 1 - chunk)
    # A stage's input is the output of the stage before it; of the first, the last stage's earlier chunk.
    by = 2 * way - 1
    giver = stage + by
    given = np.where((giver < 0) | (giver >= stages), chunk + by, chunk)
    own, other = (
        ((2 * of + way) * chunks + part) * micro_batches + micro_batch
        for of, part in ((stage, chunk), (giver % stages, given))
    )
    other = np.where((given < 0) | (given >= chunks), -1, other)
    return np.stack([own, other], axis=1)[micro_batch < micro_batches]


def plain_times(
    order: PassOrder, seconds: Floats, ways: Floats, *, posts_ahead: bool
) -> list[tuple[float, float]]:
    """Return begin and end of all passes, s.

    Args:
        seconds: seconds of each pass, [N].
        ways: seconds that each pass's rows travel, [N].
        posts_ahead: whether a receive is posted when the pass before it in its direction starts; else when
            that has ended.
    """
    stages = 1 + int(order.receiver.max()) // 2
    free, posted, ends = [0.0] * stages, [-1.0] * (2 * stages), list[float]()
    times = list[tuple[float, float]]()
    rows = (order.receiver, order.input, seconds, ways)
    for receiver, source, took, way_s in zip(*(one.tolist() for one in rows), strict=True):
        stage = receiver // 2
        begin = free[stage]
        if source >= 0:
            # Rows leave once they are computed and the receive is posted: the first when they are needed.
            asked, ready = posted[receiver], ends[source]
            if asked < 0:
                asked = begin
            arrived = (ready if ready > asked else asked) + way_s
            if arrived > begin:
                begin = arrived
            posted[receiver] = begin if posts_ahead else begin + took
        end = free[stage] = begin + took
        ends.append(end)
        times.append((begin, end))
    return times
