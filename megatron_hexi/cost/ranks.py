"""Work and memory of each rank in an iteration, and the slowest rank of each kind of work."""

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
    """A rank's time in an iteration, and its memory; times are seconds and add up to the iteration.

    Args:
        rank: the rank's number in the job.
        gpu: its GPU's number in the cluster.
        name: name of its GPU, for people, such as ``h100-0/3``.
        device: model of its GPU.
        stage: number of its pipeline stage in the replica.
        unit: number of its unit: in the stage for a plan with a repeated stage, else in the plan.
        token_s: matrices, norms and routed experts on its tokens, recomputation included.
        attention_s: core attention on its heads, recomputation included.
        logits_s: output matrix and loss.
        optimizer_s: the optimizer's step.
        communication_s: the rank's exposed communication.
        idle_s: waiting for slower ranks, and for a pipeline to fill and drain.
        memory: peak of its GPU's memory, by term.
        usable_gib: memory of its GPU that a job may use, GiB.
        host_memory: host memory that its stage takes for this GPU, by term.
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
        """Seconds in which the rank computes."""
        return self.token_s + self.attention_s + self.logits_s + self.optimizer_s

    @property
    def memory_gib(self) -> float:
        """Peak of the GPU's memory, GiB."""
        return self.memory.total / GIB


@dataclass(frozen=True)
class Pace:
    """The rank that computes longest in one phase, and its seconds."""

    phase: str
    rank: int
    name: str
    seconds: float


def paces(ranks: Sequence[RankCost]) -> tuple[Pace, ...]:
    """Return the slowest rank of each kind of work; of equally slow ranks the first."""
    found = []
    for phase in ("token", "attention", "logits", "optimizer"):
        slowest = max(ranks, key=lambda rank: getattr(rank, f"{phase}_s"))
        found.append(Pace(phase, slowest.rank, slowest.name, getattr(slowest, f"{phase}_s")))
    return tuple(found)


def rank_costs(cluster: Cluster, timing: Timing) -> tuple[RankCost, ...]:
    """Return time and memory of each rank of the job, by rank."""
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
    """Return the seconds of each unit's exposed communication in a pass of a layer, [U].

    A unit's wait in the exchange counts up to the exposed time of its whole domain; the rest is idle time.
    """
    exchange = np.zeros(len(plan.tokens))
    for replica in np.unique(plan.unit_replica):
        units = np.flatnonzero(plan.unit_replica == replica)
        exchange[units] = np.minimum(one.exchange[units], one.exposed_exchange(units))
    return one.tensor_parallel + one.all_to_all_in + exchange + one.all_to_all_out + one.expert_exchange
