"""All-to-alls inside the sites of a group on several, and attention: part of the bound (group_times.py)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from megatron_hexi.cost.arrays import Floats
from megatron_hexi.planner.bound.groups.site_times import Shape, SiteTimes, of_sites


class Inside(NamedTuple):
    """All-to-alls inside a site of a group on several, by the site's heads, [H + 1, J] each.

    Of the h heads of a site's n units, a member with b of them takes in b / H of all tokens but its own, and
    sends 1 - b / H of these. So if the site holds T tokens, T b / H (1 - b / h) at least come from inside or
    stay there. With the member's attention, in proportion to b, that is least for the fewest heads that the
    busiest one may have, h / n, or for all h. The more tokens the site holds, the fewer cross its border.

    Args:
        attention: of the busiest member, seconds.
        stays: seconds a token of those that the site holds.
        by_one: what it takes longer if one member has all of the site's heads.
        mixed: seconds where T is what makes both take the same time.
    """

    attention: Floats
    stays: Floats
    by_one: Floats
    mixed: Floats

    def least(self, tokens: Floats) -> Floats:
        """A and attention together, if the site holds so many tokens or more, [H + 1, J]."""
        held: Floats = self.attention + np.maximum(np.minimum(self.stays * tokens, self.by_one), self.mixed)
        return held


def inside_of(
    shape: Shape, sites: Sequence[SiteTimes], heads: int, a_head: Sequence[Floats], tokens: Floats
) -> list[Inside]:
    """Of each site of a group; of a group on one site, none.

    Args:
        shape: the group's units.
        sites: times of each class of sites.
        heads: of the group.
        a_head: of each site, attention of a unit with one head, [J].
        tokens: of the group, at least, [J].
    """
    numbers = np.arange(heads + 1)[:, None]
    parts = numbers / heads

    def of_site(at: int) -> Inside:
        (place, units), head_s = shape[at], a_head[at]
        site, most = sites[place], np.ceil(numbers / units)
        outside, inside = site.moving(units, outside=True)[0], site.moving(1, outside=False)[0]
        stays = inside * most / heads * (1 - most / np.maximum(numbers, 1))
        border, rises = outside * parts, np.maximum(outside * (1 - parts), stays)
        even = border * rises / np.maximum(border + rises, 1e-300) * tokens
        by_one = (numbers - most) * head_s
        mixed = np.minimum(even, np.maximum(outside * parts * (1 - parts) * tokens, by_one))
        return Inside(most * head_s, stays, by_one, mixed)

    return of_sites(shape, of_site) if len(shape) > 1 else []
