"""Best rates of units and their memory for tokens: the first guess of a balance."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy

import numpy as np

from megatron_hexi.cost import attention_seconds, token_seconds
from megatron_hexi.cost.arrays import Floats
from megatron_hexi.cost.compute import device_speeds
from megatron_hexi.cost.memory import GIB, token_bytes
from megatron_hexi.cost.model_part import ModelPart
from megatron_hexi.planner.fleet.units import Fleet


class Rates:
    """Best rates of a fleet's units, [U].

    A group of G tokens takes G / sum(token) for its token work and max(G x heads / attention) for attention,
    seconds of all passes through all layers of a micro-batch.

    Args:
        window: prefetch depth of the exchange, in steps.
        shards: units that share the optimizer's state; ``None``: the fleet's.
        micro_batches: micro-batches of an iteration; a pipeline keeps several at a time.
    """

    def __init__(
        self, fleet: Fleet, window: int = 1, shards: int | None = None, micro_batches: int = 1
    ) -> None:
        job, kinds = fleet.job, np.array([unit.kind for unit in fleet.units])
        self.local_heads = job.workload().local_heads
        speeds = [[device_speeds(device, job) for device in kind.devices] for kind in fleet.kinds]
        token = [[token_seconds(speed, job, with_experts=False) for speed in stages] for stages in speeds]
        #: Tokens a second of all work but attention.
        self.token = (job.tensor_parallel / np.max(token, axis=1))[kinds]
        attention = [[attention_seconds(speed, job, causal=True) for speed in stages] for stages in speeds]
        #: Tokens x heads a second of attention, heads of one tensor-parallel rank.
        with np.errstate(divide="ignore"):  # a pattern may have an MLP in each layer: no attention, no time
            self.attention = (job.model.heads / np.max(attention, axis=1))[kinds]
        # The copies of one kind of GPU are counted on all: a first guess.
        copies = min(speed.fp8_copies for stages in speeds for speed in stages)
        taken = _stage_bytes(fleet, window, shards or len(fleet.units), micro_batches, copies)
        usable = np.array([[device.usable_gib * GIB for device in kind.devices] for kind in fleet.kinds])
        #: Bytes of memory for tokens, on the stage that has least.
        self.free = np.maximum(0.0, usable - taken[:, 0]).min(axis=1)[kinds]
        #: Bytes of a token held, and of a head of a token attended to, on the stage that needs most.
        self.token_bytes = float(taken[:, 1].max())
        self.head_bytes = float(taken[:, 2].max()) / self.local_heads

    def of(self, units: Sequence[int]) -> Rates:
        """Return the rates of some of the units, with the memory that these have beside all others."""
        some = copy(self)
        some.token, some.attention, some.free = (
            values[list(units)] for values in (self.token, self.attention, self.free)
        )
        return some


def _stage_bytes(fleet: Fleet, window: int, shards: int, micro_batches: int, fp8_copies: float) -> Floats:
    """Return bytes of each stage: without tokens, per token held, per token attended to, [stages, 3]."""
    job = fleet.job
    parts = [fleet.part or ModelPart.of_job(job, stage) for stage in range(job.pipeline_parallel)]
    return np.array([token_bytes(job, part, window, shards, micro_batches, fp8_copies) for part in parts])
