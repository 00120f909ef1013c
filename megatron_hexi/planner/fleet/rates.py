"""What each unit achieves at its best, and has room for: the first guess of a balance."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from megatron_hexi.cost import Job, attention_seconds, token_seconds
from megatron_hexi.cost.compute import device_speeds
from megatron_hexi.cost.memory import GIB, ModelPart
from megatron_hexi.planner.fleet.room import Room
from megatron_hexi.planner.fleet.units import Fleet, Kind


class Rates:
    """Best rates of a fleet's units, [U].

    A group of G tokens takes G / sum(token) for its token work and max(G x heads / attention) for attention,
    seconds of all passes through all layers of a micro-batch.

    Args:
        fleet: the units.
        window: steps of the exchange whose keys are under way.
        shards: units that share the optimizer's state; ``None``: the fleet's.
    """

    def __init__(self, fleet: Fleet, window: int = 1, shards: int | None = None) -> None:
        self.local_heads = fleet.job.workload().local_heads
        by_kind = [_rates(fleet.job, kind) for kind in fleet.kinds]
        kinds = np.array([unit.kind for unit in fleet.units])
        #: Tokens a second of everything but attention.
        self.token = np.array([token for token, _ in by_kind])[kinds]
        #: Tokens x heads a second of attention, heads of one tensor-parallel rank.
        self.attention = np.array([attention for _, attention in by_kind])[kinds]
        rooms = [list(_rooms(fleet, kind, window, shards)) for kind in fleet.kinds]
        #: Bytes of memory for tokens, on the stage that has least.
        self.free = np.array([min(room.left for room in stages) for stages in rooms])[kinds]
        every = [room for stages in rooms for room in stages]
        #: Bytes of a token held, and of a head of a token attended to, on the stage that needs most.
        self.token_bytes = max(room.each_held for room in every)
        self.head_bytes = max(room.each_attended(2) for room in every) / self.local_heads


def _rooms(fleet: Fleet, kind: Kind, window: int, shards: int | None) -> Iterator[Room]:
    for stage, device in enumerate(kind.devices):
        part = fleet.part or ModelPart.of_job(fleet.job, stage)
        yield Room(fleet.job, part, device.usable_gib * GIB, shards or len(fleet.units), window)


def _rates(job: Job, kind: Kind) -> tuple[float, float]:
    speeds = [device_speeds(device, job) for device in kind.devices]
    token = min(job.tensor_parallel / token_seconds(one, job) for one in speeds)
    attention = min(job.model.heads / attention_seconds(one, job, causal=True) for one in speeds)
    return token, attention
