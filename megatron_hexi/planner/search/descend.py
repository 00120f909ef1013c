"""Searches groupings from uniform ones to their best neighbours, step by step."""

from __future__ import annotations

from megatron_hexi.planner.fleet.units import Fleet
from megatron_hexi.planner.search.groupings import (
    group_by_counts,
    group_counts,
    mixed_groupings,
    rearranged,
    site_classes,
)
from megatron_hexi.planner.search.tried import TriedGroupings, grouping_of, promise_of

#: Numbers of groups per site with which all classes begin.
_DENSITIES = (0.0, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0)
#: The most groups and units of a grouping that is rearranged, and the most times that one is.
_FEW_GROUPS = 12
_FEW_UNITS = 64
_REARRANGEMENTS = 3


def descend(tried: TriedGroupings, fleet: Fleet, heads: int) -> None:
    """Try uniform groupings, then from the best one make groups larger or smaller, step by step.

    Each step changes the number of groups on all sites of one class: sites of the same kind and size.
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
                new_counts = counts | {name: count}
                new_promise = tried.attempt(group_by_counts(fleet, new_counts)).promise
                if new_promise < promise:
                    promise, counts, improved = new_promise, new_counts, True
    _rearrange(tried, fleet)


def _rearrange(tried: TriedGroupings, fleet: Fleet) -> None:
    """Try the best grouping so far with two groups joined or one cut, as long as one of these is better."""
    for _ in range(_REARRANGEMENTS):
        [best] = tried.most_promising(1)
        grouping = grouping_of(best)
        if len(grouping) > _FEW_GROUPS or len(fleet.units) > _FEW_UNITS:
            return
        found = min((tried.attempt(other) for other in rearranged(fleet, grouping)), key=promise_of)
        if found.promise >= best.promise:
            return
