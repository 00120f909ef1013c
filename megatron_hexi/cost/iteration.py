"""Seconds of an iteration, and the work of each rank in it.

layer     = the slowest group of a domain, as in layer.py; the backward pass follows the recomputation
stage     = its slowest domain: layers x (forward + backward) + logits on the last stage + sends that are
            waited for
replica   = its passes in their order (pipeline.py); in 1F1B, in closed form, the sum of its stages and
            borders + (micro-batches - 1) x a period (period.py)
iteration = slowest replica with its exposed communication of gradients and weights + optimizer
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from megatron_hexi.cluster import Cluster
from megatron_hexi.cost.arrays import Floats, Ints
from megatron_hexi.cost.borders import BorderTables, border_seconds, interleaved_borders
from megatron_hexi.cost.ceiling import ceiling_tokens_per_s
from megatron_hexi.cost.expert_messages import ExpertExchanges
from megatron_hexi.cost.experts import expert_cycles, place_experts
from megatron_hexi.cost.hosts import HostMemoryUse, Hosts
from megatron_hexi.cost.job_check import check_job
from megatron_hexi.cost.known_layers import KnownLayers
from megatron_hexi.cost.lanes import Passing
from megatron_hexi.cost.layer_bytes import input_bytes
from megatron_hexi.cost.library_bytes import message_buffer_bytes, message_channels
from megatron_hexi.cost.model_part import ModelPart
from megatron_hexi.cost.network import LinkTable
from megatron_hexi.cost.phases import Phases
from megatron_hexi.cost.pipeline import Pipeline
from megatron_hexi.cost.placement import Placer
from megatron_hexi.cost.ranks import Pace, RankCost, paces, rank_costs
from megatron_hexi.cost.replica_pipelines import ministage_parts, replica_lanes, replica_pipelines
from megatron_hexi.cost.rings import Rings
from megatron_hexi.cost.sections import Section, plan_sections
from megatron_hexi.cost.stage import stage_cost
from megatron_hexi.cost.throughput import Throughput
from megatron_hexi.cost.timing import Timing
from megatron_hexi.mesh import Mesh
from megatron_hexi.models.job import Job
from megatron_hexi.plan import Plan

#: Standard deviation over mean of the speeds of GPUs of one model in one cluster: 8 % in the mean between the
#: ends of a box plot's whiskers, which are 5.4 deviations apart (Sinha et al., Not All GPUs Are Created
#: Equal, SC22, arXiv 2208.11035: five clusters, 18,800 hours).
VARIATION = 0.08 / 5.4


def spread(count: int) -> float:
    """Return the part by which computation takes longer on the slowest GPU: c sqrt(2 ln N).

    That is by how much the largest of many normal numbers exceeds their mean.

    Args:
        count: GPUs that wait for each other and whose rates are the catalogue's, measured on single cards; 0:
            the cluster file's rates are of its slowest GPUs already, and nothing is added.
    """
    return VARIATION * math.sqrt(2 * math.log(count)) if count else 0.0


@dataclass(frozen=True)
class IterationCost:
    """The predicted time and memory of an iteration.

    Args:
        iteration_s: seconds of an iteration.
        tokens_per_s: global batch x sequence length / `iteration_s`.
        ceiling_tokens_per_s: tokens/s if all GPUs worked at their best rates, without communication.
        phases: seconds by phase along the critical path; they add up to `iteration_s`.
        paces: the slowest rank of each kind of work.
        ranks: time and memory of each rank of the job, by rank.
        throughput: `tokens_per_s` per GPU, as model FLOP/s, and as a part of the datasheet's rate.
        host_loads: loads of the nodes whose host memory is used.
    """

    iteration_s: float
    tokens_per_s: float
    ceiling_tokens_per_s: float
    phases: Phases
    paces: tuple[Pace, ...]
    ranks: tuple[RankCost, ...]
    throughput: Throughput
    host_loads: tuple[HostMemoryUse, ...] = ()

    @property
    def idle_share(self) -> float:
        """Part of the time of all ranks in which they neither compute nor communicate, from 0 to 1."""
        return sum(rank.idle_s for rank in self.ranks) / (len(self.ranks) * self.iteration_s)

    @property
    def memory_gib(self) -> tuple[float, ...]:
        """Peak memory of each rank, GiB."""
        return tuple(rank.memory_gib for rank in self.ranks)

    @property
    def fits(self) -> bool:
        """Whether every rank's memory suffices, and every node's."""
        gpus = all(rank.memory_gib <= rank.usable_gib for rank in self.ranks)
        return gpus and all(load.fullness <= 1 for load in self.host_loads)


class CostModel:
    """Predicts time and memory of plans for one job on one cluster.

    Tables that do not depend on the plan are computed once.

    Args:
        shards: number of units that share the optimizer's state, if the plans are parts of a larger plan;
            ``None``: the units of the plan.
        part: the units' part of the model, if the plans are one stage of several; ``None``: the part that job
            and plan give them.
        has_free_nodes: whether rows of experts travel once to each node wherever that is faster, for plans
            that will name nodes by it (`Stage.expert_nodes`).
    """

    def __init__(
        self,
        job: Job,
        cluster: Cluster,
        shards: int | None = None,
        part: ModelPart | None = None,
        *,
        has_free_nodes: bool = False,
    ) -> None:
        self.job = job
        self.cluster = cluster
        self.shards = shards
        self.part = part
        self.links = LinkTable(cluster)
        self._layers, self._borders = KnownLayers(self.links), BorderTables()
        self._exchanges = ExpertExchanges(self.links, is_free=has_free_nodes)
        self.rings = Rings(self.links)
        self.hosts = Hosts(cluster)
        self._placer = Placer(job, cluster)
        self._single_cards = np.array([rank.device.of_single_cards for rank in cluster.ranks])
        self._channels = np.array([message_channels(rank.device) for rank in cluster.ranks])

    def estimate(self, plan: Plan, gpus: Sequence[int] | None = None) -> IterationCost:
        """Predict time and memory of a plan.

        Args:
            gpus: number in the cluster of each rank's GPU; ``None``: the GPUs that the plan names, or else
                all of the cluster in file order.

        Raises:
            PlanError: the plan was made for another job.
            ClusterError: the plan's units do not match the cluster, or a GPU cannot do the job.
        """
        timing = self.timing(plan, gpus)
        total = timing.phases.total
        ranks = rank_costs(self.cluster, timing)
        devices = [self.cluster.ranks[rank.gpu].device for rank in ranks]
        tokens_per_s = self.job.global_batch_size * self.job.seq_length / total
        return IterationCost(
            iteration_s=total,
            tokens_per_s=tokens_per_s,
            ceiling_tokens_per_s=ceiling_tokens_per_s(
                least_recomputed(self.job, timing.sections), devices, plan.workload.causal
            ),
            phases=timing.phases,
            paces=paces(ranks),
            ranks=ranks,
            throughput=Throughput.of(self.job, devices, tokens_per_s),
            host_loads=timing.host_loads,
        )

    def timing(self, plan: Plan, gpus: Sequence[int] | None = None) -> Timing:
        """Return time and memory of a plan as arrays over units; for arguments and errors see `estimate`."""
        job = self.job
        micro_batches = check_job(plan, job)
        sections = plan_sections(plan, job, self._placer, gpus, self.part, micro_batches=micro_batches)
        experts = place_experts(plan, job, sections)
        cycles = expert_cycles(sections, experts, self._exchanges)
        mesh = Mesh.of(plan, job.micro_batch_size, job.sequence_parallel)
        following: list[Ints | None] = [None] * len(sections)
        if mesh is None:  # sends are exposed, and with chunks the first stage follows the last
            gpus_of_stages = [section.placement.stage.gpus for section in sections]
            following = [*gpus_of_stages[1:], gpus_of_stages[0] if job.virtual_stages > 1 else None]
        costs = [
            stage_cost(section, self._layers, behind, cycle)
            for section, behind, cycle in zip(sections, following, cycles, strict=True)
        ]
        return Timing(self, plan, mesh, sections, costs, micro_batches, experts)

    def pipelines(self, timing: Timing) -> tuple[Pipeline, ...]:
        """Return the pipeline of each replica."""
        job, sections, micro_batches = self.job, timing.sections, timing.micro_batches
        borders, parts = None, {}
        if timing.mesh is not None:
            borders = border_seconds(timing.mesh, job, sections, self.links, micro_batches, self._borders)
            parts = ministage_parts(sections, timing.stages)
        elif job.virtual_stages > 1:
            borders = interleaved_borders(job, sections, self.links, micro_batches)
        passing = self._with_rows(sections, timing.reductions.passing)
        lanes = replica_lanes(
            sections, ((cost.replicas, cost.forward_s) for cost in timing.stages), micro_batches
        )
        return replica_pipelines(timing.plan, lanes, borders, passing, parts, chunks=job.virtual_stages)

    def spread(self, sections: Sequence[Section]) -> float:
        """Return the part by which the slowest GPU's computation takes longer than its kind's."""
        return spread(int(sum(self._single_cards[section.placement.gpus].sum() for section in sections)))

    def _with_rows(
        self, sections: Sequence[Section], passing: Mapping[tuple[int, int], Passing]
    ) -> dict[tuple[int, int], Passing]:
        """Return the transfers with the seconds of copying a micro-batch's rows to or from host memory added.

        Those of the slowest unit of each stage count.
        """
        found = dict(passing)
        for section in sections:
            on_host = np.asarray(section.part.rows_on_host, dtype=float)
            if not on_host.any():
                continue
            size = on_host * input_bytes(section.job, section.arrays.tokens.astype(float))
            seconds = self.hosts.copy_seconds(section.placement.stage.gpus, size)
            for replica, one in zip(section.replica.tolist(), seconds.tolist(), strict=True):
                stage = replica, section.number
                if one > 0:
                    found[stage] = replace(found[stage], rows=max(found[stage].rows, one))
        return found

    def message_buffers(self, section: Section) -> Floats:
        """Return the bytes of NCCL's message buffers of each unit of a section, [U]; 0 without CUDA."""
        first = section.placement.gpus[:, 0]
        return message_buffer_bytes(section.arrays, self._placer.nodes[first], self._channels[first])


def least_recomputed(job: Job, sections: Sequence[Section]) -> Job:
    """Return the job with the recomputation that all sections do in all layers, or without any."""
    modes = {section.job.recompute for section in sections}
    everything = all(np.all(section.parts.again == section.parts.layers) for section in sections)
    return replace(job, recompute=modes.pop() if len(modes) == 1 and everything else "none")


def estimate(plan: Plan, job: Job, cluster: Cluster, gpus: Sequence[int] | None = None) -> IterationCost:
    """Predict time and memory of a plan; for many plans of one job use `CostModel.estimate`."""
    return CostModel(job, cluster).estimate(plan, gpus)
