"""Check a domain: positions, tokens and heads of its groups, its share of the batch, and its experts."""

from __future__ import annotations

import itertools
import operator
from dataclasses import replace
from typing import NamedTuple, NoReturn

from megatron_hexi.errors import PlanError
from megatron_hexi.plan.model import Domain, Group, Member, Plan, Range, Replica, Stage
from megatron_hexi.plan.units import HeldExperts, expert_domains
from megatron_hexi.plan.workload import Workload
from megatron_hexi.yaml_file import Place
from megatron_hexi.yaml_schema import Where


class PlanPlace(NamedTuple):
    """A place in a plan that is checked."""

    where: Where
    steps: Place = ()

    def __call__(self, *steps: str | int) -> PlanPlace:
        """Return a place inside this one."""
        return PlanPlace(self.where, (*self.steps, *steps))

    def __str__(self) -> str:
        return self.where(self.steps)

    @property
    def root(self) -> PlanPlace:
        """The whole plan."""
        return PlanPlace(self.where)

    def refuse(self, problem: str, remedy: str) -> NoReturn:
        """Raise a `PlanError` that names the place, the problem and its remedy."""
        raise PlanError(f"{self} {problem}; {remedy}")


def check_domain(workload: Workload, domain: Domain, place: PlanPlace) -> None:
    """Check the positions, tokens and heads of a domain whose units have been checked."""
    width = len(domain.members[0].ranks)
    for g, group in enumerate(domain.groups):
        _check_group(replace(workload, tensor_parallel=width), group, place(g))
    _check_partition(
        [
            (segment, place(g, "segments", i))
            for g, group in enumerate(domain.groups)
            for i, segment in enumerate(group.segments)
        ],
        workload.seq_length,
        ("position", "group", "seq_length"),
        place,
    )


def _check_group(workload: Workload, group: Group, place: PlanPlace) -> None:
    for i, segment in enumerate(group.segments):
        check_range(segment, workload.seq_length, "seq_length", place("segments", i))
    for i, (before, after) in enumerate(itertools.pairwise(group.segments), start=1):
        if after[0] < before[1]:
            place("segments", i).refuse(
                f"{list(after)} does not come after {list(before)}",
                "list the segments in ascending order, without overlap",
            )
    tokens = sum(member.tokens for member in group.members)
    if tokens != group.tokens:
        place("members").refuse(
            f"hold {tokens} tokens together, the group's segments {group.tokens}", "make the two equal"
        )
    heads = "heads" if workload.tensor_parallel == 1 else "heads / tensor_parallel"
    for m, member in enumerate(group.members):
        check_range(member.heads, workload.local_heads, heads, place("members", m, "heads"))
    _check_partition(
        [(member.heads, place("members", m, "heads")) for m, member in enumerate(group.members)],
        workload.local_heads,
        ("head", "member", heads),
        place("members"),
    )


def check_range(span: Range, total: int, name: str, place: PlanPlace) -> None:
    """Refuse a range that runs backwards or ends after `total`; the error message calls `total` by `name`."""
    start, stop = span
    if stop < start:
        place.refuse(f"[{start}, {stop}] runs backwards", "write [start, stop] with start <= stop")
    if stop > total:
        place.refuse(f"[{start}, {stop}] ends after {name} = {total}", f"end it at {total} at most")


def _check_partition(
    ranges: list[tuple[Range, PlanPlace]], total: int, words: tuple[str, str, str], place: PlanPlace
) -> None:
    """Check that ranges cover [0, total) without overlap."""
    thing, owner, name = words
    reached = 0
    for (start, stop), here in sorted(ranges, key=operator.itemgetter(0)):
        if start == stop:
            continue
        if start > reached:
            break
        if start < reached:
            here.refuse(
                f"[{start}, {stop}] holds {thing} {start}, which another {owner} holds already",
                f"give every {thing} to one {owner}",
            )
        reached = stop
    if reached != total:
        place.refuse(
            f"leave {thing} {reached} to no {owner}", f"let the {owner}s cover [0, {total}), which is {name}"
        )


def check_shares(plan: Plan, replica: Replica, stage: Stage, place: PlanPlace) -> None:
    """Check how the domains of a stage divide micro-batches."""
    if stage.takes_micro_batches:
        _check_deal(replica, stage, place)
    else:
        _check_samples(plan, stage, place)


def _check_deal(replica: Replica, stage: Stage, place: PlanPlace) -> None:
    for d, domain in enumerate(stage.domains):
        here = place(d)
        if domain.samples is not None:
            here("samples").refuse(
                f"is {domain.samples}, in a stage whose domains take whole micro-batches",
                "give every domain samples, or every one micro_batches",
            )
        if domain.micro_batches is None:
            here("micro_batches").refuse("is missing", "say how many each domain takes")
    if stage.ministages is None:
        place(0, "micro_batches").refuse(
            f"is {stage.domains[0].micro_batches}, in a stage that runs 1F1B, where all take part in each",
            "give the stages of the replica ministages: 1 or more",
        )
    if replica.is_interleaved:
        place(0, "micro_batches").refuse(
            f"is {stage.domains[0].micro_batches}, in a replica with order: interleaved, where all take part "
            "in each",
            "give samples, or leave out the order",
        )
    total = sum(domain.micro_batches or 0 for domain in stage.domains)
    if replica.micro_batches != total:
        stated = "does not say" if replica.micro_batches is None else f"takes {replica.micro_batches}"
        place.refuse(
            f"take {total} micro-batches of an iteration, the replica {stated}",
            f"give the replica micro_batches: {total}, or the domains other numbers",
        )


def _check_samples(plan: Plan, stage: Stage, place: PlanPlace) -> None:
    stated = [domain.samples for domain in stage.domains]
    if stated == [None]:
        return
    for d, samples in enumerate(stated):
        if samples is None:
            place(d, "samples").refuse("is missing", "say how many of a micro-batch each domain takes")
    size, total = plan.job.micro_batch_size, sum(samples or 0 for samples in stated)
    if size is None:
        place.root("job", "micro_batch_size").refuse("is missing, domains share its samples", f"give {total}")
    if total != size:
        place.refuse(f"take {total} samples of each micro-batch", f"it has {size} (job.micro_batch_size)")


def check_images(replica: Replica, stage: Stage, place: PlanPlace) -> None:
    """Check how the units of a stage divide the images of a micro-batch."""
    for d, domain in enumerate(stage.domains):
        for g, group in enumerate(domain.groups):
            for m, member in enumerate(group.members):
                here = place(d, "groups", g, "members", m, "patches")
                if member.patches is None and any(one.patches is not None for one in domain.members):
                    here.refuse(
                        "is missing, other units of the domain state it",
                        "give 0 where a unit encodes no image",
                    )
                if member.patches is not None and stage is not replica.stages[0]:
                    here.refuse(
                        f"is {member.patches}, in a stage that encodes no images",
                        "leave it out: the replica's first stage encodes",
                    )
        if not any(member.patches != 0 for member in domain.members):
            place(d).refuse("leaves the images to no unit", "give a unit of the domain patches: 1 or more")


def check_experts(workload: Workload, stage: Stage, place: PlanPlace) -> None:
    """Check the experts that the units of a stage hold."""
    places: dict[int, PlanPlace] = {}
    stated = False
    for d, domain in enumerate(stage.domains):
        for g, group in enumerate(domain.groups):
            for m, member in enumerate(group.members):
                here = place(d, "groups", g, "members", m, "experts")
                places |= dict.fromkeys(member.ranks, here)
                if member.experts is not None:
                    stated = True
                    _check_ranges(workload, stage, member, here)
    if stated:
        assert workload.experts is not None
        for held in expert_domains(stage, workload.experts):
            _check_experts_partition(stage, held, workload.experts, places)


def check_expert_nodes(workload: Workload, stage: Stage, place: PlanPlace) -> None:
    """Check that the nodes between which a stage's tokens travel once have each of its ranks once."""
    if stage.expert_nodes is None:
        return
    if stage.layers is None:
        place.refuse("is given, in a stage that the job's pipeline repeats", "give the stage its layers")
    if workload.experts is None:
        place.root("workload", "experts").refuse("is missing, a stage has expert_nodes", "give --num-experts")
    stated = sorted(rank for node in stage.expert_nodes for rank in node)
    ranks = sorted(rank for member in stage.members for rank in member.ranks)
    if stated != ranks:
        place.refuse(f"has ranks {stated}, the stage {ranks}", "give each rank of the stage to one node")


def _check_ranges(workload: Workload, stage: Stage, member: Member, place: PlanPlace) -> None:
    assert member.experts is not None
    if stage.layers is None:
        place.refuse(
            "is given, in a stage that the job's pipeline repeats",
            "give the stage its layers, or leave it out and give --expert-model-parallel-size",
        )
    if workload.experts is None:
        place.root("workload", "experts").refuse("is missing, units hold some", "give --num-experts here")
    width = len(member.ranks)
    if len(member.experts) not in (1, width):
        place.refuse(
            f"has {len(member.experts)} ranges, the unit {width} rank{'s' if width > 1 else ''}",
            "give one range, which the ranks cut between them, or one for each rank",
        )
    for span in member.experts:
        check_range(span, workload.experts, "workload.experts", place)


def _check_experts_partition(
    stage: Stage, held: tuple[HeldExperts, ...], total: int, places: dict[int, PlanPlace]
) -> None:
    owners: dict[int, int] = {}
    for one in held:
        for expert in range(*one.experts) if one.part == 0 else ():
            if expert in owners:
                places[one.rank].refuse(
                    f"holds expert {expert}, which rank {owners[expert]} of the expert domain holds already",
                    "a domain ends with the unit that completes it: give each of its experts to one unit",
                )
            owners[expert] = one.rank
    missing = next((expert for expert in range(total) if expert not in owners), None)
    if missing is not None:
        ranks = sorted(one.rank for one in held)
        why = ", which takes whole micro-batches by itself," if stage.takes_micro_batches else ""
        places[held[-1].rank].refuse(
            f"leaves expert {missing} to no unit: the expert domain of ranks {ranks}{why} does not hold all "
            f"{total}",
            "give it to one of them",
        )
