"""Where memory does not suffice: which rank, which term, by how much."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_hexi.cost.hosts import NodeLoad
from megatron_hexi.cost.iteration import IterationCost
from megatron_hexi.cost.memory import GIB

#: What makes each term smaller, for the sentence that names it.
_REMEDIES = {
    "weights": "cut the model with more tensor or pipeline parallelism",
    "gradients": "cut the model with more tensor or pipeline parallelism",
    "optimizer": "use the distributed optimizer, or cut the model further",
    "activations": "give it fewer tokens, recompute more, or shorten the context",
    "attention": "give it fewer heads, recompute more, or shorten the context",
    "working_set": "give its group fewer tokens, or shorten the context",
    "logits": "give it fewer tokens, or cut the vocabulary with tensor parallelism",
    "reserve": "give it fewer tokens",
}


@dataclass(frozen=True)
class Shortage:
    """A rank whose memory does not suffice.

    Args:
        rank: its number in the job.
        name: of its GPU.
        device: model of GPU.
        needed_gib: what it would need.
        usable_gib: what it has.
        term: the largest term of `Memory`.
        term_gib: its size.
        ranks: how many ranks lack memory in all.
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
        """What is missing, GiB."""
        return self.needed_gib - self.usable_gib

    def __str__(self) -> str:
        others = f", and {self.ranks - 1} more ranks" if self.ranks > 1 else ""
        return (
            f"rank {self.rank} ({self.name}, {self.device}) needs {self.needed_gib:.1f} GiB and has "
            f"{self.usable_gib:.1f}: {self.short_gib:.1f} GiB short{others}; most of it is "
            f"{self.term.replace('_', ' ')}, {self.term_gib:.1f} GiB: {_REMEDIES[self.term]}"
        )


def find_shortage(cost: IterationCost) -> Shortage | NodeLoad | None:
    """The rank that lacks most, or the node; ``None`` where all fits."""
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
