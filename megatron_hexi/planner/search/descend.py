"""From groupings that are alike on all sites to the best of their neighbours, step by step."""

from __future__ import annotations

from megatron_hexi.planner.fleet.units import Fleet
from megatron_hexi.planner.search.groupings import (
    group_by_counts,
    group_counts,
    mixed_groupings,
    rearranged,
    site_classes,
)
from megatron_hexi.planner.search.tried import Tried, grouping_of, promise_of

#: Groups a site with which all classes begin.
_DENSITIES = (0.0, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0)
#: Groupings of up to so many groups and units are rearranged, so often at most.
_FEW_GROUPS = 12
_FEW_UNITS = 64
_REARRANGEMENTS = 3


def descend(tried: Tried, fleet: Fleet, heads: int) -> None:
    """All classes alike first; from the best of these one class after another a step coarser or finer.

    Args:
        tried: where groupings are tried.
        fleet: the units.
        heads: of a unit.
    """
    classes = site_classes(fleet)
    units = len(fleet.units)
    ladders = {name: group_counts(name[1], len(sites), units, heads) for name, sites in classes.items()}
    starts = []
    for density in _DENSITIES:
        counts = {
            name: min(ladder, key=lambda count: abs(count / len(classes[name]) - density))
            for name, ladder in ladders.items()
        }
        starts.append((tried.attempt(group_by_counts(fleet, counts)).promise, counts))
    for grouping in mixed_groupings(fleet, heads):
        tried.attempt(grouping)
    promise, counts = min(starts, key=lambda start: start[0])
    improved = True
    while improved:
        improved = False
        for name, ladder in ladders.items():
            place = ladder.index(counts[name])
            for count in ladder[max(0, place - 1) : place] + ladder[place + 1 : place + 2]:
                other = counts | {name: count}
                found = tried.attempt(group_by_counts(fleet, other)).promise
                if found < promise:
                    promise, counts, improved = found, other, True
    _rearrange(tried, fleet)


def _rearrange(tried: Tried, fleet: Fleet) -> None:
    """From the best grouping so far, two groups joined or one cut: one pair of each kind is tried."""
    for _ in range(_REARRANGEMENTS):
        [best] = tried.most_promising(1)
        grouping = grouping_of(best)
        if len(grouping) > _FEW_GROUPS or len(fleet.units) > _FEW_UNITS:
            return
        found = min((tried.attempt(other) for other in rearranged(fleet, grouping)), key=promise_of)
        if found.promise >= best.promise:
            return
