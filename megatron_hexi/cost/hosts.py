"""Host memory beside GPUs: how long copies take, and the optimizer's step there; how full it is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megatron_hexi.cluster import Cluster
from megatron_hexi.cost.arrays import Floats, Ints
from megatron_hexi.cost.job import Job
from megatron_hexi.cost.memory import GIB, GRADIENT_BYTES
from megatron_hexi.errors import ClusterError

#: Bytes of host memory that Adam reads and writes a weight: its gradient for the norm and for the step; the
#: fp32 weight and both moments, there and back.
STEP_BYTES = 2 * 4 + 3 * 8


@dataclass(frozen=True)
class NodeLoad:
    """Memory of a node that a plan uses.

    Args:
        name: of the node.
        needed_gib: for all of its GPUs.
        usable_gib: what a job may pin there.
    """

    name: str
    needed_gib: float
    usable_gib: float

    @property
    def fullness(self) -> float:
        """The part that is needed of what there is."""
        return self.needed_gib / max(self.usable_gib, 1e-9)

    @property
    def short_gib(self) -> float:
        """Missing memory, GiB; below 0 where there is more than is needed."""
        return self.needed_gib - self.usable_gib

    def __str__(self) -> str:
        return (
            f"node {self.name} would keep {self.needed_gib:.1f} GiB in host memory and has "
            f"{self.usable_gib:.1f}: {self.short_gib:.1f} GiB short; offload less, or say under host: in the "
            "cluster file what it has"
        )


class Hosts:
    """Host memory and its bandwidth, for each GPU of a cluster.

    Args:
        cluster: the cluster.
    """

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        hosts = [rank.device.host for rank in cluster.ranks]
        self._is_known = np.array([host is not None for host in hosts])
        self._copy, self._stream, self._usable = (
            np.array([0.0 if host is None else getattr(host, name) for host in hosts])
            for name in ("bandwidth_gb_s", "memory_gb_s", "usable_gib")
        )
        self._node = np.array([rank.node for rank in cluster.ranks])

    @property
    def bytes(self) -> float:
        """All that jobs may pin."""
        return float(self._usable.sum()) * GIB

    def copy_seconds(self, gpus: Ints, size: Floats) -> Floats:
        """Seconds of copies to or from some GPUs, while all GPUs of their nodes copy; 0 for 0 bytes.

        Raises:
            ClusterError: nothing is known of the host memory beside one that copies something.
        """
        self._check(gpus[size > 0])
        return size / np.where(size > 0, self._copy[gpus] * 1e9, 1.0)

    def step_seconds(self, job: Job, gpus: Ints, owned: Floats, kept: Floats) -> Floats:
        """The optimizer's step on the host: gradients there, Adam, new weights back; one after the other.

        Args:
            job: the job.
            gpus: of the ranks.
            owned: weights whose state each keeps on the host.
            kept: those of them that the device has all the time, and whose gradients so are not there yet.

        Raises:
            ClusterError: as `copy_seconds`.
        """
        there = self.copy_seconds(gpus, kept * float(GRADIENT_BYTES[job.precision] + job.element_bytes))
        self._check(gpus[owned > 0])
        size = owned * (STEP_BYTES + job.element_bytes)
        return there + size / np.where(owned > 0, self._stream[gpus] * 1e9, 1.0)

    def loads(self, gpus: Sequence[Ints], taken: Sequence[Floats]) -> tuple[NodeLoad, ...]:
        """Nodes in whose memory something lies.

        Args:
            gpus: of units, [U, tensor_parallel] each.
            taken: bytes for each GPU of each unit, [U] each.
        """
        if not any(size.any() for size in taken):
            return ()
        nodes = self._cluster.nodes
        needed, usable = np.zeros(len(nodes)), np.zeros(len(nodes))
        for own, size in zip(gpus, taken, strict=True):
            np.add.at(needed, self._node[own], np.broadcast_to(size[:, None], own.shape) / GIB)
        np.add.at(usable, self._node, self._usable)
        return tuple(
            NodeLoad(nodes[number].name, float(needed[number]), float(usable[number]))
            for number in np.flatnonzero(needed).tolist()
        )

    def _check(self, gpus: Ints) -> None:
        unknown = gpus[~self._is_known[gpus]]
        if len(unknown):
            rank = self._cluster.ranks[int(unknown.flat[0])]
            raise ClusterError(
                f"{self._cluster.nodes[rank.node].name}: nothing is known of the host memory beside "
                f"{rank.device.name}, and the plan offloads there; give its entry in the cluster file host:"
            )
