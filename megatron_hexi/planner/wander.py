"""Random changes of a grouping: what no list of candidates foresees."""

from __future__ import annotations

from random import Random

from megatron_hexi.planner.layout import Grouping
from megatron_hexi.planner.units import Fleet

#: How often units are moved, two groups joined, and one cut; else two units change places.
_MOVED, _JOINED, _CUT = 0.5, 0.15, 0.1


def changed(chance: Random, fleet: Fleet, grouping: Grouping) -> Grouping:
    """Some units of a kind in another group or a new one; two groups joined; one cut; or two units exchanged.

    Args:
        chance: decides.
        fleet: the units.
        grouping: before.
    """
    groups = [*map(list, grouping), []]
    first, new = chance.choice(groups[:-1]), groups[-1]
    other, move = chance.choice([group for group in groups if group is not first]), chance.random()
    if move < _MOVED:
        kind = fleet.units[chance.choice(first)].kind
        alike = [unit for unit in first if fleet.units[unit].kind == kind]
        count = min(len(alike), chance.choice((1, 1, 2, (len(alike) + 1) // 2, len(alike))))
        other += alike[-count:]
        first[:] = [unit for unit in first if unit not in other]
    elif move < _MOVED + _JOINED:
        first += other
        other.clear()
    elif move < _MOVED + _JOINED + _CUT:
        place = chance.randrange(len(first))
        new += first[place:]
        del first[place:]
    elif other:
        here, there = chance.randrange(len(first)), chance.randrange(len(other))
        first[here], other[there] = other[there], first[here]
    return tuple(tuple(sorted(group)) for group in groups if group)
