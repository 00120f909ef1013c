"""The experts of each rank of a stage, and the expert domains: ranks that together hold all experts.

Units are taken in the order of the plan: as soon as they hold every expert, they form an expert domain, and
the next unit with experts begins another (expert data parallelism). Domains that take whole micro-batches run
different micro-batches at the same time, so each of them forms expert domains of its own.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron_hexi.plan.model import Member, Range, Stage


@dataclass(frozen=True)
class HeldExperts:
    """The experts that one rank holds in each layer with experts.

    Args:
        experts: range of expert numbers; may be empty.
        part: number of the slice of each expert's hidden columns that the rank holds, from 0.
        parts: number of slices into which the experts are cut; 1: the rank holds whole experts.
    """

    rank: int
    experts: Range
    part: int = 0
    parts: int = 1

    @property
    def count(self) -> int:
        """Number of experts that the rank holds, whole or as a slice of each."""
        return self.experts[1] - self.experts[0]


def held_experts(member: Member, total: int) -> tuple[HeldExperts, ...]:
    """Return the experts that each rank of a unit holds."""
    ranges = member.experts or ((0, total),)
    if len(ranges) > 1:
        return tuple(HeldExperts(rank, own) for rank, own in zip(member.ranks, ranges, strict=True))
    parts = len(member.ranks)
    return tuple(HeldExperts(rank, ranges[0], part, parts) for part, rank in enumerate(member.ranks))


def expert_domains(stage: Stage, total: int) -> tuple[tuple[HeldExperts, ...], ...]:
    """Return the expert domains of a stage: for each, the experts of its ranks, in ascending order of rank.

    A unit without experts belongs to the expert domain before it, or to the first.
    """
    domains: list[list[HeldExperts]] = [[]]
    together = 0  # experts of the last domain's ranks; the slices of an expert count once
    for domain in stage.domains:
        if stage.takes_micro_batches and domains[-1]:
            domains.append([])
            together = 0
        for member in (member for group in domain.groups for member in group.members):
            held = held_experts(member, total)
            own = sum(one.count for one in held if one.part == 0)
            if together >= total and own:
                domains.append([])
                together = 0
            domains[-1] += held
            together += own
    return tuple(tuple(sorted(one, key=lambda held: held.rank)) for one in domains)
