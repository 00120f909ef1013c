"""Orders of groups in the nested zigzag, and of a group's members along the heads.

A step of the exchange takes longer the larger the partner is, and the more its busiest member sends or
receives. So large groups alternate with small ones, or are all outside or inside; and where groups differ,
the members of each kind are spread evenly over the heads. Else four A100s in a group with four H100s would
all have neighbouring heads, and in a group of four H100s one would receive all of their keys and values.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator

from megatron_hexi.planner.fleet.units import Fleet
from megatron_hexi.planner.layouts.layout import A2AGroup


def alternating(fleet: Fleet, parts: Iterable[A2AGroup]) -> tuple[A2AGroup, ...]:
    """Sort groups by size, with groups of the same kinds spread evenly.

    Where large partners follow each other, groups fall out of step and wait for each other's keys; where
    sizes alternate, all keep pace.
    """
    largest = sorted(parts, key=lambda part: (-part.total, part.units))
    return _spread(largest, lambda part: fleet.kinds_of(part.units))


def facing(fleet: Fleet, parts: tuple[A2AGroup, ...]) -> tuple[A2AGroup, ...]:
    """Spread the members of each kind evenly over the heads of their groups, unless all groups are alike."""
    if len({fleet.kinds_of(part.units) for part in parts}) == 1:
        return parts

    def spread(part: A2AGroup) -> A2AGroup:
        kinds = [fleet.units[unit].kind for unit in part.units]
        return part.reordered(_spread(range(len(kinds)), kinds.__getitem__))

    return tuple(map(spread, parts))


def in_a_row(parts: tuple[A2AGroup, ...]) -> tuple[A2AGroup, ...]:
    """Return groups with members in the order of their numbers."""
    return tuple(part.reordered(sorted(range(len(part.units)), key=part.units.__getitem__)) for part in parts)


def other_orders(parts: tuple[A2AGroup, ...]) -> Iterator[tuple[A2AGroup, ...]]:
    """Yield other orders to try: members in a row; largest groups outside; largest groups inside.

    The outermost group receives all keys of the others, and the innermost sends all of its keys to each of
    them: if messages bound the time, groups with many links should be there.
    """
    yield in_a_row(parts)
    largest_first = tuple(sorted(parts, key=lambda part: -part.total))
    yield largest_first
    yield largest_first[::-1]


def _spread[T](things: Iterable[T], name: Callable[[T], Hashable]) -> tuple[T, ...]:
    """Return the items in an order that spreads those of each name evenly; ties keep their order."""
    things = tuple(things)
    counts, met = Counter(map(name, things)), Counter[Hashable]()
    places = []
    for thing in things:
        places.append((met[name(thing)] + 0.5) / counts[name(thing)])
        met[name(thing)] += 1
    return tuple(things[number] for number in sorted(range(len(things)), key=places.__getitem__))
