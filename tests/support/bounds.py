"""The planner's lower bound, all of it at once."""

from __future__ import annotations

from megatron_hexi.planner.budget import THOROUGH, Proof

from megatron_hexi.planner.bound import Bound, LowerBound
from megatron_hexi.planner.fleet.units import Fleet

#: As a thorough look has it, but for the time that it takes.
PROOF = THOROUGH.proof._replace(programs=12_000)


def lower_bound(fleet: Fleet, data_parallel: int | None, found_s: float, proof: Proof = PROOF) -> Bound:
    """By whole groups too, up to an iteration that is known to be possible."""
    return LowerBound(fleet, data_parallel, found_s, proof).closely(found_s)
