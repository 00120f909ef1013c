"""The overlap of communication with computation: each unit's time through the program of a pass.

All units run the same program (`plan.program`), that of the replica with the most groups; units of other
replicas have nothing to send or compute in the steps that these do not have. A unit's transfers run one batch
after the other, in the order in which they are posted; a transfer begins when both ends have posted it and
have ended their transfers before. All-to-alls are no part of this queue, and members of a group wait for each
other there: their exposed time is computed in `layer`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from megatron_hexi.cost.arrays import Floats, Ints
from megatron_hexi.plan.program import Batch, FarBlocks, OwnBlock, Wait, attention_program


class ExchangePart(NamedTuple):
    """A part of a step of the exchange: its blocks and its messages.

    Args:
        compute: seconds of each unit's blocks, forward and backward, [2, U].
        owner: unit that sends each message of keys and values, [M].
        user: unit that receives it, [M].
        there: seconds of each message of keys and values, [M].
        home: seconds of the message of their gradients back to the owner, [M].
    """

    compute: Floats
    owner: Ints
    user: Ints
    there: Floats
    home: Floats


class EntryTimes(NamedTuple):
    """Times of each unit when it enters attention, s, [U].

    Args:
        posted: time at which its group's first all-to-all has arrived.
        late: seconds that it then waits for the second all-to-all; counted before its own group's block.
        first: seconds of its own group's block for the first half of its heads.
        rest: seconds of that block for the second half.
    """

    posted: Floats
    late: Floats
    first: Floats
    rest: Floats


class Ends(NamedTuple):
    """Time at which each unit ends the pass, and ends the half of the heads that leaves first, s, [U]."""

    whole: Floats
    first_half: Floats


class _Wire:
    """The queue of each unit's transfers, one batch at a time."""

    def __init__(self, units: int) -> None:
        self._free = np.zeros(units)

    def carry(self, posted: Floats, src: Ints, dst: Ints, seconds: Floats) -> Floats:
        """Return the time at which each unit has its messages of a batch, s, [U]; 0 for units without any.

        Args:
            posted: time at which each unit posts the batch, s, [U].
        """
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
    """Return the times at which each unit ends a pass of attention.

    Args:
        halves: number of all-to-alls before attention, and after it: 1, or 2 for halves of the heads.
        last_rest: seconds of each unit's last step that belong to the second half of its heads, [U].
    """
    parts = tuple(map(len, steps))
    wire, arrived = _Wire(len(start.posted)), dict[Batch, Floats]()
    now = first_half = start.posted
    for operation in attention_program(backward, parts, window, halves, turn=parts[-1] - 1 if parts else 0):
        if isinstance(operation, FarBlocks):
            seconds = steps[operation.step][operation.part].compute[int(backward)]
            if operation.piece is not None:
                # Counted after all other work: work before it cannot wait for the keys of a later part.
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
