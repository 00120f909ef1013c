"""Plans of stages that are written down one by one, for a small model."""

import dataclasses

from megatron_hexi.plan import (
    Domain,
    Group,
    JobTerms,
    Member,
    Plan,
    Replica,
    Stage,
    validate_plan,
)
from tests.support.costs import TINY

FAST = 1e6  # GB/s: a network that takes no time
DEEP = dataclasses.replace(TINY, layers=4, tied_embeddings=False)


def written_out(plan, job):
    """A plan whose one stage the job repeats, with each stage and its layers written down."""
    each = plan.units * job.tensor_parallel
    layers = job.stage_layers

    def stage(domain, number):
        groups = tuple(
            dataclasses.replace(
                group,
                members=tuple(
                    dataclasses.replace(one, ranks=tuple(rank + number * each for rank in one.ranks))
                    for one in group.members
                ),
            )
            for group in domain.groups
        )
        return Stage((Domain(groups),), layers=(number * layers, (number + 1) * layers))

    replicas = tuple(
        Replica(
            tuple(stage(replica.domain, number) for number in range(job.pipeline_parallel)),
            replica.micro_batches,
        )
        for replica in plan.replicas
    )
    return dataclasses.replace(plan, replicas=replicas)


def whole(*ranks, samples=None, state=1, seq_length=4096, heads=4):
    """A domain of one unit."""
    member = Member(tuple(ranks), seq_length, (0, heads // len(ranks)), state)
    return Domain((Group(((0, seq_length),), (member,)),), samples)


#: What stages say besides layers and domains, in order.
_FURTHER = ("recompute", "exchange", "ministages", "offload")


def plan_of(job, *replicas, terms=None):
    """Replicas given as (micro-batches, stages), the stages as (layers, domains) and what else they say."""
    plan = Plan(
        job.workload(),
        tuple(
            Replica(
                tuple(
                    Stage(tuple(domains), layers=layers, **dict(zip(_FURTHER, more, strict=False)))
                    for layers, domains, *more in stages
                ),
                micro_batches,
            )
            for micro_batches, stages in replicas
        ),
        job=terms or JobTerms(),
    )
    widths = {len(member.ranks) for member in plan.members}
    width = widths.pop() if len(widths) == 1 else 0
    plan = dataclasses.replace(plan, workload=dataclasses.replace(plan.workload, tensor_parallel=width))
    validate_plan(plan)
    return plan
