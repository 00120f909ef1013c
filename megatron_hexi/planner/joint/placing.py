"""Which GPUs each stage gets, and in which order the job numbers them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from megatron_hexi.cluster import Cluster
from megatron_hexi.planner.joint.pools import Pools, Shape


class Place(NamedTuple):
    """A stage of a plan: the number of its replica, its own, and how many the replica has."""

    replica: int
    stage: int
    stages: int

    @property
    def is_first(self) -> bool:
        """Whether it begins its replica."""
        return self.stage == 0

    @property
    def is_last(self) -> bool:
        """Whether it ends its replica."""
        return self.stage == self.stages - 1


#: GPUs of the cluster by stage.
Placed = dict[Place, list[int]]


class _Demand(NamedTuple):
    """A part of a node that a stage wants."""

    place: Place
    width: int
    gpus: int


def find_gpus(pools: Pools, replicas: Sequence[Sequence[Shape]]) -> Placed | None:
    """GPUs for every stage; ``None`` where parts of nodes do not add up, or ranks cannot be numbered.

    Whole nodes go first, in the stages' order. Then parts of nodes, the largest first, each to a node that
    has room beside the neighbouring stage, or else beside any. So a tensor-parallel unit is on one node, and
    neighbours are close.
    """
    placed: Placed = {}
    for pool, own in enumerate(pools.pools):
        nodes, demands = list(own.nodes), []
        for number, shapes in enumerate(replicas):
            for stage, shape in enumerate(shapes):
                place = Place(number, stage, len(shapes))
                whole, rest = divmod(shape.counts[pool], own.size)
                if whole > len(nodes):
                    return None
                for node in nodes[:whole]:
                    placed.setdefault(place, []).extend(pools.cluster.nodes[node].ranks)
                del nodes[:whole]
                if rest:
                    demands.append(_Demand(place, shape.width, rest))
        shared = _share(demands, own.size, nodes)
        if shared is None:
            return None
        for node, demands_of_node in shared.items():
            free = iter(pools.cluster.nodes[node].ranks)
            # Units of a size begin at multiples of it, and ends of a pipeline stand at the node's ends.
            for demand in sorted(demands_of_node, key=lambda demand: (-demand.width, demand.place)):
                placed.setdefault(demand.place, []).extend(next(free) for _ in range(demand.gpus))
    return placed if number_ranks(pools.cluster, placed) else None


def _share(demands: Sequence[_Demand], size: int, nodes: Sequence[int]) -> dict[int, list[_Demand]] | None:
    """Parts of nodes by node."""
    shared: dict[int, list[_Demand]] = {}
    for demand in sorted(demands, key=lambda demand: (-demand.gpus, demand.place)):
        rooms = [
            node
            for node, others in shared.items()
            if size - sum(other.gpus for other in others) >= demand.gpus
        ]
        beside = [node for node in rooms if any(_are_neighbours(demand, other) for other in shared[node])]
        fresh = [node for node in nodes if node not in shared]
        choice = next(iter([*beside, *rooms, *fresh]), None)
        if choice is None:
            return None
        shared.setdefault(choice, []).append(demand)
    return shared


def _are_neighbours(one: _Demand, other: _Demand) -> bool:
    return one.place.replica == other.place.replica and abs(one.place.stage - other.place.stage) == 1


def number_ranks(cluster: Cluster, placed: Placed) -> list[int]:
    """The cluster's GPU of each rank of the job; none where one node alone has all ends of pipelines.

    A node's GPUs follow each other, and nodes do as in the cluster file, but for two rules of the runtime:
    the first rank stands at an end of a pipeline, where data is read, and the last one computes the loss.
    """
    place_of = {gpu: place for place, gpus in placed.items() for gpu in gpus}
    by_node: dict[int, list[int]] = {}
    for gpu in sorted(place_of):
        by_node.setdefault(cluster.ranks[gpu].node, []).append(gpu)
    nodes = list(by_node)

    def has(node: int, *, last_only: bool) -> bool:
        places = (place_of[gpu] for gpu in by_node[node])
        return any(place.is_last or (place.is_first and not last_only) for place in places)

    end = next(node for node in reversed(nodes) if has(node, last_only=True))
    nodes.remove(end)
    if nodes:
        begin = next((node for node in nodes if has(node, last_only=False)), None)
        if begin is None:
            return []
        nodes.remove(begin)
        nodes.insert(0, begin)
    order: list[int] = []
    for node in [*nodes, end]:
        places = {gpu: place_of[gpu] for gpu in by_node[node]}
        # Of the first node those at an end come first, of the last one those with the loss last.
        order += sorted(
            by_node[node],
            key=lambda gpu: (
                places[gpu].is_last if node == end else not (places[gpu].is_first or places[gpu].is_last),
                not places[gpu].is_first,
                gpu,
            ),
        )
    return order
