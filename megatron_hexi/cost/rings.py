"""Seconds of reduce-scatters and all-gathers of gradients and weights, as rings over all units.

NCCL makes as many rings as nodes have network cards, and each ring takes an equal part of the bytes and its
own card ("creates 4 rings, each using a different NIC", https://github.com/NVIDIA/nccl/issues/601; rails stay
apart unless NCCL_CROSS_NIC is set). Every ring enters each node once, passes all of its GPUs, and leaves it.
So the whole buffer crosses a node's border once, spread over the cards of the GPUs in use there, and the node
with the fewest cards is the slowest. Inside a node each of n GPUs sends (n - 1) / n of the bytes to its
neighbour, and the rest out of the node.
"""

from __future__ import annotations

import numpy as np

from megatron_hexi.cost.arrays import Floats, Ints
from megatron_hexi.cost.network import LinkTable

#: Bytes that take far longer than any latency.
_MUCH = 1e12


class Rings:
    """Seconds of reduce-scatters and all-gathers on rings; the rings of the same units are computed once.

    Args:
        links: the cluster's links.
    """

    def __init__(self, links: LinkTable) -> None:
        self.links = links
        self._laid: dict[tuple[bytes, int], tuple[float, float]] = {}

    def seconds(self, gpus: Ints, size: float, width: int, least: float | None = None) -> float:
        """Return the seconds of a reduce-scatter or of an all-gather over some units.

        (U - 1) / U x size over the busiest link, and U - 1 latencies (Thakur et al., Optimization of
        collective communication operations in MPICH, 2005). The rings of a unit's other tensor-parallel ranks
        run at the same time, over their own cards or the node's. If shares are uneven, each link carries all
        shares but one, and the busiest link all but the smallest.

        Args:
            gpus: the first GPU of each unit, in rank order, [U]; a ring passes nodes in this order.
            size: bytes of the whole buffer on one GPU.
            least: the smallest share of the buffer that a unit ends (or begins) with, a part of 1; ``None``:
                all shares are equal.
        """
        units = len(gpus)
        if units == 1:
            return 0.0
        name = gpus.tobytes(), width
        if name not in self._laid:
            self._laid[name] = self._lay(gpus, width)
        each, latency = self._laid[name]
        carried = (units - 1) / units if least is None else 1 - least
        return carried * size * each + (units - 1) * latency

    def _lay(self, gpus: Ints, width: int) -> tuple[float, float]:
        """Return the seconds per byte, and the latency in seconds, of one step of a ring over some GPUs."""
        src, dst, part = _hops(gpus, self.links.nodes[gpus])
        latency = self.links.latency(src, dst)
        seconds = self.links.message_seconds(src, dst, part * _MUCH, width=width)
        return float((seconds - latency).max()) / _MUCH, float(latency.max())


def _hops(gpus: Ints, nodes: Ints) -> tuple[Ints, Ints, Floats]:
    """Return sending GPU, receiving GPU and the part of all bytes that they carry, of all rings together.

    Args:
        gpus: GPUs in the order of the ring, [U]; a ring passes nodes in the order in which they first appear.
        nodes: the node of each GPU, [U].
    """
    _, first, node = np.unique(nodes, return_index=True, return_inverse=True)
    order = np.argsort(first[node], kind="stable")
    gpus, node = gpus[order], np.cumsum(np.diff(first[node][order], prepend=-1) != 0) - 1
    counts = np.bincount(node)
    begin = np.cumsum(counts) - counts
    # Inside a node each GPU sends to its neighbour.
    beside = begin[node] + (np.arange(len(gpus)) - begin[node] + 1) % counts[node]
    part = (counts - 1) / counts if len(counts) > 1 else np.ones(1)
    inside = np.flatnonzero(counts[node] > 1)
    if len(counts) == 1:
        return gpus[inside], gpus[beside[inside]], part[node[inside]]
    # Each GPU of a node sends to each of the following node.
    following = (node + 1) % len(counts)
    repeats = counts[following]
    sender = np.repeat(np.arange(len(gpus)), repeats)
    number = np.arange(len(sender)) - np.repeat(np.cumsum(repeats) - repeats, repeats)
    receiver = begin[following][sender] + number
    between = 1 / (counts[node] * repeats)[sender]
    return (
        gpus[np.concatenate([inside, sender])],
        gpus[np.concatenate([beside[inside], receiver])],
        np.concatenate([part[node[inside]], between]),
    )
