"""Shortages of memory: the rank, its largest memory term, and the missing GiB."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_hexi.cost.hosts import HostMemoryUse
from megatron_hexi.cost.iteration import IterationCost
from megatron_hexi.cost.memory import GIB
from megatron_hexi.cost.memory_terms import TAGS


@dataclass(frozen=True)
class Shortage:
    """A rank whose memory does not suffice.

    Args:
        rank: the rank's number in the job.
        name: name of its GPU in the cluster, such as ``h100-0/3``.
        device: model of its GPU.
        needed_gib: memory that it needs, GiB.
        usable_gib: memory that its GPU has for it, GiB.
        term: name of its largest memory term, a field of `Memory`.
        term_gib: memory of that term, GiB.
        ranks: number of ranks that lack memory.
    """

    rank: int
    name: str
    device: str
    needed_gib: float
    usable_gib: float
    term: str
    term_gib: float
    ranks: int

    @property
    def short_gib(self) -> float:
        """Missing memory, GiB."""
        return self.needed_gib - self.usable_gib

    def __str__(self) -> str:
        others = f", and {self.ranks - 1} more ranks" if self.ranks > 1 else ""
        return (
            f"rank {self.rank} ({self.name}, {self.device}) needs {self.needed_gib:.1f} GiB and has "
            f"{self.usable_gib:.1f}: {self.short_gib:.1f} GiB short{others}; most of it is "
            f"{self.term.replace('_', ' ')}, {self.term_gib:.1f} GiB: {TAGS[self.term].remedy}"
        )


def find_shortage(cost: IterationCost) -> Shortage | HostMemoryUse | None:
    """Return the rank that lacks most memory, else the fullest node if that lacks any; ``None``: all fits."""
    short = [rank for rank in cost.ranks if rank.memory_gib > rank.usable_gib]
    if not short:
        fullest = max(cost.host_loads, key=lambda load: load.fullness, default=None)
        return None if fullest is None or fullest.fullness <= 1 else fullest
    worst = max(short, key=lambda rank: rank.memory_gib - rank.usable_gib)
    terms = worst.memory.terms
    term = max(terms, key=lambda name: terms[name])
    return Shortage(
        rank=worst.rank,
        name=worst.name,
        device=worst.device,
        needed_gib=worst.memory_gib,
        usable_gib=worst.usable_gib,
        term=term,
        term_gib=terms[term] / GIB,
        ranks=len(short),
    )
