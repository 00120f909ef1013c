"""Chooses the GPUs of each stage, and the order of the job's ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from megatron_hexi.cluster import Cluster
from megatron_hexi.planner.joint.pools import Pools, StageShape


class StagePlace(NamedTuple):
    """The position of a stage in a plan: its replica, its number there, and the replica's stage count."""

    replica: int
    stage: int
    stages: int

    @property
    def is_first(self) -> bool:
        """Whether the stage is its replica's first."""
        return self.stage == 0

    @property
    def is_last(self) -> bool:
        """Whether the stage is its replica's last."""
        return self.stage == self.stages - 1

    @property
    def is_end(self) -> bool:
        """Whether the stage is its replica's first or last."""
        return self.is_first or self.is_last


#: GPUs of each stage, numbered in the cluster.
StageGpus = dict[StagePlace, list[int]]


class _Demand(NamedTuple):
    """A stage's need of a part of a node: `gpus` GPUs, in tensor-parallel units of `width`."""

    place: StagePlace
    width: int
    gpus: int


def find_gpus(
    pools: Pools, replicas: Sequence[Sequence[StageShape]], *, beside_alike: bool = False
) -> StageGpus | None:
    """Return GPUs for every stage; ``None``: nodes cannot be cut so, or the ranks cannot be ordered.

    Whole nodes go first, in the stages' order. Then parts of nodes, the largest first, each on a node with a
    neighbouring stage if there is room, or else with any other stage. So a tensor-parallel unit is on one
    node, and neighbours are close.

    Args:
        beside_alike: whether parts of nodes go beside the same stage of other replicas in place of
            neighbours: gradients then have more of a node's links.
    """
    placed: StageGpus = {}
    for pool, node_pool in enumerate(pools.pools):
        nodes, demands = list(node_pool.nodes), list[_Demand]()
        for number, shapes in enumerate(replicas):
            for stage, shape in enumerate(shapes):
                place = StagePlace(number, stage, len(shapes))
                if not shape.counts[pool]:
                    continue
                size = pools.node_gpus(pool, shape.width)
                whole, rest = divmod(shape.counts[pool], size)
                if whole > len(nodes):
                    return None
                for node in nodes[:whole]:
                    placed.setdefault(place, []).extend(pools.cluster.nodes[node].ranks[:size])
                del nodes[:whole]
                if rest:
                    demands.append(_Demand(place, shape.width, rest))
        shared = _share(demands, node_pool.size, nodes, beside_alike)
        if shared is None:
            return None
        for node, demands_of_node in shared.items():
            free = iter(pools.cluster.nodes[node].ranks)
            # Units of a size begin at multiples of it, and ends of a pipeline stand at the node's ends.
            for demand in sorted(demands_of_node, key=lambda demand: (-demand.width, demand.place)):
                placed.setdefault(demand.place, []).extend(next(free) for _ in range(demand.gpus))
    return placed if number_ranks(pools.cluster, placed) else None


def _share(
    demands: Sequence[_Demand], size: int, nodes: Sequence[int], beside_alike: bool
) -> dict[int, list[_Demand]] | None:
    """Return which demands each node serves, by node; ``None``: the nodes have too little room."""
    shared: dict[int, list[_Demand]] = {}
    belong = _are_alike if beside_alike else _are_neighbours

    def turn(demand: _Demand) -> tuple[int, int, StagePlace]:
        return -demand.gpus, demand.place.stage if beside_alike else 0, demand.place

    for demand in sorted(demands, key=turn):
        rooms = [
            node
            for node, others in shared.items()
            if size - sum(other.gpus for other in others) >= demand.gpus
        ]
        beside = [node for node in rooms if any(belong(demand, other) for other in shared[node])]
        fresh = [node for node in nodes if node not in shared]
        choice = next(iter([*beside, *rooms, *fresh]), None)
        if choice is not None:
            shared.setdefault(choice, []).append(demand)
            continue
        # No node has room for all of it: whole units go where others left some.
        left = demand.gpus
        for others in shared.values():
            free = size - sum(other.gpus for other in others)
            part = min(left, free - free % demand.width)
            if part:
                others.append(demand._replace(gpus=part))
                left -= part
        if left:
            return None
    return shared


def _are_neighbours(one: _Demand, other: _Demand) -> bool:
    return one.place.replica == other.place.replica and abs(one.place.stage - other.place.stage) == 1


def _are_alike(one: _Demand, other: _Demand) -> bool:
    return one.place[1:] == other.place[1:]


def number_ranks(cluster: Cluster, placed: StageGpus) -> list[int]:
    """Return the GPU of each rank; empty if no order exists: one of several nodes has all pipelines' ends.

    Ranks go node by node in the order of the cluster file, except for two rules of the runtime: the first
    rank stands at an end of a pipeline, where data is read, and the last rank computes the loss.
    """
    place_of = {gpu: place for place, gpus in placed.items() for gpu in gpus}
    node_of = {gpu: cluster.ranks[gpu].node for gpu in place_of}
    end = max(node_of[gpu] for gpu, place in place_of.items() if place.is_last)
    others = {gpu: node for gpu, node in node_of.items() if node != end}
    begin = min((node for gpu, node in others.items() if place_of[gpu].is_end), default=None)
    if others and begin is None:
        return []

    def turn(gpu: int) -> tuple[bool, bool, int, bool, bool, int]:
        node, place = node_of[gpu], place_of[gpu]
        # On the first node, ends of pipelines come first; on the last node, GPUs with the loss come last.
        late = place.is_last if node == end else not place.is_end
        return node == end, node != begin, node, late, not place.is_first, gpu

    return sorted(place_of, key=turn)
