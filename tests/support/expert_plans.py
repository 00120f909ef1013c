"""Random plans whose units hold unequal numbers of experts, whole or cut, or none."""

from __future__ import annotations

import itertools
from dataclasses import replace

from megatron_hexi.plan import validate_plan
from tests.support.stage_plans import stage_plan


def expert_plan(random, workload, micro_batch_size, ranks, experts, most_replicas=3, micro_batches=None):
    """A plan of `stage_plan` whose units hold experts; some replicas leave it to them."""
    plan = stage_plan(random, workload, micro_batch_size, ranks, most_replicas, micro_batches)
    replicas = tuple(
        replica
        if random.random() < 0.2
        else replace(replica, stages=tuple(_with_experts(random, one, experts) for one in replica.stages))
        for replica in plan.replicas
    )
    plan = replace(plan, replicas=replicas, workload=replace(plan.workload, experts=experts))
    validate_plan(plan)
    return plan


def _with_experts(random, stage, experts):
    """A stage with experts of all its units, in expert domains of some neighbouring ones."""
    units = [one for domain in stage.domains for group in domain.groups for one in group.members]
    ends = [place for place in range(1, len(units)) if random.random() < 0.4]
    held: dict[int, tuple] = {}
    for first, stop in itertools.pairwise([0, *ends, len(units)]):
        held |= _share(random, units[first:stop], experts)
    return replace(
        stage,
        domains=tuple(
            replace(
                domain,
                groups=tuple(
                    replace(
                        group,
                        members=tuple(replace(one, experts=held[one.lead]) for one in group.members),
                    )
                    for group in domain.groups
                ),
            )
            for domain in stage.domains
        ),
    )


def _share(random, units, experts):
    """By the units' first ranks: ranges that hold each expert once, in any order, some of them empty."""
    whole = {unit.lead: random.random() < 0.5 for unit in units}
    cells = [unit.lead for unit in units for _ in range(len(unit.ranks) if whole[unit.lead] else 1)]
    cuts = sorted(random.randint(0, experts) for _ in cells[1:])
    ranges = list(itertools.pairwise([0, *cuts, experts]))
    random.shuffle(ranges)
    held: dict[int, tuple] = {unit.lead: () for unit in units}
    for lead, own in zip(cells, ranges, strict=True):
        held[lead] += (own,)
    return held
