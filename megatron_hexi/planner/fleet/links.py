"""A unit's links at their best: what a lower bound may count on."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_hexi.cluster import LinkId
from megatron_hexi.planner.fleet.units import Fleet


@dataclass(frozen=True)
class Links:
    """Bytes/s of one GPU, in each direction.

    Args:
        inside: to the other units of its site.
        inside_s: latency there.
        outside: to other sites; 0 where there are none.
        outside_s: latency there.
        shared: whether all GPUs of a site share `outside`.
    """

    inside: float
    inside_s: float
    outside: float
    outside_s: float
    shared: bool


def best_links(fleet: Fleet, unit: int, crosses: bool, stage: int = 0) -> Links:
    """The links of a unit's GPUs on a pipeline stage; thinner ones further up are left out.

    Args:
        fleet: the units.
        unit: its number.
        crosses: whether units of several sites are used.
        stage: pipeline stage.
    """
    cluster = fleet.cluster
    gpu = fleet.units[unit].gpus[stage][0]
    number = cluster.ranks[gpu].node
    node = cluster.nodes[number]
    if not crosses:
        return Links(node.bandwidth, node.latency_s, 0.0, 0.0, False)
    if cluster.tiers:
        tier = cluster.tiers[0]
        return Links(node.bandwidth, node.latency_s, tier.bandwidth, tier.latency_s, tier.per != "gpu")
    others = [other.ranks[0] for n, other in enumerate(cluster.nodes) if n != number]
    latency = min(cluster.route(gpu, other).latency_s for other in others)
    ways = [cluster.capacity(LinkId(1, "node", number, way)) for way in ("out", "in")]
    return Links(node.bandwidth, node.latency_s, max(ways), latency, True)
