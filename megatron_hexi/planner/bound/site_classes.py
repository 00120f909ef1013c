"""Sites that are alike, as the lower bound sees them: links, speed and memory (bound.py)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from megatron_hexi.cost.compute import device_speeds
from megatron_hexi.cost.memory import GIB
from megatron_hexi.planner.bound.groups.site_times import SiteClass
from megatron_hexi.planner.bound.pieces.demand import Site
from megatron_hexi.planner.bound.pieces.load import Load
from megatron_hexi.planner.bound.pieces.piece import Pieces
from megatron_hexi.planner.bound.pieces.prices import Prices
from megatron_hexi.planner.fleet.links import Links, best_links
from megatron_hexi.planner.fleet.room import Room
from megatron_hexi.planner.fleet.units import Fleet


def classes_of(sites: Iterable[Site]) -> list[SiteClass]:
    """Sites of each class, as groups see them."""
    return [SiteClass(site.sites, site.pieces.loads, site.pieces.rooms) for site in sites]


def sites_of(fleet: Fleet, crosses: bool, prices: Prices, shards: int | None = None) -> Iterator[Site]:
    """Sites by their GPUs, links and size.

    Args:
        fleet: the units.
        crosses: whether plans cross sites.
        prices: of tokens.
        shards: units that share the optimizer's state; ``None``: the fleet's.
    """
    job, stages = fleet.job, range(fleet.job.pipeline_parallel)
    classes: dict[tuple[int, tuple[Links, ...], int], list[tuple[int, ...]]] = {}
    for site in fleet.sites:
        links = tuple(best_links(fleet, site[0], crosses, stage) for stage in stages)
        classes.setdefault((fleet.units[site[0]].kind, links, len(site)), []).append(tuple(site))
    for (number, links, size), sites in classes.items():
        kind = fleet.kinds[number]
        loads = [Load(job, device_speeds(kind.devices[s], job), links[s], size, s) for s in stages]
        usable = [device.usable_gib * GIB for device in kind.devices]
        rooms = [
            [Room(job, s, usable[s], shards or len(fleet.units), micro_batches=kept) for s in stages]
            for kept in range(1, job.pipeline_parallel + 1)
        ]
        yield Site(
            sites,
            Pieces(job, loads, rooms),
            kind.tokens_per_s,
            prices.extra.get(number, 0.0),
            prices.most.get(number, 1.0),
        )
