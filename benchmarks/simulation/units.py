"""Tensor- and pipeline-parallel size of a cell: given, the same for every method, chosen for the baselines.

The fewest GPUs a unit with which a uniform layout fits in memory; of equal ones, those with which the
strongest uniform layout is fastest. Where none fits at all: those with which a plan of ours is fastest.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace

from benchmarks.simulation.cells import load_cluster
from megatron_hexi.cluster import Cluster
from megatron_hexi.errors import HexiError
from megatron_hexi.models import Job
from megatron_hexi.planner import CHOSEN, Request, find_plan
from megatron_hexi.planner.baselines import find_baselines
from megatron_hexi.planner.fleet.units import find_units

#: Tensor parallelism stays inside a node of 8.
TENSOR_PARALLEL = (1, 2, 4, 8)
PIPELINE_PARALLEL = (1, 2, 4)
#: GPUs that hold one copy of the weights, at most.
_MOST = 16


def as_asked(job: Job, data_parallel: int | None) -> Request:
    """The job with everything fixed as the suite has it.

    Args:
        job: the job.
        data_parallel: replicas; ``None``: the planner's to choose.
    """
    if data_parallel is None:
        return Request(job, frozenset(CHOSEN) - {"data_parallel"})
    return Request(replace(job, data_parallel=data_parallel), frozenset(CHOSEN))


@functools.cache
def find_unit(job: Job, names: tuple[str, ...]) -> tuple[int, int] | None:
    """Tensor- and pipeline-parallel size for a job that must fit on all of the clusters.

    Args:
        job: with one replica; its own two sizes are not looked at.
        names: of the clusters.

    Returns:
        The two sizes; ``None``: nothing fits, whatever they are.
    """
    clusters = [load_cluster(name) for name in names]
    for choices in _by_size(job):
        speeds = {one: min(_uniform_tokens_per_s(one, cluster) for cluster in clusters) for one in choices}
        best = max(speeds, key=lambda one: speeds[one])
        if speeds[best] > 0:
            return best.tensor_parallel, best.pipeline_parallel
    every = [one for choices in _by_size(job) for one in choices]
    speeds = {one: min(_plan_tokens_per_s(one, cluster) for cluster in clusters) for one in every}
    best = max(speeds, key=lambda one: speeds[one])
    return (best.tensor_parallel, best.pipeline_parallel) if speeds[best] > 0 else None


def _by_size(job: Job) -> Sequence[Sequence[Job]]:
    """Jobs that the model allows, by the GPUs of a unit."""
    found: dict[int, list[Job]] = {}
    for tensor in TENSOR_PARALLEL:
        for pipeline in PIPELINE_PARALLEL:
            if tensor * pipeline > _MOST:
                continue
            try:
                one = replace(job, tensor_parallel=tensor, pipeline_parallel=pipeline)
            except HexiError:
                continue  # heads or layers that do not divide
            found.setdefault(tensor * pipeline, []).append(one)
    return [found[size] for size in sorted(found)]


def _uniform_tokens_per_s(job: Job, cluster: Cluster) -> float:
    """Of the strongest uniform layout; 0 where none fits."""
    try:
        units = len(find_units(job, cluster).units)
        if units * job.tensor_parallel * job.pipeline_parallel < len(cluster.ranks):
            return 0.0  # a unit that leaves GPUs out is no setting for this cluster
    except HexiError:
        return 0.0
    baselines, _ = find_baselines(as_asked(job, 1), cluster)
    return max((one.tokens_per_s or 0.0 for one in baselines if one.uniform), default=0.0)


def _plan_tokens_per_s(job: Job, cluster: Cluster) -> float:
    """Of the best plan; 0 where nothing fits."""
    try:
        return find_plan(as_asked(job, 1), cluster).cost.tokens_per_s
    except HexiError:
        return 0.0
