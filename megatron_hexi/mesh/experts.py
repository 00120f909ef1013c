"""The expert domains of a job: sets of ranks that together hold all experts of a stage's layers once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from megatron_hexi.plan import Plan
from megatron_hexi.plan.units import HeldExperts, expert_domains


@dataclass(frozen=True)
class ExpertDomain:
    """Ranks that together hold every expert of their stage's layers once and exchange tokens of experts.

    Args:
        held: experts of each rank, in rank order, which is the order of the process group.
        copy: number of the copy of the experts that these ranks hold, counted over all replicas.
    """

    held: tuple[HeldExperts, ...]
    copy: int

    @property
    def ranks(self) -> tuple[int, ...]:
        """Ranks of the expert domain, ascending."""
        return tuple(one.rank for one in self.held)

    @cached_property
    def width(self) -> int:
        """Number of expert slots of each rank: the largest number of experts that any of the ranks holds."""
        return max(one.count for one in self.held)

    @property
    def slots(self) -> tuple[int | None, ...]:
        """The number of the expert in each slot, rank by rank; ``None`` for an empty slot.

        Each slice of an expert fills one slot, so an expert may be in several slots.
        """
        return tuple(
            expert
            for one in self.held
            for expert in (*range(*one.experts), *[None] * (self.width - one.count))
        )

    @property
    def has_slices(self) -> bool:
        """Whether some experts are cut into slices; a token of such an expert is sent to every slice."""
        return any(one.parts > 1 for one in self.held)


def job_experts(plan: Plan, total: int) -> Mapping[int, tuple[ExpertDomain, HeldExperts]]:
    """Return, for each rank of the job, the rank's expert domain and the experts that the rank holds."""
    found: dict[int, tuple[ExpertDomain, HeldExperts]] = {}
    first = 0
    for replica in plan.replicas:
        stages = [expert_domains(stage, total) for stage in replica.stages]
        for domains in stages:
            for copy, held in enumerate(domains, start=first):
                domain = ExpertDomain(held, copy)
                found |= {one.rank: (domain, one) for one in held}
        first += max(map(len, stages))
    return found
