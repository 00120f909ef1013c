"""Routes as numbers: the links between any two units, in the order of their first use."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from megatron_hexi.cluster import Cluster, LinkId
from megatron_hexi.cost.arrays import Floats, Ints


@dataclass(frozen=True, eq=False)
class RouteTable:
    """All routes in use.

    Args:
        capacity: capacity of the links, bytes/s, and infinity for one more, [N + 1].
        links: links of each route, [R, K]; shorter routes are padded with the infinite link.
        weights: load of a transfer on each of them, [R, K].
        alone: bytes/s of a transfer that does not share its route.
        own: links of each route, without padding.
    """

    names: tuple[str, ...]
    capacity: Floats
    links: Ints
    weights: Floats
    latency: Floats
    alone: Floats
    own: tuple[tuple[int, ...], ...]


class Routes:
    """A table of a cluster's routes, built on demand."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._links: dict[LinkId, int] = {}
        self._numbers: dict[tuple[int, int, int], int] = {}
        self._routes: list[tuple[tuple[int, ...], tuple[float, ...], float]] = []

    def numbers(self, src: Ints, dst: Ints, width: int = 1) -> Ints:
        """Return the number of the route between each pair of GPUs.

        Args:
            width: GPUs of a unit, each of which sends to its counterpart: a GPU's own links are loaded once,
                links that the unit shares `width` times.
        """
        pairs = zip(src.tolist(), dst.tolist(), strict=True)
        return np.array([self._number(*pair, width) for pair in pairs], dtype=np.int64)

    def table(self) -> RouteTable:
        """Return all routes requested so far."""
        count, most = len(self._links), max((len(links) for links, _, _ in self._routes), default=1)
        table = np.full((len(self._routes), most), count, dtype=np.int64)
        weights = np.zeros(table.shape)
        capacity = np.array([*(self._cluster.capacity(link) for link in self._links), np.inf])
        for number, (links, loads, _) in enumerate(self._routes):
            table[number, : len(links)], weights[number, : len(links)] = links, loads
        return RouteTable(
            names=tuple(self._cluster.link_name(link) for link in self._links),
            capacity=capacity,
            links=table,
            weights=weights,
            latency=np.array([latency for _, _, latency in self._routes]),
            alone=(capacity[table] / np.maximum(weights, 1.0)).min(axis=1, initial=np.inf),
            own=tuple(links for links, _, _ in self._routes),
        )

    def _number(self, src: int, dst: int, width: int) -> int:
        ends = src, dst, width
        if ends not in self._numbers:
            route = self._cluster.route(src, dst)
            links = tuple(self._links.setdefault(link, len(self._links)) for link in route.links)
            loads = tuple(float(min(self._cluster.sharers(link), width)) for link in route.links)
            self._numbers[ends] = len(self._routes)
            self._routes.append((links, loads, route.latency_s))
        return self._numbers[ends]
