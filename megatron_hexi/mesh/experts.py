"""The expert domains of a job: sets of ranks that together hold all experts of a stage's layers once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from megatron_hexi.plan import Plan, Stage
from megatron_hexi.plan.units import HeldExperts, expert_domains


@dataclass(frozen=True)
class ExpertDomain:
    """Ranks that together hold every expert of their stage's layers once and exchange tokens of experts.

    Args:
        held: experts of each rank, in rank order, which is the order of the process group.
        copy: number of the copy of the experts that these ranks hold, counted over all replicas.
        nodes: the ranks by node, if a token travels once to each node; empty: to each expert by itself.
    """

    held: tuple[HeldExperts, ...]
    copy: int
    nodes: tuple[tuple[int, ...], ...] = ()

    @property
    def ranks(self) -> tuple[int, ...]:
        """Ranks of the expert domain, ascending."""
        return tuple(one.rank for one in self.held)

    def inside(self, node: Sequence[int]) -> ExpertDomain:
        """Return the part of the domain on a node, whose ranks are given."""
        return replace(self, held=tuple(one for one in self.held if one.rank in node), nodes=())

    def beside(self, rank: int) -> ExpertDomain:
        """Return the part of the domain to which a rank's node sends rows itself: all of it without nodes."""
        return next((self.inside(node) for node in self.nodes if rank in node), self)

    def gateway(self, sender: int, node: Sequence[int]) -> int:
        """Return the rank of a node that takes the rows of a sender for all experts of that node.

        The senders of each node are spread over the ranks of the other: with equally many ranks, each has a
        counterpart. For its own node a rank is its own gateway.
        """
        (home,) = (own for own in self.nodes if sender in own)
        return node[home.index(sender) * len(node) // len(home)]

    @cached_property
    def width(self) -> int:
        """Number of expert slots of each rank: its largest number of experts, and 1 at least."""
        return max(1, *(one.count for one in self.held))

    @property
    def experts(self) -> list[int]:
        """Numbers of the experts that the ranks hold, ascending."""
        return sorted({expert for one in self.held for expert in range(*one.experts)})

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
        for stage, domains in zip(replica.stages, stages, strict=True):
            for copy, held in enumerate(domains, start=first):
                domain = ExpertDomain(held, copy, _nodes_of(stage, held))
                found |= {one.rank: (domain, one) for one in held}
        first += max(map(len, stages))
    return found


def _nodes_of(stage: Stage, held: Sequence[HeldExperts]) -> tuple[tuple[int, ...], ...]:
    """Return the ranks of an expert domain by node; empty if the stage names no nodes, or they share one."""
    ranks = {one.rank for one in held}
    nodes = (tuple(sorted(ranks.intersection(node))) for node in stage.expert_nodes or ())
    shared = tuple(node for node in nodes if node)
    return shared if len(shared) > 1 else ()
