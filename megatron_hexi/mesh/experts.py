"""The expert domains of a job: which ranks hold the experts of a stage's layers together, and how often."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from megatron_hexi.plan import Plan
from megatron_hexi.plan.experts import HeldExperts, expert_domains


@dataclass(frozen=True)
class ExpertDomain:
    """Ranks that hold every expert of the layers of their stage once; tokens travel between them.

    Args:
        held: the experts of each rank, in the order of ranks: that of their group.
        copy: which copy of the experts they have, counted over all replicas.
    """

    held: tuple[HeldExperts, ...]
    copy: int

    @property
    def ranks(self) -> tuple[int, ...]:
        """Its ranks, ascending."""
        return tuple(one.rank for one in self.held)

    @cached_property
    def width(self) -> int:
        """Slots of each rank: as many as the rank with the most experts has of these."""
        return max(one.count for one in self.held)

    @property
    def slots(self) -> tuple[int | None, ...]:
        """The expert of each slot, rank by rank; ``None``: it is empty.

        A slice of an expert fills a slot of its own, so an expert may have several.
        """
        return tuple(
            expert
            for one in self.held
            for expert in (*range(*one.experts), *[None] * (self.width - one.count))
        )

    @property
    def has_slices(self) -> bool:
        """Whether some experts are cut: their tokens go to each slice."""
        return any(one.parts > 1 for one in self.held)


def job_experts(plan: Plan, total: int) -> Mapping[int, tuple[ExpertDomain, HeldExperts]]:
    """The expert domain of each rank, and the experts that it holds.

    Args:
        plan: a plan that passed its checks, with layers in every stage.
        total: experts of a layer.
    """
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
