"""Hidden communication: the program of a pass (`plan.program`), read with a clock for each unit.

All units go through one program, that of the replica with the most groups; others have nothing to send or to
compute in the steps that they lack. A unit's transfers go over its wire one batch after the other, in the
order posted; a transfer begins when both ends have posted it and have their wire free. All-to-alls have wires
of their own, and members of a group wait for each other there: what shows of them is worked out in `layer`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from megatron_hexi.cost.arrays import Floats, Ints
from megatron_hexi.plan.program import Batch, FarBlocks, OwnBlock, Wait, attention_program


class ExchangePart(NamedTuple):
    """Some heads of a step.

    Args:
        compute: seconds of its blocks, forward and backward, [2, U].
        owner: unit that each message of keys comes from, [M].
        user: unit that it goes to, [M].
        there: seconds of each message, [M].
        home: seconds of its gradients' way back, [M].
    """

    compute: Floats
    owner: Ints
    user: Ints
    there: Floats
    home: Floats


class EntryTimes(NamedTuple):
    """Times of each unit when it enters attention, s, [U].

    Args:
        posted: when its group's first way in has arrived.
        late: what it then waits for the second way in; counted before its own block.
        first: seconds of its own group's block for the half of its heads that comes first.
        rest: for the other half.
    """

    posted: Floats
    late: Floats
    first: Floats
    rest: Floats


class Ends(NamedTuple):
    """When each unit is done with the pass, and with the half of the heads that leaves first, s, [U]."""

    whole: Floats
    first_half: Floats


class _Wire:
    """One batch at a time on each unit's wire."""

    def __init__(self, units: int) -> None:
        self._free = np.zeros(units)

    def carry(self, posted: Floats, src: Ints, dst: Ints, seconds: Floats) -> Floats:
        """When each unit has its messages of a batch; 0 for units without any."""
        arrived = np.zeros(len(self._free))
        if len(src):
            ready = np.maximum(posted, self._free)
            ends = np.maximum(ready[src], ready[dst]) + seconds
            np.maximum.at(arrived, src, ends)
            np.maximum.at(arrived, dst, ends)
            self._free = np.maximum(self._free, arrived)
        return arrived


def pass_ends(
    backward: bool,
    steps: Sequence[Sequence[ExchangePart]],
    start: EntryTimes,
    window: int,
    halves: int,
    last_rest: Floats,
) -> Ends:
    """Read the clocks.

    Args:
        backward: the direction.
        steps: of the exchange, each in its parts.
        start: before them.
        window: steps under way ahead of the one in use.
        halves: in how many all-to-alls query heads travel each way.
        last_rest: seconds of each unit's last step that are the other half's, [U].
    """
    parts = tuple(map(len, steps))
    wire, arrived = _Wire(len(start.posted)), dict[Batch, Floats]()
    now = first_half = start.posted
    for operation in attention_program(backward, parts, window, halves, turn=parts[-1] - 1 if parts else 0):
        if isinstance(operation, FarBlocks):
            seconds = steps[operation.step][operation.part].compute[int(backward)]
            if operation.piece is not None:
                # Taken to come after all the rest: what is before it cannot wait for a later part's keys.
                seconds = last_rest if operation.piece else seconds - last_rest
            now = now + seconds
        elif isinstance(operation, OwnBlock):
            if operation.first == 0:
                now = now + start.late + start.first
            if operation.stop == 2:
                now = now + start.rest
        elif isinstance(operation, Wait):
            if operation.batch in arrived:
                now = np.maximum(now, arrived.pop(operation.batch))
        elif operation.batch.cargo in ("keys", "gradients"):
            cargo, step, number = operation.batch
            part = steps[step][number]
            way = (
                (part.owner, part.user, part.there) if cargo == "keys" else (part.user, part.owner, part.home)
            )
            arrived[operation.batch] = wire.carry(now, *way)
        elif operation.batch == Batch("out", 0):
            first_half = now
    return Ends(now, first_half)
