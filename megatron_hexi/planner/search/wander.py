"""Random changes of a grouping: what no list of candidates foresees."""

from __future__ import annotations

from random import Random

from megatron_hexi.planner.fleet.units import Fleet, Unit
from megatron_hexi.planner.layouts.layout import Grouping

#: How often units are moved, two groups joined, and one cut; else two units change places.
_MOVED, _JOINED, _CUT = 0.5, 0.15, 0.1


def changed(chance: Random, fleet: Fleet, grouping: Grouping, partly: bool = False) -> Grouping:
    """Units that are alike in another group or a new one; two groups joined; one cut; two units exchanged.

    Args:
        chance: decides.
        fleet: the units.
        grouping: before.
        partly: units may be left out, and those that are may come in: they are as another group. Then units
            on one site are alike too, not only those of a kind.
    """
    used = {unit for group in grouping for unit in group}
    out, new = [unit for unit in range(len(fleet.units)) if unit not in used], list[int]()
    groups = [*map(list, grouping), *([out] if partly and out else [])]
    first = chance.choice(groups)
    others = [*groups, new, *([out] if partly and not out else [])]
    other = chance.choice([group for group in others if group is not first])
    move = chance.random()
    if move < _MOVED:
        one = fleet.units[chance.choice(first)]
        is_like = chance.choice((_of_kind, _of_site)) if partly else _of_kind
        alike = [unit for unit in first if is_like(fleet.units[unit]) == is_like(one)]
        count = min(len(alike), chance.choice((1, 1, 2, (len(alike) + 1) // 2, len(alike))))
        other += alike[-count:]
        first[:] = [unit for unit in first if unit not in other]
    elif move < _MOVED + _JOINED:
        other += first
        first.clear()
    elif move < _MOVED + _JOINED + _CUT:
        place = chance.randrange(len(first))
        new += first[place:]
        del first[place:]
    elif other:
        here, there = chance.randrange(len(first)), chance.randrange(len(other))
        first[here], other[there] = other[there], first[here]
    after = [group for group in (*groups, new) if group and group is not out]
    return tuple(tuple(sorted(group)) for group in after) or grouping


def _of_kind(unit: Unit) -> int:
    return unit.kind


def _of_site(unit: Unit) -> int:
    return unit.site
