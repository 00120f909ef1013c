"""Plans of what HexiScale and Zorse choose, for the cost model to time."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

from benchmarks.rivals import hexiscale, zorse
from megatron_hexi.cluster import Cluster
from megatron_hexi.cost import CostModel
from megatron_hexi.models import Job
from megatron_hexi.plan import Domain, Group, JobTerms, Member, Plan, Replica, Stage
from megatron_hexi.plan.terms import Offload
from megatron_hexi.planner.joint import Candidate
from megatron_hexi.planner.joint.placing import StagePlace, number_ranks

#: What waits in host memory, the first that fits.
_OFFLOADS: tuple[tuple[Offload, ...], ...] = (
    ("activations",),
    ("parameters", "activations"),
    ("parameters", "optimizer", "activations"),
)


def hexiscale_plan(
    cluster: Cluster, job: Job, pipelines: Sequence[hexiscale.Pipeline], size: int
) -> Candidate:
    """Return HexiScale's layout, timed: every layer recomputed, the same batch for all pipelines.

    Args:
        cluster: the cluster.
        job: the job.
        pipelines: what was chosen, by the cluster's numbers of GPUs.
        size: samples of a micro-batch of a pipeline.
    """
    units = [[[unit] for unit, _ in pipeline] for pipeline in pipelines]
    gpus, ranks = _ranks(cluster, units)
    replicas = []
    for pipeline in pipelines:
        ends = list(itertools.accumulate([0, *(layers for _, layers in pipeline)]))
        stages = (
            Stage((_domain(job, ranks, unit),), layers=layers, recompute="full")
            for (unit, _), layers in zip(pipeline, itertools.pairwise(ends), strict=True)
        )
        replicas.append(Replica(tuple(stages), job.global_batch_size // size // len(pipelines)))
    widths = {len(unit) for pipeline in pipelines for unit, _ in pipeline}
    width = widths.pop() if len(widths) == 1 else 0
    base = replace(job, micro_batch_size=size, tensor_parallel=width or 1, data_parallel=len(pipelines))
    return _timed(
        cluster, base, Plan(replace(base.workload(), tensor_parallel=width), tuple(replicas), gpus=gpus)
    )


def zorse_plan(cluster: Cluster, job: Job, choice: zorse.Choice) -> Candidate:
    """Return Zorse's layout, timed: ministages, recomputed, whose inputs wait in host memory.

    Weights wait there, too, where it fits in no other way, and the optimizer's state if still nothing fits.
    GPUs that take no micro-batch are left out.

    Args:
        cluster: the cluster.
        job: the job.
        choice: what was chosen, by the cluster's numbers of GPUs.
    """
    busy = [
        [(gpu, count) for gpu, count in zip(group, counts, strict=True) if count]
        for group, counts in zip(choice.groups, choice.micro_batches, strict=True)
    ]
    gpus, ranks = _ranks(cluster, [[[(gpu,) for gpu, _ in group] for group in busy]])
    ends = list(itertools.accumulate([0, *map(sum, choice.layers)]))
    base = replace(job, micro_batch_size=choice.size, data_parallel=1)
    terms = JobTerms(micro_batch_size=choice.size)
    stages = []
    for group, parts, layers in zip(busy, choice.layers, itertools.pairwise(ends), strict=True):
        domains = [replace(_domain(job, ranks, (gpu,)), micro_batches=count) for gpu, count in group]
        if len(domains) == 1:
            domains = [replace(domains[0], micro_batches=None)]
        domains.sort(key=lambda domain: domain.members[0].lead)
        stages.append(Stage(tuple(domains), layers=layers, recompute="full", ministages=parts))
    found = []
    for offload in _OFFLOADS:
        whole = tuple(replace(stage, offload=offload) for stage in stages)
        replica = Replica(whole, job.global_batch_size // choice.size)
        found.append(_timed(cluster, base, Plan(base.workload(), (replica,), job=terms, gpus=gpus)))
    return next((candidate for candidate in found if candidate.fits), found[-1])


def _ranks(
    cluster: Cluster, units: Sequence[Sequence[Sequence[tuple[int, ...]]]]
) -> tuple[tuple[int, ...] | None, dict[int, int]]:
    """Return the GPU of each rank, ``None``: in order, and the rank of each GPU.

    Args:
        cluster: the cluster.
        units: GPUs of each unit, by replica and stage.
    """
    placed = {
        StagePlace(r, s, len(stages)): [gpu for unit in stage for gpu in unit]
        for r, stages in enumerate(units)
        for s, stage in enumerate(stages)
    }
    gpus = number_ranks(cluster, placed)
    order = None if gpus == list(range(len(cluster.ranks))) else tuple(gpus)
    return order, {gpu: rank for rank, gpu in enumerate(gpus)}


def _domain(job: Job, ranks: dict[int, int], unit: tuple[int, ...]) -> Domain:
    """Return a domain of one tensor-parallel unit, which has all tokens and heads."""
    everything = (0, job.seq_length)
    heads = (0, job.model.heads // len(unit))
    member = Member(tuple(sorted(ranks[gpu] for gpu in unit)), job.seq_length, heads)
    return Domain((Group((everything,), (member,)),))


def _timed(cluster: Cluster, job: Job, plan: Plan) -> Candidate:
    model = CostModel(replace(job, recompute="none"), cluster)
    return Candidate(plan, model.job, model.timing(plan))
