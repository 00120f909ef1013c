"""Seconds of reduce-scatters and all-gathers of gradients and weights, as rings over all units.

NCCL makes as many rings as nodes have network cards, and each ring takes an equal part of the bytes and its
own card ("creates 4 rings, each using a different NIC", https://github.com/NVIDIA/nccl/issues/601; rails stay
apart unless NCCL_CROSS_NIC is set). Every ring enters each node once, passes all of its GPUs, and leaves it.
So the whole buffer crosses a node's border once, spread over the cards of the GPUs in use there, and the node
with the fewest cards is the slowest. Inside a node each of n GPUs sends (n - 1) / n of the bytes to its
neighbour, and the rest out of the node.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product

import numpy as np

from megatron_hexi.cost.arrays import Ints
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
        nodes: dict[int, list[int]] = {}
        for gpu in gpus.tolist():
            nodes.setdefault(int(self.links.nodes[gpu]), []).append(gpu)
        hops = np.array(list(_hops(list(nodes.values()))))
        src, dst, part = hops[:, 0].astype(np.int64), hops[:, 1].astype(np.int64), hops[:, 2]
        latency = self.links.message_seconds(src, dst, np.zeros(len(part)))
        seconds = self.links.message_seconds(src, dst, part * _MUCH, width=width)
        return float((seconds - latency).max()) / _MUCH, float(latency.max())


def _hops(nodes: Sequence[Sequence[int]]) -> Iterator[tuple[int, int, float]]:
    """Yield sending GPU, receiving GPU and the part of all bytes that they carry, over all rings together."""
    for number, node in enumerate(nodes):
        count = len(node)
        if count > 1:
            part = (count - 1) / count if len(nodes) > 1 else 1.0
            yield from ((gpu, node[(place + 1) % count], part) for place, gpu in enumerate(node))
        if len(nodes) > 1:
            following = nodes[(number + 1) % len(nodes)]
            part = 1 / (count * len(following))
            yield from ((*pair, part) for pair in product(node, following))
