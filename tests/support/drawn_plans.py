"""Random plans of stages in every order of ministages, many of whose ranks hold nothing of something.

Each is a plan of `stage_plan`, of whose replicas some run in ministages, one after the other or interleaved,
with offload, or with whole micro-batches dealt to the domains of a stage.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from random import Random

from megatron_hexi.mesh import Mesh, cut_pieces, make_buckets
from megatron_hexi.plan import Domain, Group, Member, Plan, Replica, Stage, Workload, validate_plan
from megatron_hexi.plan.terms import Offload
from tests.support.expert_plans import expert_plan
from tests.support.stage_plans import boxes_of, stage_plan

#: Shares of the optimizer's state: beside the large ones, most others round to nothing.
_STATES = (1, 1, 1, 10**3, 10**6, 2**40)
_OFFLOADS: tuple[tuple[Offload, ...], ...] = (
    (),
    ("optimizer",),
    ("activations",),
    ("optimizer", "activations"),
    ("parameters", "optimizer"),
    ("parameters", "optimizer", "activations"),
)


#: Plans that are drawn before other properties are wanted: two ranks have no units beside replicas.
_ATTEMPTS = 100
#: What a plan can have beside ranks that hold nothing of something.
FEATURES = ("ministages", "interleaved", "dealt micro-batches", "offload", "replicas", "units", "samples")


def drawn_plan(
    random: Random,
    workload: Workload,
    micro_batch_size: int,
    ranks: int,
    micro_batches: int,
    wanted: Callable[[], set[str]],
) -> Plan:
    """Return a valid plan for so many ranks with the properties that are wanted.

    Args:
        random: random numbers.
        workload: the workload, with layers, and with experts for plans that place them.
        micro_batch_size: samples of a micro-batch.
        ranks: number of ranks, at least 2.
        micro_batches: micro-batches of all replicas together.
        wanted: draws names of `traits`.
    """
    makes = stage_plan if workload.experts is None else partial(expert_plan, experts=workload.experts)
    while True:
        names = wanted()
        for _ in range(_ATTEMPTS):
            plan = makes(random, workload, micro_batch_size, ranks, micro_batches=micro_batches)
            plan = replace(plan, replicas=tuple(_in_order(random, replica) for replica in plan.replicas))
            plan = _with_domains(plan, lambda domain: _emptied(random, domain))
            # The owners of state take longest to find.
            if names - {"no state"} <= traits(plan) and ("no state" not in names or _has_no_state(plan)):
                validate_plan(plan)
                return plan


def traits(plan: Plan) -> set[str]:
    """Return the `FEATURES` of a plan, and what some rank holds nothing of: tokens, heads, experts."""
    members, stages = plan.members, plan.stages
    found = {
        "no tokens": not all(one.tokens for one in members),
        "no heads": any(start == stop for start, stop in (one.heads for one in members)),
        "no experts": any(start == stop for one in members for start, stop in one.experts or ()),
        "ministages": plan.has_ministages,
        "interleaved": any(replica.is_interleaved for replica in plan.replicas),
        "dealt micro-batches": plan.takes_micro_batches,
        "offload": plan.has_offload,
        "replicas": len(plan.replicas) > 1,
        "units": any(len(one.ranks) > 1 for one in members),
        "samples": any(domain.samples is not None for stage in stages for domain in stage.domains),
    }
    return {name for name, has in found.items() if has}


def _has_no_state(plan: Plan) -> bool:
    """Return whether some rank would keep no optimizer state of the model of `boxes_of`."""
    mesh = Mesh(plan, plan.job.micro_batch_size or 1, sequence_parallel=False)
    weights = {rank: unit.state for rank, unit in enumerate(mesh.units)}
    buckets = make_buckets(cut_pieces(boxes_of(mesh)), weights, None)
    return len({slab.owner for bucket in buckets for slab in bucket.slabs}) < plan.ranks


def _with_domains(plan: Plan, change: Callable[[Domain], Domain]) -> Plan:
    def changed(stage: Stage) -> Stage:
        return replace(stage, domains=tuple(map(change, stage.domains)))

    return replace(
        plan, replicas=tuple(replace(one, stages=tuple(map(changed, one.stages))) for one in plan.replicas)
    )


def _emptied(random: Random, domain: Domain) -> Domain:
    """Take tokens or heads from some members, and give all other shares of state."""
    return replace(domain, groups=tuple(_emptied_group(random, group) for group in domain.groups))


def _emptied_group(random: Random, group: Group) -> Group:
    members = [replace(one, state=random.choice(_STATES)) for one in group.members]
    if len(members) > 1 and random.random() < 0.4:
        giver, taker = random.sample(range(len(members)), 2)
        members[taker] = replace(members[taker], tokens=members[taker].tokens + members[giver].tokens)
        members[giver] = replace(members[giver], tokens=0)
    if len(members) > 1 and random.random() < 0.4:
        _join_heads(members, random.randrange(len(members) - 1))
    return replace(group, members=tuple(members))


def _join_heads(members: list[Member], place: int) -> None:
    """Give a member's heads to the one that has those before."""
    order = sorted(range(len(members)), key=lambda number: members[number].heads)
    before, behind = order[place : place + 2]
    start, middle, stop = members[before].heads[0], *members[behind].heads
    assert middle == members[before].heads[1]
    members[before] = replace(members[before], heads=(start, stop))
    members[behind] = replace(members[behind], heads=(stop, stop))


def _in_order(random: Random, replica: Replica) -> Replica:
    """Run a replica whole, in ministages that take turns, or interleaved."""
    most = min(stage.layers[1] - stage.layers[0] for stage in replica.stages if stage.layers)
    count = random.choice([None, *range(1, min(3, most) + 1)])
    interleaved = (count or 1) > 1 and len(replica.stages) > 1 and random.random() < 0.7
    stages = tuple(_stage(random, stage, replica, count, interleaved) for stage in replica.stages)
    return replace(replica, stages=stages, order="interleaved" if interleaved else None)


def _stage(random: Random, stage: Stage, replica: Replica, count: int | None, interleaved: bool) -> Stage:
    assert stage.layers is not None
    assert replica.micro_batches is not None
    layers, domains = stage.layers[1] - stage.layers[0], stage.domains
    deals = count is not None and not interleaved and 1 < len(domains) <= replica.micro_batches
    if deals and all(one.experts is None for one in stage.members) and random.random() < 0.7:
        shares = _parts(random, replica.micro_batches, len(domains))
        domains = tuple(
            replace(domain, samples=None, micro_batches=share)
            for domain, share in zip(domains, shares, strict=True)
        )
    offload = random.choice(
        [
            offload
            for offload in _OFFLOADS
            if ("parameters" not in offload or ((count or 1) > 1 and not interleaved))
            and ("activations" not in offload or (count is not None and not interleaved))
        ]
    )
    return replace(
        stage,
        domains=domains,
        ministages=None if count is None else _parts(random, layers, count),
        offload=offload or None,
        recompute=random.choice([None, None, "selective", "full"]),
    )


def _parts(random: Random, total: int, count: int) -> tuple[int, ...]:
    """Cut a number into so many positive parts."""
    cuts = sorted(random.sample(range(1, total), count - 1))
    return tuple(stop - start for start, stop in itertools.pairwise([0, *cuts, total]))
