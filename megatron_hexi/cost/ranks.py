"""Work and memory of each rank in an iteration, and the slowest rank of each kind of work."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from megatron_hexi.cluster import Cluster
from megatron_hexi.cost.arrays import Floats
from megatron_hexi.cost.layer import Pass
from megatron_hexi.cost.memory import GIB
from megatron_hexi.cost.memory_terms import HostMemoryTerms, Memory
from megatron_hexi.cost.once import replica_waits
from megatron_hexi.cost.plan_arrays import PlanArrays
from megatron_hexi.cost.sections import Section
from megatron_hexi.cost.timing import Timing


@dataclass(frozen=True)
class RankPlace:
    """A rank of the job, its GPU, and its place in the plan.

    Args:
        gpu: its GPU's number in the cluster.
        name: name of its GPU, for people, such as ``h100-0/3``.
        device: model of its GPU.
        stage: number of its pipeline stage in the replica.
        unit: number of its unit: in the stage for a plan with a repeated stage, else in the plan.
    """

    rank: int
    gpu: int
    name: str
    device: str
    stage: int
    unit: int


@dataclass(frozen=True)
class RankCost(RankPlace):
    """A rank's time in an iteration, and its memory; times are seconds and add up to the iteration.

    Args:
        token_s: matrices, norms and routed experts on its tokens and its images' encoder, recomputation
            included.
        attention_s: core attention on its heads, recomputation included.
        logits_s: output matrix and loss.
        optimizer_s: the optimizer's step.
        communication_s: the rank's exposed communication.
        idle_s: waiting for slower ranks, and for a pipeline to fill and drain.
        memory: peak of its GPU's memory, by term.
        usable_gib: memory of its GPU that a job may use, GiB.
        host_memory: host memory that its stage takes for this GPU, by term.
    """

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
    waited = np.array(replica_waits(timing.once, len(timing.pipelines)))
    for section, cost, optimizer, memory, host_memory in zip(
        timing.sections, timing.stages, timing.optimizer, timing.memory, timing.host_memory, strict=True
    ):
        plan = section.arrays
        turns = section.turns(timing.micro_batches)
        passes = list(zip(cost.repeats, cost.passes, strict=True))
        waits = sum(times * _own_communication(plan, one) for times, one in passes)
        busy = {"encoder": 0.0} | {end.name: end.busy for end in cost.ends}
        times = {
            "token_s": turns
            * (sum(times * (one.token + one.experts) for times, one in passes) + busy["encoder"]),
            "attention_s": turns * sum(times * one.attention for times, one in passes),
            "logits_s": turns * busy["logits"],
            "optimizer_s": optimizer,
            "communication_s": turns
            * (waits + sum(sum((*end.sums, *end.sent)) for end in cost.ends) + cost.pipeline_s)
            + waited[section.replica],
        }
        for number, place in section_ranks(cluster, section):
            parts: dict[str, Any] = {name: float(values[number]) for name, values in times.items()}
            ranks.append(
                RankCost(
                    **vars(place),
                    **parts,
                    # Rounding must not make a rank that never waits wait less than nothing.
                    idle_s=max(0.0, timing.phases.total - sum(parts.values())),
                    memory=Memory.of_unit(memory, number),
                    usable_gib=cluster.ranks[place.gpu].device.usable_gib,
                    host_memory=HostMemoryTerms.of_unit(host_memory, number),
                )
            )
    return tuple(sorted(ranks, key=lambda rank: rank.rank))


def section_ranks(cluster: Cluster, section: Section) -> Iterator[tuple[int, RankPlace]]:
    """Yield the ranks of a section's units, each with the number of its unit in the section."""
    for number, unit in enumerate(section.units.tolist()):
        both = zip(section.ranks[number].tolist(), section.placement.gpus[number].tolist(), strict=True)
        for rank, gpu in both:
            device = cluster.ranks[gpu].device.name
            yield number, RankPlace(rank, gpu, cluster.rank_name(gpu), device, section.number, unit)


def _own_communication(plan: PlanArrays, one: Pass) -> Floats:
    """Return the seconds of each unit's exposed communication in a pass of a layer, [U].

    A unit's wait in the exchange counts up to the exposed time of its whole domain; the rest is idle time.
    """
    exchange = np.zeros(len(plan.tokens))
    for replica in np.unique(plan.unit_replica):
        units = np.flatnonzero(plan.unit_replica == replica)
        exchange[units] = np.minimum(one.exchange[units], one.exposed_exchange(units))
    return one.tensor_parallel + one.all_to_all_in + exchange + one.all_to_all_out + one.expert_exchange
