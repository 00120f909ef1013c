"""What each rank does in an iteration, and which of them the others wait for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from megatron_hexi.cluster import Cluster
from megatron_hexi.cost.arrays import Floats, Ints
from megatron_hexi.cost.layer import Pass
from megatron_hexi.cost.memory import GIB, Memory, unit_memory
from megatron_hexi.cost.placement import Placement
from megatron_hexi.cost.plan_arrays import PlanArrays
from megatron_hexi.cost.stage import StageCost


@dataclass(frozen=True)
class RankCost:
    """One rank's part of an iteration; times are seconds and add up to the iteration.

    Args:
        rank: its number in the job.
        gpu: its number in the cluster.
        name: of the GPU, for people: ``h100-0/3``.
        device: model of GPU.
        stage: its pipeline stage.
        unit: its member of the plan.
        token_s: matrices and norms on its tokens, recomputation included.
        attention_s: attention on its heads, likewise.
        logits_s: output matrix and loss.
        optimizer_s: its optimizer step.
        communication_s: its own communication, as far as nothing hides it.
        idle_s: waiting for slower ranks, and for a pipeline to fill and drain.
        memory: its peak.
        usable_gib: what the GPU has for it.
    """

    rank: int
    gpu: int
    name: str
    device: str
    stage: int
    unit: int
    token_s: float
    attention_s: float
    logits_s: float
    optimizer_s: float
    communication_s: float
    idle_s: float
    memory: Memory
    usable_gib: float

    @property
    def compute_s(self) -> float:
        """All its own work."""
        return self.token_s + self.attention_s + self.logits_s + self.optimizer_s

    @property
    def memory_gib(self) -> float:
        """Its peak memory, GiB."""
        return self.memory.total / GIB


@dataclass(frozen=True)
class Pace:
    """The rank with the most of one kind of work."""

    phase: str
    rank: int
    name: str
    seconds: float


def paces(ranks: Sequence[RankCost]) -> tuple[Pace, ...]:
    """For each kind of work the rank that takes longest, the first of several."""
    found = []
    for phase in ("token", "attention", "logits", "optimizer"):
        slowest = max(ranks, key=lambda rank: getattr(rank, f"{phase}_s"))
        found.append(Pace(phase, slowest.rank, slowest.name, getattr(slowest, f"{phase}_s")))
    return tuple(found)


def rank_costs(
    plan: PlanArrays,
    cluster: Cluster,
    placement: Placement,
    costs: Sequence[StageCost],
    optimizer: Sequence[Floats],
    memory: Sequence[Mapping[str, Floats]],
    micro_batches: Ints,
    synchronisation: Sequence[float],
    iteration_s: float,
) -> tuple[RankCost, ...]:
    """One for each rank of the job, in Megatron's order.

    Args:
        plan: the plan.
        cluster: the cluster.
        placement: where the units are.
        costs: of each stage.
        optimizer: seconds of each stage's units.
        memory: of each stage's units.
        micro_batches: of each replica.
        synchronisation: what each replica waits for gradients and weights.
        iteration_s: the whole.
    """
    ranks: list[RankCost] = []
    turns = micro_batches[plan.unit_replica]
    for stage, cost in enumerate(costs):
        times = turns * cost.layers
        token = times * sum(one.token for one in cost.passes)
        attention = times * sum(one.attention for one in cost.passes)
        waits = times * sum(_own_communication(plan, one) for one in cost.passes)
        logits, waits = turns * cost.logits, waits + turns * (cost.logits_sum + cost.pipeline_s)
        for unit, gpus in enumerate(placement.gpus[stage]):
            parts = {
                "token_s": float(token[unit]),
                "attention_s": float(attention[unit]),
                "logits_s": float(logits[unit]),
                "optimizer_s": float(optimizer[stage][unit]),
                "communication_s": float(waits[unit]) + synchronisation[plan.unit_replica[unit]],
            }
            for gpu in map(int, gpus):
                device = cluster.ranks[gpu].device
                ranks.append(
                    RankCost(
                        rank=len(ranks),
                        gpu=gpu,
                        name=cluster.rank_name(gpu),
                        device=device.name,
                        stage=stage,
                        unit=unit,
                        **parts,
                        # Rounding must not make a rank that never waits wait less than nothing.
                        idle_s=max(0.0, iteration_s - sum(parts.values())),
                        memory=unit_memory(memory[stage], unit),
                        usable_gib=device.usable_gib,
                    )
                )
    return tuple(ranks)


def _own_communication(plan: PlanArrays, one: Pass) -> Floats:
    """Seconds of a layer; of waits in the exchange what the whole replica bears, the rest is idleness."""
    exchange = np.zeros(len(plan.tokens))
    for replica in np.unique(plan.unit_replica):
        units = np.flatnonzero(plan.unit_replica == replica)
        exchange[units] = np.minimum(one.exchange[units], one.exposed_exchange(units))
    return one.tensor_parallel + one.all_to_all_in + exchange + one.all_to_all_out
