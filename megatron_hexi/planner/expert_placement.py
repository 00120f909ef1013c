"""Experts of a stage's ranks: in expert domains of one size, in proportion to what each rank is good for."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from megatron_hexi.cluster import Cluster
from megatron_hexi.cost import Job
from megatron_hexi.cost.memory import GIB, GRADIENT_BYTES
from megatron_hexi.plan import Domain, Group, Member
from megatron_hexi.plan.layout import apportion
from megatron_hexi.plan.model import Range


@dataclass(frozen=True)
class ExpertRule:
    """A choice of where experts are.

    Args:
        ranks: of an expert domain, about; ``None``: all of a stage's.
        by: what a rank's number of experts is in proportion to: its rate of matrix products, or its memory;
            ``equal``: every rank of an expert domain holds as many, up to one where they do not divide.
    """

    ranks: int | None = None
    by: Literal["speed", "memory", "equal"] = "speed"


IN_WHOLE_STAGES = ExpertRule()


def expert_rules(
    job: Job, cluster: Cluster, fixed: int | None = None, unequal: bool = True
) -> list[ExpertRule]:
    """The choices that a search tries: one for models without experts.

    Expert domains of whole stages, by the speed of GPUs and where they differ in memory by that, of a node,
    and of a GPU, as far as the largest GPU has memory for the experts of one layer.

    Args:
        job: the job.
        cluster: where.
        fixed: ranks that each expert domain must have; ``None``: chosen.
        unequal: whether ranks of an expert domain may hold different numbers of experts.
    """
    model, experts = job.model, job.model.experts
    if experts is None:
        return [IN_WHOLE_STAGES]
    by: Literal["speed", "equal"] = "speed" if unequal else "equal"
    if fixed is not None:
        return [ExpertRule(fixed, by)]
    devices = [node.device for node in cluster.nodes]
    rules = [ExpertRule(None, by)]
    if unequal and len({device.usable_gib / max(device.layer_matmul.rates) for device in devices}) > 1:
        rules.append(ExpertRule(None, "memory"))
    layer = experts.count * model.expert_params() * (job.element_bytes + GRADIENT_BYTES[job.precision])
    room = max(device.usable_gib for device in devices) * GIB
    sizes = sorted({max(len(node.ranks) for node in cluster.nodes), 1}, reverse=True)
    return rules + [
        ExpertRule(size, by) for size in sizes if layer / size < room and size < len(cluster.ranks)
    ]


def spread_experts(
    domains: Sequence[Domain], total: int, domain_ranks: int | None, weight: Callable[[int], float]
) -> tuple[Domain, ...]:
    """The domains of a stage with whole experts on their ranks.

    Units in the order of the plan are cut into runs of about as many ranks; each holds every expert.

    Args:
        domains: those that share the samples of a micro-batch.
        total: experts of a layer.
        domain_ranks: ranks of a run; ``None``: all of them.
        weight: what a rank's number of experts is in proportion to.
    """
    units = [member for domain in domains for group in domain.groups for member in group.members]
    ranks = sum(len(member.ranks) for member in units)
    count = 1 if domain_ranks is None else max(1, min(len(units), ranks // domain_ranks))
    held: dict[int, tuple[Range, ...]] = {}
    ends = [round(place * len(units) / count) for place in range(count + 1)]
    for first, stop in itertools.pairwise(ends):
        held |= _shared(units[first:stop], total, weight)

    def of_group(group: Group) -> Group:
        return replace(
            group, members=tuple(replace(member, experts=held[member.lead]) for member in group.members)
        )

    return tuple(replace(domain, groups=tuple(map(of_group, domain.groups))) for domain in domains)


def _shared(
    units: Sequence[Member], total: int, weight: Callable[[int], float]
) -> dict[int, tuple[Range, ...]]:
    """The experts of the ranks of some units that hold each expert once, by the units' first ranks."""
    counts = apportion(total, [weight(rank) for unit in units for rank in unit.ranks])
    ends = [0, *itertools.accumulate(counts)]
    ranges = itertools.pairwise(ends)
    return {unit.lead: tuple(itertools.islice(ranges, len(unit.ranks))) for unit in units}
