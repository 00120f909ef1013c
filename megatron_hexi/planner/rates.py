"""What each unit achieves at its best: the first guess of a balance, and the currency of bounds."""

from __future__ import annotations

import numpy as np

from megatron_hexi.cost import Job, attention_seconds, token_seconds
from megatron_hexi.cost.compute import device_speeds
from megatron_hexi.planner.units import Fleet, Kind


class Rates:
    """Best rates of a fleet's units, [U].

    A group of G tokens takes G / sum(token) for its token work and max(G x heads / attention) for attention,
    seconds of all passes through all layers of a micro-batch.

    Args:
        fleet: the units.
    """

    def __init__(self, fleet: Fleet) -> None:
        self.local_heads = fleet.job.workload().local_heads
        by_kind = [_rates(fleet.job, kind) for kind in fleet.kinds]
        kinds = np.array([unit.kind for unit in fleet.units])
        #: Tokens a second of everything but attention.
        self.token = np.array([token for token, _ in by_kind])[kinds]
        #: Tokens x heads a second of attention, heads of one tensor-parallel rank.
        self.attention = np.array([attention for _, attention in by_kind])[kinds]


def _rates(job: Job, kind: Kind) -> tuple[float, float]:
    speeds = [device_speeds(device, job) for device in kind.devices]
    token = min(job.tensor_parallel / token_seconds(one, job) for one in speeds)
    attention = min(job.model.heads / attention_seconds(one, job, causal=True) for one in speeds)
    return token, attention
