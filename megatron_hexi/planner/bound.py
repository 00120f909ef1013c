"""A time that no layout can beat, and the memory that every layout needs: sums over all GPUs of a cluster.

No plan takes less than all GPUs at their best rates, without communication, waiting, or recomputation that is
not fixed. No plan fits where all GPUs and hosts together have less memory than one copy of the model's state
and one sequence's activations take.

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
from megatron_hexi.cost.memory import GIB, RESERVE_BYTES, static_memory, token_bytes
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
    job = job if "tensor_parallel" in request.fixed else replace(job, tensor_parallel=1)
    devices = [rank.device for rank in cluster.ranks]
    least_s = job.global_batch_size * job.seq_length / ceiling_tokens_per_s(job, devices)
    return Bound(min(least_s, found_s), f"all GPUs at their best rates take {least_s:.4g} s")


def memory_fits(request: Request, cluster: Cluster) -> bool:
    """Whether some layout may fit in memory; if not, none fits.

    With ministages of k of the L layers, L / k layer inputs wait, and k more are kept while a ministage runs:
    at least 2 sqrt(L) layer inputs.
    State and waiting inputs may lie in host memory, but not the layer that is being computed.
    """
    job, layers, waiting = replace(request.job, tensor_parallel=1), request.job.model.layers, 0.0
    if request.rules.allow("ministages"):
        request = replace(request, fixed=request.fixed - {"recompute"})
        waiting = float(input_bytes(job, np.array(float(job.seq_length)))) / job.micro_batch_size
    static, sequence, _ = bytes_once(request)
    on_device = sequence - layers * waiting
    rooms = sum(room(rank.device.usable_gib) for rank in cluster.ranks) * GIB
    host = Hosts(cluster).bytes if request.rules.allow("offload") else 0.0
    inputs = min(float(layers), 2 * math.sqrt(layers)) * waiting
    return on_device <= rooms and static + inputs + on_device <= rooms + host


def bytes_once(request: Request) -> tuple[float, float, float]:
    """Return the bytes that a job needs if nothing is held twice, on all GPUs together.

    Returns:
        Bytes of weights, gradients and optimizer state; bytes of one sequence's activations (all layers
        recomputed unless recomputation is fixed), with the layer and the loss being computed; and bytes that
        attention adds where the keys of the whole sequence are in flight.
    """
    job = replace(
        request.job,
        tensor_parallel=1,
        pipeline_parallel=1,
        virtual_stages=1,
        data_parallel=1,
        micro_batch_size=1,
        recompute=request.job.recompute if "recompute" in request.fixed else "full",
    )
    part, params = ModelPart.of_job(job, 0), job.model.total_params + job.model.mtp_params
    static = float(sum(static_memory(job, part, params, params, params).values()))
    _, held, attended = token_bytes(job, part, 1, 1, fp8_copies=float(job.precision == "fp8"))
    return static, job.seq_length * held, job.seq_length * attended


def room(usable_gib: float) -> float:
    """Return the usable memory of a GPU that libraries leave to the job, GiB."""
    return max(0.0, usable_gib - RESERVE_BYTES / GIB)


@dataclass(frozen=True)
class MissingMemory:
    """The memory that a job needs if nothing is held twice, and the memory of a cluster's GPUs, GiB.

    Args:
        static: memory of the whole model's weights, gradients and optimizer state.
        sequence: memory of one sequence's activations, with all layers recomputed unless recomputation is
            fixed, and of the layer and the loss that are being computed.
        there: memory of all GPUs, less what libraries take.
        counts: for each entry of the cluster file, the number of its nodes that would suffice; empty if the
            memory suffices already, or if nodes of the file are lost.
    """

    static: float
    sequence: float
    there: float
    counts: dict[str, int]

    @property
    def gib(self) -> float:
        """Missing memory, GiB; 0 or less if the GPUs together have enough."""
        return self.static + self.sequence - self.there


def missing_memory(request: Request, cluster: Cluster) -> MissingMemory:
    """Return by how much the GPUs' memory falls short of one copy of everything, without host memory.

    A plan may need more, because layers are whole and replicas repeat weights, or less, because it offloads.
    """
    once = [size / GIB for size in bytes_once(request)]
    static, sequence = once[0], once[1] + once[2]
    there = sum(room(rank.device.usable_gib) for rank in cluster.ranks)
    missing = static + sequence - there
    counts = {}
    if missing > 0 and len(cluster.nodes) == cluster.file.node_count:
        for entry in cluster.file.nodes:
            node = cluster.nodes[cluster.file.node_numbers[entry.name].start]
            each = entry.gpus * room(node.device.usable_gib)
            if each > 0:
                counts[entry.name] = entry.count + math.ceil(missing / each)
    return MissingMemory(static, sequence, there, counts)
