"""Gradients and weights: reduce-scatters and all-gathers as rings over all units.

NCCL makes as many rings as nodes have network cards, and each takes an equal part of the bytes and a card of
its own ("creates 4 rings, each using a different NIC", https://github.com/NVIDIA/nccl/issues/601; rails stay
apart unless NCCL_CROSS_NIC says otherwise). Every ring enters each node once, passes all of its GPUs, and
leaves it. So the whole buffer crosses a node's border once, spread over the cards of the GPUs in use there,
and the node with the fewest cards sets the pace; inside a node each of n GPUs hands on all but the n-th part
that leaves the node from it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product

import numpy as np

from megatron_hexi.cost.arrays import Ints
from megatron_hexi.cost.network import LinkTable

#: Large beside any latency in bytes.
_MUCH = 1e12


class Rings:
    """Rings over the units of a cluster; those over the same units are laid once.

    Args:
        links: the cluster's.
    """

    def __init__(self, links: LinkTable) -> None:
        self.links = links
        self._laid: dict[tuple[bytes, int], tuple[float, float]] = {}

    def seconds(self, gpus: Ints, size: float, width: int, least: float | None = None) -> float:
        """One pass: a reduce-scatter or an all-gather.

        (U - 1) / U x size over the busiest link, and U - 1 latencies (Thakur et al., Optimization of
        collective communication operations in MPICH, 2005). Rings of a unit's tensor-parallel ranks run
        beside it, over their own cards or the node's. Of uneven shares each link carries all but one, and
        the busiest all but the least.

        Args:
            gpus: the first GPU of each unit, in rank order, [U]; nodes follow each other as they do there.
            size: bytes of the whole buffer on one GPU.
            width: tensor-parallel size.
            least: the least part of the buffer that a unit ends (or begins) with; ``None``: all are equal.
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
        """Seconds a byte, and latency of a step."""
        nodes: dict[int, list[int]] = {}
        for gpu in gpus.tolist():
            nodes.setdefault(int(self.links.nodes[gpu]), []).append(gpu)
        hops = np.array(list(_hops(list(nodes.values()))))
        src, dst, part = hops[:, 0].astype(np.int64), hops[:, 1].astype(np.int64), hops[:, 2]
        latency = self.links.message_seconds(src, dst, np.zeros(len(part)))
        seconds = self.links.message_seconds(src, dst, part * _MUCH, width=width)
        return float((seconds - latency).max()) / _MUCH, float(latency.max())


def _hops(nodes: Sequence[Sequence[int]]) -> Iterator[tuple[int, int, float]]:
    """Every pair of GPUs that hand something on, and what part of the bytes, over all rings together."""
    for number, node in enumerate(nodes):
        count = len(node)
        if count > 1:
            part = (count - 1) / count if len(nodes) > 1 else 1.0
            yield from ((gpu, node[(place + 1) % count], part) for place, gpu in enumerate(node))
        if len(nodes) > 1:
            following = nodes[(number + 1) % len(nodes)]
            part = 1 / (count * len(following))
            yield from ((*pair, part) for pair in product(node, following))
