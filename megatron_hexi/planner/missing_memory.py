"""Memory that a job needs on all GPUs together, and the nodes that would hold it: sums, without planning."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from megatron_hexi.cluster import Cluster
from megatron_hexi.cost.memory import GIB, RESERVE_BYTES, static_memory, token_bytes
from megatron_hexi.cost.model_part import ModelPart
from megatron_hexi.planner.request import Request


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
    recompute = request.job.recompute if "recompute" in request.fixed else "full"
    job = replace(
        request.job,
        tensor_parallel=1,
        pipeline_parallel=1,
        virtual_stages=1,
        data_parallel=1,
        micro_batch_size=1,
        recompute=recompute,
    )
    part, params = ModelPart.of_job(job, 0), job.model.total_params + job.model.mtp_params
    static = float(sum(static_memory(job, part, params, params, params).values())) / GIB
    _, held, attended = token_bytes(job, part, 1, 1)
    sequence = job.seq_length * (held + attended) / GIB
    there = sum(_room(rank.device.usable_gib) for rank in cluster.ranks)
    missing = static + sequence - there
    counts = {}
    if missing > 0 and len(cluster.nodes) == cluster.file.node_count:
        for entry in cluster.file.nodes:
            node = cluster.nodes[cluster.file.node_numbers[entry.name].start]
            each = entry.gpus * _room(node.device.usable_gib)
            if each > 0:
                counts[entry.name] = entry.count + math.ceil(missing / each)
    return MissingMemory(static, sequence, there, counts)


def _room(usable_gib: float) -> float:
    """Return the memory of a GPU, less what libraries take, GiB."""
    return max(0.0, usable_gib - RESERVE_BYTES / GIB)
