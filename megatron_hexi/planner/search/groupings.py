"""Candidate groupings: how the units of a domain form A2A groups.

Sites (units on the same nodes) that are alike are a class and are treated alike: each whole, cut into equal
parts, or merged with others of the class. That breaks the symmetry by GPU type: what is chosen is one number
for a class, not one for a rank. Groups over several classes come from the cluster's fast domains
(racks, a measured matrix's clusters, everything) and from equal mixes of all classes. For a handful of units,
all partitions are listed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from megatron_hexi.planner.fleet.units import Fleet
from megatron_hexi.planner.layouts.layout import Grouping

#: The most parts that a site is cut into, in fleets of more units than the key: an exchange of very many
#: groups costs more than any all-to-all inside a site.
_FINEST = {256: 1, 64: 4, 0: 16}

#: If no more numbers than this divide the units evenly, these are tried too.
_FEW_DIVISORS = 2
_NEARLY = (2, 3, 4, 5, 6, 8, 10, 13, 16)

#: Kind of a site's units, and their number.
SiteClass = tuple[int, int]


def site_classes(fleet: Fleet) -> dict[SiteClass, list[tuple[int, ...]]]:
    """Return the sites by kind and size, in canonical order."""
    classes: dict[SiteClass, list[tuple[int, ...]]] = {}
    for site in fleet.sites:
        classes.setdefault((fleet.units[site[0]].kind, len(site)), []).append(site)
    return classes


def group_counts(size: int, sites: int, units: int, heads: int) -> list[int]:
    """Return the numbers of about equal groups that the sites of a class may form, ascending.

    Args:
        size: number of units of each site.
    """
    # Besides numbers that divide the sites, those with one head a unit, or two.
    merged = {*_counts(sites), *(max(1, round(sites * size * each / heads)) for each in (1, 2))}
    cut = {sites * parts for parts in range(1, min(size, _finest(units)) + 1) if size % parts == 0}
    return sorted({count for count in merged if count < sites} | cut)


def _counts(most: int, *others: int) -> list[int]:
    """Return the numbers of groups that divide `most` and `others`; if these are few, some more."""
    even = [count for count in range(1, most + 1) if all(number % count == 0 for number in (most, *others))]
    if len(even) > _FEW_DIVISORS:
        return even
    return sorted({*even, *(count for count in _NEARLY if count <= most)})


def _finest(units: int) -> int:
    return next(parts for limit, parts in _FINEST.items() if units > limit)


def group_by_counts(fleet: Fleet, counts: Mapping[SiteClass, int]) -> Grouping:
    """Return the grouping with these numbers of groups of each class, from sites merged or cut."""
    groups: list[tuple[int, ...]] = []
    for name, sites in site_classes(fleet).items():
        count = counts[name]
        pieces = sites if count <= len(sites) else [(unit,) for site in sites for unit in site]
        for place in range(count):
            groups.append(tuple(sorted(unit for piece in _run(pieces, place, count) for unit in piece)))
    return tuple(groups)


def mixed_groupings(fleet: Fleet, heads: int) -> Iterator[Grouping]:
    """Yield groupings over several classes: by fast domains, by number of heads, equal mixes of all classes.

    Groups by number of heads have as many units as there are heads, or half as many, the fastest first, node
    by node or spread over nodes; the last group has the remaining units.
    """
    number = {gpu: unit for unit, fleet_unit in enumerate(fleet.units) for gpu in fleet_unit.gpus[0]}
    for partition in fleet.cluster.fast_domains()[1:]:
        parts = [tuple(sorted({number[gpu] for gpu in part if gpu in number})) for part in partition.parts]
        yield tuple(part for part in parts if part)
    numbers = tuple(range(len(fleet.units)))
    yield (numbers,)
    for each in (1, 2):
        size = heads // each
        if 1 < size < len(numbers):
            yield tuple(numbers[first : first + size] for first in range(0, len(numbers), size))
            yield spread(fleet, size)
    members: dict[int, list[int]] = {}
    for unit, fleet_unit in enumerate(fleet.units):
        members.setdefault(fleet_unit.kind, []).append(unit)
    if len(members) > 1:
        fewest = min(len(units) for units in members.values())
        finest = _finest(len(fleet.units)) * len(fleet.sites)
        for count in _counts(fewest, *(len(units) for units in members.values())):
            if 1 < count <= finest:
                yield tuple(
                    tuple(sorted(unit for units in members.values() for unit in _run(units, place, count)))
                    for place in range(count)
                )


def spread(fleet: Fleet, size: int) -> Grouping:
    """Return groups of `size` units, each over as many nodes as possible.

    All-to-alls then go over every GPU's own link to other nodes, and the exchange stays on the node as long
    as it has units of other groups.
    """
    places = {unit: place for site in fleet.sites for place, unit in enumerate(site)}
    units = sorted(range(len(fleet.units)), key=lambda unit: (places[unit], fleet.units[unit].site, unit))
    runs = (units[first : first + size] for first in range(0, len(units), size))
    return tuple(tuple(sorted(run)) for run in runs)


def rearranged(fleet: Fleet, grouping: Grouping) -> Iterator[Grouping]:
    """Yield the grouping with two groups joined or one cut in half, for each pair and each kind of groups."""
    alike: dict[tuple[int, ...], list[tuple[int, ...]]] = {}
    for group in grouping:
        alike.setdefault(fleet.kinds_of(group), []).append(group)
    kinds = list(alike.values())
    for number, groups in enumerate(kinds):
        for others in kinds[number:]:
            first, second = groups[0], others[-1]
            if first != second:
                rest = [group for group in grouping if group not in (first, second)]
                yield (*rest, tuple(sorted(first + second)))
        whole = groups[0]
        if len(whole) > 1:
            middle = len(whole) // 2
            yield (*(group for group in grouping if group != whole), whole[:middle], whole[middle:])


def all_partitions(fleet: Fleet) -> Iterator[Grouping]:
    """Yield every partition of the units once, up to exchanging units of one kind on one site."""
    seen = set()
    for partition in set_partitions(list(range(len(fleet.units)))):
        words = tuple(
            sorted(
                tuple(sorted((fleet.units[u].site, fleet.units[u].kind) for u in part)) for part in partition
            )
        )
        if words not in seen:
            seen.add(words)
            yield tuple(tuple(sorted(part)) for part in partition)


def _run[T](things: Sequence[T], place: int, count: int) -> Sequence[T]:
    """Return run number `place` of the `count` runs of nearly equal length into which `things` are cut."""
    return things[place * len(things) // count : (place + 1) * len(things) // count]


def set_partitions(things: list[int]) -> Iterator[list[list[int]]]:
    """Yield all partitions of a list into sets."""
    if not things:
        yield []
        return
    first, rest = things[0], things[1:]
    for partition in set_partitions(rest):
        yield [[first], *partition]
        for number, part in enumerate(partition):
            yield [*partition[:number], [first, *part], *partition[number + 1 :]]
