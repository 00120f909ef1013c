"""From groupings that are alike on all sites to the best of their neighbours, step by step."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_hexi.planner.fleet.units import Fleet
from megatron_hexi.planner.search.groupings import (
    Choice,
    SiteClass,
    choices,
    group_by_choice,
    groups_a_site,
    idle_heads,
    mixed_groupings,
    rearranged,
    site_classes,
    unequal_choices,
)
from megatron_hexi.planner.search.tried import Tried, grouping_of, promise_of

#: Groups a site with which all classes begin.
_DENSITIES = (0.0, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0)
#: Heads that idle less by this part of the time are worth a step further.
_IDLE = 0.1
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
    ladders = {name: choices(name[1], len(sites), units, heads) for name, sites in classes.items()}
    starts = []
    for density in _DENSITIES:
        chosen = {
            name: min(ladder, key=lambda choice: abs(groups_a_site(choice, len(classes[name])) - density))
            for name, ladder in ladders.items()
        }
        starts.append((tried.attempt(group_by_choice(fleet, chosen), sparing=True).promise, chosen))
    for grouping in mixed_groupings(fleet, heads):
        tried.attempt(grouping, sparing=True)
    promise, chosen = min(starts, key=lambda start: start[0])
    improved = True
    while improved:
        improved = False
        for name, ladder in ladders.items():
            for option in _neighbours(name, ladder, chosen[name], len(classes[name]), heads):
                other = chosen | {name: option}
                found = tried.attempt(group_by_choice(fleet, other), sparing=True).promise
                if found < promise:
                    promise, chosen, improved = found, other, True
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


def _neighbours(
    name: SiteClass, ladder: Sequence[Choice], choice: Choice, sites: int, heads: int
) -> list[Choice]:
    """A step coarser, a step finer; where heads do not go round there, also the next where fewer idle."""
    unequal = unequal_choices(name[1], heads)
    if choice not in ladder:
        return unequal
    place, found = ladder.index(choice), list[Choice]()
    for way in (ladder[:place][::-1], ladder[place + 1 :]):
        idle = [idle_heads(option, name[1], sites, heads) for option in way]
        found += way[:1]
        found += [option for option, part in zip(way, idle, strict=True) if part < idle[0] - _IDLE][:1]
    return [*found, *unequal]
