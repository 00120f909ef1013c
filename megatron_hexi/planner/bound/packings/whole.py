"""Every way to pack whole groups that may hold the sequence: part of the lower bound (packing.py).

The linear program packs fractions of groups. Its prices say what a shape loses against the best there is:
whole groups that hold the sequence lose no more together than the program has to spare. These are few of all
there are, and are looked at one by one, their groups together (together.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from megatron_hexi.cost.arrays import Floats

#: What rounding may take away.
_ROUNDING = 1e-6


#: Steps in which packings are looked for, and packings that are looked at, as multiples of how many there may
#: be.
_STEPS, _LOOKED_AT = 400, 25


@dataclass(frozen=True)
class Packings:
    """Ways to pack shapes.

    Args:
        found: multisets of shapes, each ascending in what the shapes lose, and what each group holds at most.
        complete: whether these are all.
    """

    found: list[tuple[tuple[int, ...], Floats]]
    complete: bool


def packings(
    used: Floats,
    units: Sequence[int],
    span: tuple[int, int],
    worth: Floats,
    needed: float,
    prices: tuple[Floats, float],
    hold: Callable[[Sequence[int]], Floats | None],
    most: int,
) -> Packings:
    """Multisets of shapes that use no more units than there are and are worth what is needed.

    Args:
        used: units of each class, [shapes, classes].
        units: that there are.
        span: the fewest and the most groups.
        worth: of each shape, [shapes].
        needed: what all are worth at least.
        prices: of units, [classes], none below 0, and of a group: no shape is worth more than its price, and
            all units and `span` groups cost what the linear program packs at most.
        hold: tokens that groups of such shapes hold at most beside each other; ``None``: not the sequence.
        most: how many are looked for that may hold it.
    """
    of_unit, of_group = prices
    few, many = span
    needed *= 1 - _ROUNDING
    # What loses least comes first: it is in most packings.
    loses = used @ of_unit + of_group - worth
    order = np.array([number for number in np.argsort(loses, kind="stable") if worth[number] > 0], dtype=int)
    used, worth, loses = used[order], worth[order], loses[order]
    found = list[tuple[tuple[int, ...], Floats]]()
    steps = looked_at = 0

    def spare(left: Floats, groups: int, so_far: float) -> float:
        """What groups of the units that are left may lose, beside so many."""
        rest = many - groups if of_group > 0 else max(1, few - groups)
        return so_far + float(left @ of_unit) + of_group * rest - needed

    def pack(first: int, left: Floats, taken: tuple[int, ...], so_far: float) -> bool:
        """Whether all packings that begin so are found."""
        nonlocal steps, looked_at
        if few <= len(taken) and so_far >= needed:
            looked_at += 1
            if (tokens := hold(taken)) is not None:
                found.append((taken, tokens))
        if len(taken) == many:
            return True
        last = int(np.searchsorted(loses, spare(left, len(taken), so_far), side="right"))
        after = left - used[first:last]
        for place in np.flatnonzero((after >= 0).all(axis=1)).tolist():
            steps += 1
            if len(found) > most or looked_at > _LOOKED_AT * most or steps > _STEPS * most:
                return False
            shape = first + place
            if not pack(shape, after[place], (*taken, int(order[shape])), so_far + float(worth[shape])):
                return False
        return True

    complete = pack(0, np.array(units, dtype=float), (), 0.0)
    return Packings(found, complete)
