"""What the memory of a piece's members has room for: tokens held, beside tokens attended to (piece.py)."""

from __future__ import annotations

import numpy as np

from megatron_hexi.cost import Job
from megatron_hexi.cost.arrays import Floats
from megatron_hexi.cost.memory import Flights, Holdings, stage_memory

_MANY = 1e6


class Room:
    """Memory of each piece, a member, on average over its members.

    Bytes grow in proportion to the tokens that a member holds, and to those that it attends to: with h of a
    group's H heads, h / H of the group's tokens.

    Args:
        job: the job.
        stage: pipeline stage.
        usable: bytes of a GPU's memory.
        shards: units that share the optimizer's state at most.
        heads: of a member, of each piece.
    """

    def __init__(self, job: Job, stage: int, usable: float, shards: int, heads: Floats) -> None:
        workload = job.workload()
        all_heads, ratio, nothing = workload.local_heads, workload.queries_per_kv, np.zeros(len(heads))

        def needed(held: float, attended: float, several: bool) -> Floats:
            # Keys in flight count as none: some are, or there is one group.
            flight = np.full(len(heads), 1e-9 if several else 0.0)
            holdings = Holdings(
                tokens=nothing + held,
                group_tokens=attended * all_heads / heads,
                heads=heads,
                kv=heads / ratio,
                micro_batches=np.ones(len(heads), dtype=np.int64),
                flights=Flights(flight, flight),
            )
            return sum(stage_memory(job, stage, holdings, 1, shards).values(), start=nothing)

        alone = needed(0.0, 0.0, False)
        self._left = np.maximum(0.0, usable - alone)
        self._each_held = (needed(_MANY, 0.0, False) - alone) / _MANY
        self._each_attended = [(needed(0.0, _MANY, several) - alone) / _MANY for several in (False, True)]

    def together(self, groups: int) -> Floats:
        """The most tokens that a member both holds and attends to, with so many groups at least."""
        return self._left / (self._each_held + self._attended(groups))

    def held_alone(self) -> Floats:
        """The most that it holds."""
        return self._left / self._each_held

    def held(self, attended: Floats, groups: int) -> Floats:
        """The most that it holds beside those that it attends to; below 0 where these are too many."""
        return (self._left - attended * self._attended(groups)) / self._each_held

    def attended_alone(self, groups: int) -> Floats:
        """The most that it attends to."""
        return self._left / self._attended(groups)

    @property
    def held_share(self) -> float:
        """The least part of what a token takes that is for holding it."""
        each = self._each_held / (self._each_held + self._attended(2))
        return float(each.min())

    def _attended(self, groups: int) -> Floats:
        return self._each_attended[groups > 1]
