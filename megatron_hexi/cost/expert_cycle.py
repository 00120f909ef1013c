"""Seconds of the experts' part of a layer."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_hexi.cost.arrays import Floats


@dataclass(frozen=True, eq=False)
class ExpertCycle:
    """The experts' part of a layer, forward and backward, seconds of each unit, [2, U].

    Args:
        compute: on its own experts.
        exchange: both all-to-alls, until the last rank of the domain has its rows.
        wait: for the rank of the domain that computes longest.
    """

    compute: Floats
    exchange: Floats
    wait: Floats

    @property
    def total(self) -> Floats:
        """From the first token sent to the last result back, the same in all of a domain."""
        return self.compute + self.exchange + self.wait
