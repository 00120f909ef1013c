"""Check the experts of a stage's units: the ranks of each expert domain together hold every expert once."""

from __future__ import annotations

from megatron_hexi.plan.check_domain import check_range, refuse
from megatron_hexi.plan.experts import HeldExperts, expert_domains
from megatron_hexi.plan.model import Member, Stage
from megatron_hexi.plan.workload import Workload
from megatron_hexi.yaml_file import Place
from megatron_hexi.yaml_schema import Where


def check_experts(workload: Workload, stage: Stage, place: Place, where: Where) -> None:
    """Check the experts that the units of a stage hold.

    Raises:
        PlanError: a rule is broken.
    """
    places: dict[int, Place] = {}
    stated = False
    for d, domain in enumerate(stage.domains):
        for g, group in enumerate(domain.groups):
            for m, member in enumerate(group.members):
                here = (*place, d, "groups", g, "members", m, "experts")
                places |= dict.fromkeys(member.ranks, here)
                if member.experts is not None:
                    stated = True
                    _check_ranges(workload, stage, member, here, where)
    if stated:
        assert workload.experts is not None
        for held in expert_domains(stage, workload.experts):
            _check_partition(stage, held, workload.experts, places, where)


def _check_ranges(workload: Workload, stage: Stage, member: Member, place: Place, where: Where) -> None:
    assert member.experts is not None
    if stage.layers is None:
        refuse(
            where,
            place,
            "is given, in a stage that the job's pipeline repeats",
            "give the stage its layers, or leave it out and give --expert-model-parallel-size",
        )
    if workload.experts is None:
        refuse(where, ("workload", "experts"), "is missing, units hold some", "give --num-experts here")
    width = len(member.ranks)
    if len(member.experts) not in (1, width):
        refuse(
            where,
            place,
            f"has {len(member.experts)} ranges, the unit {width} rank{'s' if width > 1 else ''}",
            "give one range, which the ranks cut between them, or one for each rank",
        )
    for span in member.experts:
        check_range(span, workload.experts, "workload.experts", place, where)


def _check_partition(
    stage: Stage, held: tuple[HeldExperts, ...], total: int, places: dict[int, Place], where: Where
) -> None:
    owners: dict[int, int] = {}
    for one in held:
        for expert in range(*one.experts) if one.part == 0 else ():
            if expert in owners:
                refuse(
                    where,
                    places[one.rank],
                    f"holds expert {expert}, which rank {owners[expert]} of the expert domain holds already",
                    "a domain ends with the unit that completes it: give each of its experts to one unit",
                )
            owners[expert] = one.rank
    missing = next((expert for expert in range(total) if expert not in owners), None)
    if missing is not None:
        ranks = sorted(one.rank for one in held)
        why = ", which takes whole micro-batches by itself," if stage.takes_micro_batches else ""
        refuse(
            where,
            places[held[-1].rank],
            f"leaves expert {missing} to no unit: the expert domain of ranks {ranks}{why} does not hold all "
            f"{total}",
            "give it to one of them",
        )
