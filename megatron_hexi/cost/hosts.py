"""Host memory: seconds of copies, seconds of the optimizer's step there, and how full it is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megatron_hexi.cluster import Cluster
from megatron_hexi.cost.arrays import Floats, Ints
from megatron_hexi.cost.memory import GIB, weight_bytes
from megatron_hexi.cost.moved_bytes import shard_step_bytes
from megatron_hexi.errors import ClusterError
from megatron_hexi.models.job import Job


@dataclass(frozen=True)
class HostMemoryUse:
    """Host memory of a node that a plan uses.

    Args:
        name: the node's name.
        needed_gib: host memory that the node's GPUs need together, GiB.
        usable_gib: host memory that a job may pin on the node, GiB.
    """

    name: str
    needed_gib: float
    usable_gib: float

    @property
    def fullness(self) -> float:
        """Needed host memory as a fraction of usable host memory."""
        return self.needed_gib / max(self.usable_gib, 1e-9)

    @property
    def short_gib(self) -> float:
        """Missing host memory, GiB; below 0 where there is more than is needed."""
        return self.needed_gib - self.usable_gib

    def __str__(self) -> str:
        return (
            f"node {self.name} would keep {self.needed_gib:.1f} GiB in host memory and has "
            f"{self.usable_gib:.1f}: {self.short_gib:.1f} GiB short; offload less, or say under host: in the "
            "cluster file what it has"
        )


class Hosts:
    """Host memory and its bandwidth, for each GPU of a cluster."""

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
        """Bytes of host memory that a job may pin, over all nodes."""
        return float(self._usable.sum()) * GIB

    def copy_seconds(self, gpus: Ints, size: Floats) -> Floats:
        """Return the seconds of copies between GPUs and host memory, while all GPUs of their nodes copy.

        Args:
            gpus: the cluster's number of each GPU.
            size: bytes that each GPU copies, of the same shape; 0 bytes take 0 seconds.

        Raises:
            ClusterError: nothing is known of the host memory beside a GPU that copies.
        """
        self._check(gpus[size > 0])
        return size / np.where(size > 0, self._copy[gpus] * 1e9, 1.0)

    def step_seconds(self, job: Job, gpus: Ints, owned: Floats, kept: Floats) -> Floats:
        """Return the seconds of the optimizer's step on the host, for each rank.

        Gradients are copied to the host, torch's fused Adam runs (`shard_step_bytes`), and new weights are
        copied back, one after the other.

        Args:
            gpus: the cluster's GPU of each rank, [ranks].
            owned: number of weights whose optimizer state each rank keeps on the host, [ranks].
            kept: number of these weights that stay on the device throughout, so that their gradients must be
                copied first, [ranks].

        Raises:
            ClusterError: nothing is known of the host memory beside a GPU whose state is there.
        """
        moved = weight_bytes(job).gradient + job.trained_share * job.element_bytes
        there = self.copy_seconds(gpus, kept * moved)
        self._check(gpus[owned > 0])
        size = owned * shard_step_bytes(job)
        return there + size / np.where(owned > 0, self._stream[gpus] * 1e9, 1.0)

    def loads(self, gpus: Sequence[Ints], taken: Sequence[Floats]) -> tuple[HostMemoryUse, ...]:
        """Return the loads of the nodes whose host memory is used.

        Args:
            gpus: for each section, the GPUs of its units, [U, tensor_parallel].
            taken: for each section, bytes of host memory for each GPU of a unit, [U].
        """
        if not any(size.any() for size in taken):
            return ()
        nodes = self._cluster.nodes
        needed, usable = np.zeros(len(nodes)), np.zeros(len(nodes))
        for own, size in zip(gpus, taken, strict=True):
            np.add.at(needed, self._node[own], np.broadcast_to(size[:, None], own.shape) / GIB)
        np.add.at(usable, self._node, self._usable)
        return tuple(
            HostMemoryUse(nodes[number].name, float(needed[number]), float(usable[number]))
            for number in np.flatnonzero(needed).tolist()
        )

    def _check(self, gpus: Ints) -> None:
        unknown = gpus[~self._is_known[gpus]]
        if len(unknown):
            rank = self._cluster.ranks[int(unknown.flat[0])]
            raise ClusterError(
                f"{self._cluster.nodes[rank.node].name}: the plan offloads, but the host memory beside "
                f"{rank.device.name} is not known; add host: to this entry of the cluster file"
            )
