"""The planner's lower bound, all of it at once."""

from __future__ import annotations

from megatron_hexi.planner.bound import Bound, LowerBound
from megatron_hexi.planner.units import Fleet


def lower_bound(fleet: Fleet, data_parallel: int | None, found_s: float) -> Bound:
    """By whole groups too, up to an iteration that is known to be possible."""
    return LowerBound(fleet, data_parallel, found_s).closely(found_s)
