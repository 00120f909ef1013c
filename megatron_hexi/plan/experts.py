"""The experts that each rank of a stage holds, and the ranks that hold all of them together.

Units in the order of the plan make up an expert domain as soon as they hold every expert; the next unit with
experts begins another (expert data parallelism). Domains that take whole micro-batches are expert domains of
their own: they run different ones at a time.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron_hexi.plan.model import Member, Range, Stage


@dataclass(frozen=True)
class HeldExperts:
    """The experts of one rank, in each layer that has some.

    Args:
        rank: the rank.
        experts: the range of their numbers; may be empty.
        part: which slice of each expert's hidden columns.
        parts: into how many such slices its experts are cut; 1: they are whole.
    """

    rank: int
    experts: Range
    part: int = 0
    parts: int = 1

    @property
    def count(self) -> int:
        """Experts that it holds, whole or a slice of each."""
        return self.experts[1] - self.experts[0]


def held_experts(member: Member, total: int) -> tuple[HeldExperts, ...]:
    """The experts of each rank of a unit.

    Args:
        member: the unit.
        total: experts of a layer.
    """
    ranges = member.experts or ((0, total),)
    if len(ranges) > 1:
        return tuple(HeldExperts(rank, own) for rank, own in zip(member.ranks, ranges, strict=True))
    parts = len(member.ranks)
    return tuple(HeldExperts(rank, ranges[0], part, parts) for part, rank in enumerate(member.ranks))


def expert_domains(stage: Stage, total: int) -> tuple[tuple[HeldExperts, ...], ...]:
    """The expert domains of a stage, each with its ranks ascending.

    Units without experts belong to the domain before them, or the first.

    Args:
        stage: the stage.
        total: experts of a layer.
    """
    domains: list[list[HeldExperts]] = [[]]
    for domain in stage.domains:
        if stage.takes_micro_batches and domains[-1]:
            domains.append([])
        for member in (member for group in domain.groups for member in group.members):
            held = held_experts(member, total)
            if _whole(domains[-1]) >= total and _whole(held):
                domains.append([])
            domains[-1] += held
    return tuple(tuple(sorted(one, key=lambda held: held.rank)) for one in domains)


def _whole(held: list[HeldExperts] | tuple[HeldExperts, ...]) -> int:
    """Return the number of experts that these ranks hold together; slices of one expert count once."""
    return sum(one.count for one in held if one.part == 0)
