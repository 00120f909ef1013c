"""What memory has room for: tokens held, beside tokens attended to."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np

from megatron_hexi.cost import Job
from megatron_hexi.cost.arrays import Floats
from megatron_hexi.cost.memory import GIB, Flights, Holdings, ModelPart, part_memory, part_params
from megatron_hexi.planner.fleet.units import Fleet

_MANY = 1e6
#: Steps under way that are told apart: of more, there are two at least.
_WINDOWS = (1, 2)


def has_room(job: Job, stages: Iterable[Sequence[tuple[int, Room]]], sequences: int = 1) -> bool:
    """Whether sequences may fit into memory, however they are cut: necessary, not sufficient.

    Args:
        job: the job.
        stages: of each pipeline stage, how many units there are and the room of each.
        sequences: how many are under way at a time.
    """
    for rooms in stages:
        # A token takes the same everywhere, and is held by one and attended to by one.
        one = rooms[0][1]
        each = one.each_held + min(one.each_attended(groups) for groups in (1, 2))
        if sum(units * room.left for units, room in rooms) < sequences * job.seq_length * each:
            return False
    return True


def fleet_has_room(fleet: Fleet, sequences: int = 1) -> bool:
    """The same for all of a fleet's units."""
    job, counts = fleet.job, Counter(unit.kind for unit in fleet.units)

    def part(stage: int) -> ModelPart:
        return fleet.part or ModelPart.of_job(job, stage)

    return has_room(
        job,
        (
            [
                (count, Room(job, part(stage), fleet.kinds[kind].devices[stage].usable_gib * GIB, len(fleet.units)))
                for kind, count in counts.items()
            ]
            for stage in range(job.pipeline_parallel)
        ),
        sequences,
    )


class Room:
    """Memory of a GPU of a unit.

    Bytes grow in proportion to the tokens that the unit holds, and to those that it attends to: with h of a
    group's H heads, h / H of the group's tokens.

    Args:
        job: the job.
        part: what it has of the model.
        usable: bytes of the GPU's memory.
        shards: units that share the optimizer's state at most.
        window: steps of keys under way, each as large as the own group's keys; 0: none are, for a bound.
        micro_batches: of the replica; a pipeline keeps several at a time.
    """

    def __init__(
        self, job: Job, part: ModelPart, usable: float, shards: int, window: int = 0, micro_batches: int = 1
    ) -> None:
        workload = job.workload()
        one, heads = np.ones(1), np.full(1, float(workload.local_heads))
        owned = part_params(job, part) / (shards if job.distributed_optimizer else 1)
        keys = heads / workload.queries_per_kv

        def needed(
            held: float,
            attended: float,
            several: bool,
            received: float = 0.0,
            sent: float = 0.0,
            steps: int = max(1, window),
        ) -> float:
            # There is an exchange, however little it holds.
            flight = (attended * keys if window else 1e-9 * one) * several
            holdings = Holdings(
                tokens=held * one,
                group_tokens=attended * one,
                heads=heads,
                kv=keys,
                micro_batches=np.array([micro_batches]),
                flights=Flights(flight + received * keys, flight + sent * keys),
            )
            terms = part_memory(job, part, holdings, steps, owned)
            return sum(float(values[0]) for values in terms.values())

        alone = needed(0.0, 0.0, False)
        #: Bytes for tokens.
        self.left = max(0.0, usable - alone)
        #: Bytes of a token that is held.
        self.each_held = (needed(_MANY, 0.0, False) - alone) / _MANY
        self._each_attended = [(needed(0.0, _MANY, several) - alone) / _MANY for several in (False, True)]
        in_exchange = needed(0.0, 0.0, True)
        self._each_received, self._each_sent = (
            [(needed(0.0, 0.0, True, **keys, steps=steps) - in_exchange) / _MANY for steps in _WINDOWS]
            for keys in ({"received": _MANY}, {"sent": _MANY})
        )

    def each_received(self, window: int) -> float:
        """Bytes of a token whose keys and values are received in a step, with so many of them under way."""
        return self._each_received[_WINDOWS.index(window)]

    def each_sent(self, window: int) -> float:
        """The same of a token whose keys and values are sent."""
        return self._each_sent[_WINDOWS.index(window)]

    def each_attended(self, groups: int) -> float:
        """Bytes of a token that is attended to, where there are so many groups at least."""
        return self._each_attended[groups > 1]

    def together(self, groups: int) -> float:
        """The most tokens that are both held and attended to."""
        return self.left / (self.each_held + self.each_attended(groups))

    def held_alone(self) -> float:
        """The most that are held."""
        return self.left / self.each_held

    def held(self, attended: Floats, groups: int) -> Floats:
        """The most that are held beside those that are attended to; below 0 where these are too many."""
        return (self.left - attended * self.each_attended(groups)) / self.each_held

    def attended_alone(self, groups: int) -> float:
        """The most that are attended to."""
        return self.left / self.each_attended(groups)

    @property
    def held_share(self) -> float:
        """Of what a token takes, the part for holding it, where there are several groups."""
        return self.each_held / (self.each_held + self.each_attended(2))
