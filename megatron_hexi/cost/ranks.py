"""Work and memory of each rank in an iteration, and the ranks that others wait for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megatron_hexi.cluster import Cluster
from megatron_hexi.cost.arrays import Floats
from megatron_hexi.cost.layer import Pass
from megatron_hexi.cost.memory import GIB, unit_host_memory, unit_memory
from megatron_hexi.cost.memory_terms import HostMemoryTerms, Memory
from megatron_hexi.cost.plan_arrays import PlanArrays
from megatron_hexi.cost.timing import Timing


@dataclass(frozen=True)
class RankCost:
    """One rank's part of an iteration; times are seconds and add up to the iteration.

    Args:
        rank: its number in the job.
        gpu: its number in the cluster.
        name: of the GPU, for people: ``h100-0/3``.
        device: model of GPU.
        stage: its pipeline stage.
        unit: its member: its number in the stage, or in a plan whose stages have layers of their own.
        token_s: matrices and norms on its tokens, recomputation included.
        attention_s: attention on its heads, likewise.
        logits_s: output matrix and loss.
        optimizer_s: its optimizer step.
        communication_s: its own communication, as far as nothing hides it.
        idle_s: waiting for slower ranks, and for a pipeline to fill and drain.
        memory: its peak.
        usable_gib: what the GPU has for it.
        host_memory: of it, what waits in host memory.
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
    host_memory: HostMemoryTerms

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


def rank_costs(cluster: Cluster, timing: Timing) -> tuple[RankCost, ...]:
    """One for each rank of the job.

    Args:
        cluster: the cluster.
        timing: what an iteration takes.
    """
    ranks: list[RankCost] = []
    waited = np.array(timing.synchronisation)
    for section, cost, optimizer, memory, host_memory in zip(
        timing.sections, timing.stages, timing.optimizer, timing.memory, timing.host_memory, strict=True
    ):
        plan = section.arrays
        turns = section.turns(timing.micro_batches)
        passes = list(zip(cost.repeats, cost.passes, strict=True))
        waits = sum(times * _own_communication(plan, one) for times, one in passes)
        times = {
            "token_s": turns * sum(times * (one.token + one.experts) for times, one in passes),
            "attention_s": turns * sum(times * one.attention for times, one in passes),
            "logits_s": turns * cost.logits,
            "optimizer_s": optimizer,
            "communication_s": turns * (waits + cost.logits_sum + cost.pipeline_s) + waited[section.replica],
        }
        for unit, numbers in enumerate(section.ranks):
            parts = {name: float(values[unit]) for name, values in times.items()}
            for rank, gpu in zip(numbers.tolist(), section.placement.gpus[unit].tolist(), strict=True):
                device = cluster.ranks[gpu].device
                ranks.append(
                    RankCost(
                        rank=rank,
                        gpu=gpu,
                        name=cluster.rank_name(gpu),
                        device=device.name,
                        stage=section.number,
                        unit=int(section.units[unit]),
                        **parts,
                        # Rounding must not make a rank that never waits wait less than nothing.
                        idle_s=max(0.0, timing.phases.total - sum(parts.values())),
                        memory=unit_memory(memory, unit),
                        usable_gib=device.usable_gib,
                        host_memory=unit_host_memory(host_memory, unit),
                    )
                )
    return tuple(sorted(ranks, key=lambda rank: rank.rank))


def _own_communication(plan: PlanArrays, one: Pass) -> Floats:
    """Seconds of a layer; of waits in the exchange what the whole domain bears, the rest is idleness."""
    exchange = np.zeros(len(plan.tokens))
    for replica in np.unique(plan.unit_replica):
        units = np.flatnonzero(plan.unit_replica == replica)
        exchange[units] = np.minimum(one.exchange[units], one.exposed_exchange(units))
    return one.tensor_parallel + one.all_to_all_in + exchange + one.all_to_all_out + one.expert_exchange
