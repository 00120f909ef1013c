"""Which units are used at all: a slow GPU behind a thin link may cost more than it brings."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from megatron_hexi.planner.budget import EXHAUSTIVE
from megatron_hexi.planner.fleet.units import Fleet


def fleets(fleet: Fleet) -> Iterator[Fleet]:
    """All units; the fastest kinds only; one kind; a part of each fast domain; a site, or a part of one.

    And sites of so many units at least: rings of gradients use all cards of a node, and the node with the
    fewest sets their pace (cost/rings.py).

    Each set of units once, in this order; of parts that are alike, only the first. Of a handful of units,
    every set.
    """
    kinds = range(len(fleet.kinds))
    numbers = range(len(fleet.units))
    sets: list[tuple[int, ...]] = [tuple(numbers)]
    if len(numbers) <= EXHAUSTIVE:
        yield from (fleet.subset(units) for units in _all_sets(fleet))
        return
    for last in reversed(kinds):
        sets.append(tuple(number for number in numbers if fleet.units[number].kind <= last))
    for kind in kinds:
        sets.append(tuple(number for number in numbers if fleet.units[number].kind == kind))
    for size in sorted({len(site) for site in fleet.sites})[1:]:
        sets.append(tuple(sorted(unit for site in fleet.sites if len(site) >= size for unit in site)))
    unit_of = {gpu: unit for unit, one in enumerate(fleet.units) for gpu in one.gpus[0]}
    for partition in reversed(fleet.cluster.fast_domains()[1:]):
        for part in partition.parts:
            sets.append(tuple(sorted({unit_of[gpu] for gpu in part if gpu in unit_of})))
    yield from (fleet.subset(units) for units in dict.fromkeys(sets) if units)
    for site in single_sites(fleet):
        size = len(site.units)
        while size:
            if size < len(fleet.units):
                yield site.subset(range(size))
            size //= 2


def _all_sets(fleet: Fleet) -> Iterator[tuple[int, ...]]:
    """Every set of units, the largest first, up to exchanging units that are alike in kind and site."""
    seen = set()
    for size in range(len(fleet.units), 0, -1):
        for units in itertools.combinations(range(len(fleet.units)), size):
            name = tuple((fleet.units[unit].kind, fleet.units[unit].site) for unit in units)
            if name not in seen:
                seen.add(name)
                yield units


def single_sites(fleet: Fleet) -> Iterator[Fleet]:
    """One site of each class; sites with other links inside are another class."""
    classes: dict[tuple[object, ...], tuple[int, ...]] = {}
    for site in fleet.sites:
        first = fleet.units[site[0]]
        nodes = [fleet.cluster.nodes[fleet.cluster.ranks[part[0]].node] for part in first.gpus]
        links = tuple((node.bandwidth, node.latency_s) for node in nodes)
        classes.setdefault((first.kind, len(site), links), site)
    yield from (fleet.subset(units) for units in classes.values())
