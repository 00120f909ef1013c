"""What each unit achieves at its best, and has room for: the first guess of a balance."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from megatron_hexi.cost import Job, attention_seconds, token_seconds
from megatron_hexi.cost.compute import device_speeds
from megatron_hexi.cost.layer_bytes import Flights
from megatron_hexi.cost.memory import GIB, Holdings, ModelPart, part_memory, part_params
from megatron_hexi.planner.fleet.units import Fleet, Kind

#: Far more tokens than bytes that do not depend on them.
_MANY = 1e6


class Rates:
    """Best rates of a fleet's units, [U].

    A group of G tokens takes G / sum(token) for its token work and max(G x heads / attention) for attention,
    seconds of all passes through all layers of a micro-batch.

    Args:
        fleet: the units.
        window: steps of the exchange whose keys are under way.
        shards: units that share the optimizer's state; ``None``: the fleet's.
        micro_batches: that pass; a pipeline keeps several at a time.
    """

    def __init__(
        self, fleet: Fleet, window: int = 1, shards: int | None = None, micro_batches: int = 1
    ) -> None:
        self.local_heads = fleet.job.workload().local_heads
        by_kind = [_rates(fleet.job, kind) for kind in fleet.kinds]
        kinds = np.array([unit.kind for unit in fleet.units])
        #: Tokens a second of everything but attention.
        self.token = np.array([token for token, _ in by_kind])[kinds]
        #: Tokens x heads a second of attention, heads of one tensor-parallel rank.
        self.attention = np.array([attention for _, attention in by_kind])[kinds]
        sharing = shards or len(fleet.units)
        rooms = [_rooms(fleet, kind, window, sharing, micro_batches) for kind in fleet.kinds]
        #: Bytes of memory for tokens, on the stage that has least.
        self.free = np.array([min(room.left for room in stages) for stages in rooms])[kinds]
        every = [room for stages in rooms for room in stages]
        #: Bytes of a token held, and of a head of a token attended to, on the stage that needs most.
        self.token_bytes = max(room.held for room in every)
        self.head_bytes = max(room.attended for room in every) / self.local_heads


class _Room(NamedTuple):
    """Memory of a GPU, bytes: for tokens; of a token held; of a token attended to with all heads."""

    left: float
    held: float
    attended: float


def _rooms(fleet: Fleet, kind: Kind, window: int, shards: int, micro_batches: int) -> list[_Room]:
    """Of a unit's GPU on each pipeline stage.

    Bytes grow in proportion to the tokens that the unit holds, and to those that it attends to: with h of a
    group's H heads, h / H of the group's tokens. Keys under way are as many as the own group's.
    """
    job, found = fleet.job, []
    # With nothing, with tokens alone, with attention alone.
    tokens, attended = np.array([0.0, _MANY, 0.0]), np.array([0.0, 0.0, _MANY])
    heads = np.full(3, float(job.workload().local_heads))
    keys = heads / job.workload().queries_per_kv
    flights = Flights(attended * keys, attended * keys)
    holdings = Holdings(tokens, attended, heads, keys, np.full(3, micro_batches), flights)
    for stage, device in enumerate(kind.devices):
        part = fleet.part or ModelPart.of_job(job, stage)
        owned = part_params(job, part) / (shards if job.distributed_optimizer else 1)
        terms = part_memory(job, part, holdings, max(1, window), owned)
        alone, by_tokens, by_attended = np.sum(list(terms.values()), axis=0).tolist()
        found.append(
            _Room(
                left=max(0.0, device.usable_gib * GIB - alone),
                held=(by_tokens - alone) / _MANY,
                attended=(by_attended - alone) / _MANY,
            )
        )
    return found


def _rates(job: Job, kind: Kind) -> tuple[float, float]:
    speeds = [device_speeds(device, job) for device in kind.devices]
    token = min(job.tensor_parallel / token_seconds(one, job) for one in speeds)
    attention = min(job.model.heads / attention_seconds(one, job, causal=True) for one in speeds)
    return token, attention
