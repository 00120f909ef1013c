"""Memory that a job needs on all GPUs together, and the nodes that would hold it: sums, without planning."""

from __future__ import annotations

import math
from dataclasses import dataclass

from megatron_hexi.cluster import Cluster
from megatron_hexi.cost.memory import GIB
from megatron_hexi.planner.bound import bytes_once, room
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
