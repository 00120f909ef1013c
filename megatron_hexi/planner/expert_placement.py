"""Placement of experts on a stage's ranks: in expert domains of about one size, by speed or by memory."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from megatron_hexi.cluster import Cluster
from megatron_hexi.cost.memory import GIB, weight_bytes
from megatron_hexi.models import Job
from megatron_hexi.plan import Domain, Member
from megatron_hexi.plan.layout import apportion
from megatron_hexi.plan.model import Range


@dataclass(frozen=True)
class ExpertRule:
    """A rule that places experts on the ranks of a stage.

    Args:
        domain_size: approximate number of ranks of an expert domain; ``None``: all ranks of the stage.
        by: whether ranks hold experts in proportion to their rates of matrix products, or to their memory;
            ``equal``: ranks of an expert domain hold equal numbers, or numbers that differ by one.
    """

    domain_size: int | None = None
    by: Literal["speed", "memory", "equal"] = "speed"


IN_WHOLE_STAGES = ExpertRule()


def expert_rules(
    job: Job, cluster: Cluster, fixed: int | None = None, unequal: bool = True
) -> list[ExpertRule]:
    """Return the rules that a search tries; a single one for models without experts.

    Expert domains are whole stages, with experts by speed and, if GPUs differ in memory per speed, by memory;
    or they are as large as a node, or one rank, if a rank's experts of one layer fit on the largest GPU. If
    not `unequal`, all have equal numbers of experts on their ranks.

    Args:
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
    each = weight_bytes(job)
    layer = experts.count * model.expert_params() * (each.weight + each.gradient)
    room = max(device.usable_gib for device in devices) * GIB
    sizes = sorted({max(len(node.ranks) for node in cluster.nodes), 1}, reverse=True)
    return rules + [
        ExpertRule(size, by) for size in sizes if layer / size < room and size < len(cluster.ranks)
    ]


def placement(rule: ExpertRule, units: int, width: int, *, is_mixed: bool) -> tuple[int, str]:
    """Return a key of the placement on a stage, the same for all rules that place experts alike there."""
    return _count_domains(rule.domain_size, units, units * width), rule.by if is_mixed else "equal"


def _count_domains(domain_ranks: int | None, units: int, ranks: int) -> int:
    """Return the number of expert domains of a stage; for `domain_ranks` see `ExpertRule.domain_size`."""
    return 1 if domain_ranks is None else max(1, min(units, ranks // domain_ranks))


def spread_experts(
    domains: Sequence[Domain], total: int, domain_ranks: int | None, weight: Callable[[int], float]
) -> tuple[Domain, ...]:
    """Return the domains of a stage with whole experts assigned to their ranks.

    Units, in the order of the plan, are cut into expert domains of about `domain_ranks` ranks; each expert
    domain holds every expert once.

    Args:
        domains: all domains of the stage, which share the samples of a micro-batch.
        domain_ranks: approximate number of ranks of an expert domain; ``None``: all ranks of the stage.
        weight: returns a rank's weight, to which its number of experts is proportional.
    """
    units = [member for domain in domains for group in domain.groups for member in group.members]
    ranks = sum(len(member.ranks) for member in units)
    count = _count_domains(domain_ranks, len(units), ranks)
    held: dict[int, tuple[Range, ...]] = {}
    ends = [round(place * len(units) / count) for place in range(count + 1)]
    for first, stop in itertools.pairwise(ends):
        held |= _shared(units[first:stop], total, weight)

    def holding(member: Member) -> Member:
        return replace(member, experts=held[member.lead])

    return tuple(domain.with_members(holding) for domain in domains)


def _shared(
    units: Sequence[Member], total: int, weight: Callable[[int], float]
) -> dict[int, tuple[Range, ...]]:
    """Return the range of experts of each rank in one expert domain, by the first rank of the rank's unit."""
    counts = apportion(total, [weight(rank) for unit in units for rank in unit.ranks])
    ends = [0, *itertools.accumulate(counts)]
    ranges = itertools.pairwise(ends)
    return {unit.lead: tuple(itertools.islice(ranges, len(unit.ranks))) for unit in units}
