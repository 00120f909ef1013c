"""A time that no layout can beat, and the memory that every layout needs: sums over all GPUs of a cluster.

No plan takes less than all GPUs at their best rates, without communication, waiting, or recomputation that is
not fixed. No plan fits where all GPUs and hosts together have less memory than one copy of weights, gradients
and optimizer state takes, with each layer's input for one micro-batch, which any recomputation keeps.

`benchmarks/proof` has a tighter bound, a linear program that also counts idle time in pipelines and the
memory of each GPU.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from megatron_hexi.cluster import Cluster
from megatron_hexi.cost import ceiling_tokens_per_s
from megatron_hexi.cost.hosts import Hosts
from megatron_hexi.cost.layer_bytes import input_bytes
from megatron_hexi.cost.memory import GIB, RESERVE_BYTES, static_memory
from megatron_hexi.cost.model_part import ModelPart
from megatron_hexi.planner.request import Request


@dataclass(frozen=True)
class Bound:
    """A lower bound of the iteration time over all layouts.

    Args:
        iteration_s: seconds of an iteration.
        reason: why no layout is faster, one sentence for people.
    """

    iteration_s: float
    reason: str


def lower_bound(request: Request, cluster: Cluster, found_s: float = math.inf) -> Bound:
    """Return the lower bound over all layouts.

    Args:
        request: the job, with the terms that are fixed.
        found_s: seconds of an iteration that is known to be possible; the bound is at most that.

    Raises:
        ClusterError: a GPU cannot do the job.
    """
    job = request.job if "recompute" in request.fixed else replace(request.job, recompute="none")
    devices = [rank.device for rank in cluster.ranks]
    least_s = job.global_batch_size * job.seq_length / ceiling_tokens_per_s(job, devices)
    return Bound(min(least_s, found_s), f"all GPUs at their best rates take {least_s:.4g} s")


def memory_fits(request: Request, cluster: Cluster) -> bool:
    """Whether some layout may fit in memory; if not, none fits."""
    job = replace(request.job, tensor_parallel=1, pipeline_parallel=1)
    job = replace(job, micro_batch_size=request.micro_batch_sizes()[0])
    params = job.model.total_params
    static = sum(static_memory(job, ModelPart.of_job(job, 0), params, params, params).values())
    inputs = job.model.layers * float(input_bytes(job, np.array(float(job.seq_length))))
    host = Hosts(cluster).bytes if request.rules.allow("offload") else 0.0
    usable = sum(max(0.0, rank.device.usable_gib * GIB - RESERVE_BYTES) for rank in cluster.ranks)
    return float(static) + inputs <= usable + host
