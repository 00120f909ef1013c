"""What each unit achieves at its best, and has room for: the first guess of a balance."""

from __future__ import annotations

import numpy as np

from megatron_hexi.cost import attention_seconds, token_seconds
from megatron_hexi.cost.arrays import Floats
from megatron_hexi.cost.compute import device_speeds
from megatron_hexi.cost.layer_bytes import Flights
from megatron_hexi.cost.memory import GIB, Holdings, ModelPart, part_memory, part_params
from megatron_hexi.planner.fleet.units import Fleet

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
        job, kinds = fleet.job, np.array([unit.kind for unit in fleet.units])
        self.local_heads = job.workload().local_heads
        speeds = [[device_speeds(device, job) for device in kind.devices] for kind in fleet.kinds]
        token = [[token_seconds(one, job) for one in stages] for stages in speeds]
        #: Tokens a second of everything but attention.
        self.token = (job.tensor_parallel / np.max(token, axis=1))[kinds]
        attention = [[attention_seconds(one, job, causal=True) for one in stages] for stages in speeds]
        #: Tokens x heads a second of attention, heads of one tensor-parallel rank.
        self.attention = (job.model.heads / np.max(attention, axis=1))[kinds]
        taken = _stage_bytes(fleet, window, shards or len(fleet.units), micro_batches)
        usable = np.array([[device.usable_gib * GIB for device in kind.devices] for kind in fleet.kinds])
        #: Bytes of memory for tokens, on the stage that has least.
        self.free = np.maximum(0.0, usable - taken[:, 0]).min(axis=1)[kinds]
        #: Bytes of a token held, and of a head of a token attended to, on the stage that needs most.
        self.token_bytes = float(taken[:, 1].max())
        self.head_bytes = float(taken[:, 2].max()) / self.local_heads


def _stage_bytes(fleet: Fleet, window: int, shards: int, micro_batches: int) -> Floats:
    """Bytes of a GPU of each pipeline stage: with nothing, of a token held, of one attended to, [stages, 3].

    They grow in proportion to the tokens that the unit holds, and to those that it attends to: with h of a
    group's H heads, h / H of the group's tokens. Keys under way are as many as the own group's.
    """
    job = fleet.job
    # With nothing, with tokens alone, with attention alone.
    tokens, attended = np.array([0.0, _MANY, 0.0]), np.array([0.0, 0.0, _MANY])
    heads = np.full(3, float(job.workload().local_heads))
    keys = heads / job.workload().queries_per_kv
    flights = Flights(attended * keys, attended * keys)
    holdings = Holdings(tokens, attended, heads, keys, np.full(3, micro_batches), flights)
    taken = []
    for stage in range(job.pipeline_parallel):
        part = fleet.part or ModelPart.of_job(job, stage)
        owned = part_params(job, part) / (shards if job.distributed_optimizer else 1)
        alone, *more = np.sum(list(part_memory(job, part, holdings, window, owned).values()), axis=0)
        taken.append([alone, *((one - alone) / _MANY for one in more)])
    return np.array(taken)
