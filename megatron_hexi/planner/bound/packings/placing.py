"""Units for shapes of groups: which of the sites that are alike each group is on."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from megatron_hexi.planner.bound.groups.site_times import Shape, SiteClass
from megatron_hexi.planner.layouts.layout import Grouping


def placed(classes: Sequence[SiteClass], shapes: Iterable[Shape]) -> Grouping:
    """A grouping of all units: groups of the shapes, the largest first, and one of the units that are left.

    A group goes where the fewest units are left beside it; what no site has room for any more, it lacks.

    Args:
        classes: of sites.
        shapes: of groups that the units of each class suffice for.
    """
    free = [[list(site) for site in of_class.sites] for of_class in classes]
    groups: list[tuple[int, ...]] = []
    for shape in sorted(shapes, key=lambda shape: (-sum(units for _, units in shape), shape)):
        group: list[int] = []
        used: set[tuple[int, int]] = set()
        for place, units in sorted(shape, key=lambda part: -part[1]):
            fitting = [
                (len(site), number)
                for number, site in enumerate(free[place])
                if len(site) >= units and (place, number) not in used
            ]
            if fitting:
                _, number = min(fitting)
                used.add((place, number))
                group += free[place][number][:units]
                del free[place][number][:units]
        groups.append(tuple(sorted(group)))
    groups.append(tuple(sorted(unit for sites in free for site in sites for unit in site)))
    return tuple(group for group in groups if group)
