"""Neighbours of a plan made by hand, and a climb over them: what a user might try with an editor.

Nothing of the planner is used. Each neighbour differs in one thing: a layer between two stages, what a stage
recomputes, tokens or a head of a member, a micro-batch of a replica, or two nodes that change places.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace

from megatron_hexi.cluster import Cluster
from megatron_hexi.cost import CostModel
from megatron_hexi.errors import HexiError
from megatron_hexi.models import Job
from megatron_hexi.plan import Group, Plan, Replica, Stage, validate_plan
from megatron_hexi.plan.recompute import Recompute

#: Parts of the members' mean tokens that move between two members at once.
PARTS = (0.1, 0.01)


def climb(plan: Plan, job: Job, cluster: Cluster, timings: int) -> float:
    """Return the seconds of the best plan that fits, after at most so many timings of neighbours."""
    model, left = CostModel(job, cluster), timings
    best_s = model.timing(plan).phases.total
    moved = True
    while moved:
        moved = False
        for other in neighbours(plan, cluster):
            if not left:
                return best_s
            try:
                validate_plan(other)
                timing = model.timing(other)
            except HexiError:
                continue
            left -= 1
            if timing.fits and timing.phases.total < best_s * (1 - 1e-9):
                plan, best_s, moved = other, timing.phases.total, True
                break
    return best_s


def neighbours(plan: Plan, cluster: Cluster) -> Iterator[Plan]:
    """Yield plans that differ from a plan in one thing."""
    for number, replica in enumerate(plan.replicas):
        for other in of_replica(replica):
            replicas = [*plan.replicas]
            replicas[number] = other
            yield replace(plan, replicas=tuple(replicas))
    counts = [replica.micro_batches for replica in plan.replicas]
    for giver, taker in itertools.permutations(range(len(counts)), 2):
        gives, takes = counts[giver], counts[taker]
        if gives is not None and takes is not None and gives > 1:
            replicas = [*plan.replicas]
            replicas[giver] = replace(replicas[giver], micro_batches=gives - 1)
            replicas[taker] = replace(replicas[taker], micro_batches=takes + 1)
            yield replace(plan, replicas=tuple(replicas))
    gpus = plan.gpus or tuple(range(plan.ranks))
    for one, two in itertools.combinations(cluster.nodes, 2):
        if len(one.ranks) == len(two.ranks):
            both = list(zip(one.ranks, two.ranks, strict=True))
            places = dict([*both, *((there, here) for here, there in both)])
            yield replace(plan, gpus=tuple(places.get(gpu, gpu) for gpu in gpus))


def of_replica(replica: Replica) -> Iterator[Replica]:
    """Yield replicas with a layer moved over a border, or with one stage changed."""
    stages = replica.stages
    for border, by in itertools.product(range(len(stages) - 1), (-1, 1)):
        first, second = stages[border].layers, stages[border + 1].layers
        if first is not None and second is not None and first[0] < first[1] + by < second[1]:
            changed = [*stages]
            changed[border] = replace(stages[border], layers=(first[0], first[1] + by))
            changed[border + 1] = replace(stages[border + 1], layers=(first[1] + by, second[1]))
            yield replace(replica, stages=tuple(changed))
    for number, stage in enumerate(stages):
        for other in of_stage(stage):
            yield replace(replica, stages=(*stages[:number], other, *stages[number + 1 :]))


def of_stage(stage: Stage) -> Iterator[Stage]:
    """Yield stages that recompute otherwise, or with a group's tokens or heads dealt otherwise."""
    if stage.layers is not None:
        modes: list[Recompute] = ["none", "selective", "full"]
        if isinstance(stage.recompute, int):
            modes += [stage.recompute - 1, stage.recompute + 1]
        yield from (replace(stage, recompute=mode) for mode in modes if mode not in (stage.recompute, 0))
    for d, domain in enumerate(stage.domains):
        for g, group in enumerate(domain.groups):
            for other in of_group(group):
                groups = (*domain.groups[:g], other, *domain.groups[g + 1 :])
                changed = replace(domain, groups=groups)
                yield replace(stage, domains=(*stage.domains[:d], changed, *stage.domains[d + 1 :]))


def of_group(group: Group) -> Iterator[Group]:
    """Yield groups in which a member gives tokens to another one, or a head to the next."""
    members = group.members
    for part, (giver, taker) in itertools.product(PARTS, itertools.permutations(range(len(members)), 2)):
        tokens = max(1, int(part * sum(member.tokens for member in members) / len(members)))
        if members[giver].tokens > tokens:
            changed = [*members]
            changed[giver] = replace(members[giver], tokens=members[giver].tokens - tokens)
            changed[taker] = replace(members[taker], tokens=members[taker].tokens + tokens)
            yield replace(group, members=tuple(changed))
    for number, by in itertools.product(range(len(members) - 1), (-1, 1)):
        (begin, middle), (_, end) = members[number].heads, members[number + 1].heads
        if begin <= middle + by <= end:
            changed = [*members]
            changed[number] = replace(members[number], heads=(begin, middle + by))
            changed[number + 1] = replace(members[number + 1], heads=(middle + by, end))
            yield replace(group, members=tuple(changed))
