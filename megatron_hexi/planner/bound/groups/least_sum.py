"""The least of a time and of what falls as it grows, many at once: part of the lower bound (group_times.py).

By branch and bound: the time is in one of several intervals, and in each of them both together are no less
than the time at its beginning and the rest at its end. The best interval is cut in two, again and again.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from megatron_hexi.cost.arrays import Floats

#: Intervals are cut so often at most, and until the best is narrow, as a part of its beginning.
_CUTS, _NARROW = 9, 0.01
#: The last one has no end, and is cut at this multiple of its beginning.
_LAST = 2.0


def least_sum(ends: Floats, rests: Floats, rest: Callable[[Floats], Floats]) -> Floats:
    """The least of both together, or a little less, [J].

    Args:
        ends: of intervals of the time, ascending, [intervals + 1, J].
        rests: what follows it at these.
        rest: what follows it if it is no longer than this, [J] to [J].
    """
    for _ in range(_CUTS):
        best = (ends[:-1] + rests[1:]).argmin(axis=0)[None]
        short, long = np.take_along_axis(ends, best, axis=0), np.take_along_axis(ends, best + 1, axis=0)
        middle = np.where(np.isinf(long), _LAST * short, (short + long) / 2)
        if (long - short <= _NARROW * short).all():
            break
        ends, rests = np.concatenate([ends, middle]), np.concatenate([rests, rest(middle[0])[None]])
        order = ends.argsort(axis=0, kind="stable")
        ends, rests = np.take_along_axis(ends, order, axis=0), np.take_along_axis(rests, order, axis=0)
    least: Floats = (ends[:-1] + rests[1:]).min(axis=0)
    return least
