"""Tables of all units and all domains of a job, one row per unit or domain.

A repeated stage is expanded into the p pipeline stages of the job. Stage s has the ranks that follow those of
the stages before it, as Megatron numbers ranks (tp-cp-dp-pp), and the s-th of p equal parts of the layers.

Experts of a stage are taken unit by unit in the order of the plan: as soon as units hold every expert, they
form an expert domain, and the next unit with experts begins another (expert data parallelism). Domains that
take whole micro-batches run different micro-batches at the same time, so each of them forms expert domains of
its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from megatron_hexi.plan.model import Domain, Exchange, Member, Plan, Range, Replica, Stage
from megatron_hexi.plan.recompute import Recompute
from megatron_hexi.plan.shares import domain_micro_batches
from megatron_hexi.plan.terms import Offload, UnitRates
from megatron_hexi.plan.workload import Workload


@dataclass(frozen=True)
class DomainRow:
    """A row of the table of domains: properties of one domain, which all units of the domain share.

    Args:
        domain: groups and members of the domain; for a repeated stage, with the ranks of the first stage.
        first_rank: offset to add to the ranks of `domain`.
        layers: range of the stage's transformer layers; with ministages, only the number of layers counts;
            ``None``: unknown, for a repeated stage.
        micro_batches: numbers of the micro-batches that the domain processes, ascending; ``None``: all.
        recompute: activations that the stage's backward pass recomputes; ``None``: the job's setting.
        ministages: layers of each ministage of the stage; ``None``: the stage runs whole.
        interleaved: whether the replica runs its ministages in interleaved 1F1B.
        offload: data of the stage that waits in host memory while it is not used.
        rates: rates of the domain's units, in the order of `domain.members`; ``None``: the plan has none.
    """

    replica: int
    stage: int
    depth: int
    number: int
    domain: Domain
    first_rank: int
    layers: Range | None
    samples: Range
    micro_batches: tuple[int, ...] | None
    recompute: Recompute | None
    exchange: Exchange
    ministages: tuple[Range, ...] | None
    interleaved: bool
    offload: tuple[Offload, ...]
    rates: UnitRates | None

    @property
    def width(self) -> int:
        """Tensor-parallel size of the domain's units."""
        return len(self.domain.groups[0].members[0].ranks)

    @property
    def in_turn(self) -> bool:
        """Whether all micro-batches pass one ministage before the next: its weights are used only then."""
        return self.ministages is not None and not self.interleaved

    @property
    def is_last(self) -> bool:
        """Whether the stage is the last of its replica, which computes the loss."""
        return self.stage == self.depth - 1


@dataclass(frozen=True)
class Unit(DomainRow):
    """A row of the table of units: one unit with the unit's domain, ranks, tokens and heads.

    Args:
        ranks: tensor-parallel ranks of the unit in the job, ascending.
        member: number of the unit among the members of the domain.
        group: number of the A2A group in the domain.
        tokens: tokens of the unit's shard.
        state: weight of the unit in the division of the optimizer's state among units with the same weights.
        precision: `bf16` if the unit computes in bf16 whatever the job says; ``None``: as the job says.
        patches: weight of the unit in the division of images; ``None``: the unit encodes all, if its stage
            encodes.
    """

    ranks: tuple[int, ...]
    member: int
    group: int
    tokens: int
    heads: Range
    state: int
    precision: Literal["bf16"] | None
    patches: int | None


def domain_rows(
    plan: Plan, micro_batch_size: int = 1, stages: int = 1, layers: int | None = None
) -> tuple[DomainRow, ...]:
    """Return a row for each domain of a plan, in the order of replicas, stages and domains.

    Args:
        stages: number of pipeline stages of the job, for a plan with a repeated stage.
        layers: number of layers of the model, for a plan with a repeated stage; ``None``: the rows of such a
            plan have no layers.
    """
    return tuple(
        row
        for number, replica in enumerate(plan.replicas)
        for row in _replica_rows(plan, replica, number, micro_batch_size, (stages, layers))
    )


def _replica_rows(
    plan: Plan, replica: Replica, number: int, micro_batch_size: int, repeats: tuple[int, int | None]
) -> Iterator[DomainRow]:
    count, layers = repeats
    is_repeated = replica.stages[0].layers is None
    stages = replica.stages * count if is_repeated else replica.stages
    ranks = plan.ranks if is_repeated and count > 1 else 0
    units = {} if plan.rates is None else {member.lead: number for number, member in enumerate(plan.members)}
    for s, stage in enumerate(stages):
        stage_layers = stage.layers
        if stage_layers is None and layers is not None:
            stage_layers = (s * layers // count, (s + 1) * layers // count)
        ministages = None if stage.ministages is None else replica.ministage_layers(s)
        first = 0
        for d, (domain, micro_batches) in enumerate(
            zip(stage.domains, domain_micro_batches(stage), strict=True)
        ):
            samples = first, first + (domain.samples or micro_batch_size)
            first = samples[1] if micro_batches is None else 0
            yield DomainRow(
                replica=number,
                stage=s,
                depth=len(stages),
                number=d,
                domain=domain,
                first_rank=s * ranks,
                layers=stage_layers,
                samples=samples,
                micro_batches=micro_batches,
                recompute=stage.recompute,
                exchange=stage.exchange or plan.exchange,
                ministages=ministages,
                interleaved=replica.is_interleaved,
                offload=stage.offload or (),
                rates=plan.rates and plan.rates.of([units[member.lead] for member in domain.members]),
            )


def unit_rows(
    plan: Plan, micro_batch_size: int = 1, stages: int = 1, layers: int | None = None
) -> tuple[Unit, ...]:
    """Return a row for each unit of a plan, in rank order; the arguments are those of `domain_rows`."""
    units = [
        Unit(
            **vars(row),
            ranks=tuple(rank + row.first_rank for rank in member.ranks),
            member=number,
            group=group,
            tokens=member.tokens,
            heads=member.heads,
            state=member.state,
            precision=member.precision,
            patches=member.patches,
        )
        for row in domain_rows(plan, micro_batch_size, stages, layers)
        for number, (group, member) in enumerate(_members(row.domain))
    ]
    return tuple(sorted(units, key=lambda unit: unit.ranks[0]))


def _members(domain: Domain) -> list[tuple[int, Member]]:
    """Return the members of a domain in rank order, each with the number of the member's group."""
    members = [(number, member) for number, group in enumerate(domain.groups) for member in group.members]
    return sorted(members, key=lambda pair: pair[1].lead)


def unit_ranks(workload: Workload, number: int) -> tuple[int, ...]:
    """Return the ranks, in Megatron's numbering, of the unit with a given number in a repeated stage."""
    width = workload.tensor_parallel
    return tuple(range(number * width, (number + 1) * width))


def job_ranks(plan: Plan, stages: int) -> int:
    """Return the number of ranks of a job that trains by a plan.

    Args:
        stages: number of pipeline stages of the job, for a plan with a repeated stage.
    """
    return plan.ranks * (stages if plan.is_repeated else 1)


def covers_gpus(plan: Plan, gpus: int) -> bool:
    """Whether a job with this number of GPUs can run a plan.

    The number must be the plan's number of ranks or, with a repeated stage, a multiple of the stage's ranks.
    """
    return gpus > 0 and (gpus % plan.ranks == 0 if plan.is_repeated else gpus == plan.ranks)


def spell_ranks(plan: Plan) -> str:
    """Return the number of ranks of a plan as text: ``8 ranks``, or ``4 ranks a pipeline stage``."""
    return f"{plan.ranks} ranks{' a pipeline stage' if plan.is_repeated else ''}"


def rank_gpus(plan: Plan, gpus: int) -> Sequence[int]:
    """Return the number, in the order of the cluster file, of the GPU of each rank of the job.

    Args:
        gpus: number of GPUs of the cluster; a plan that names no GPUs uses all of them in file order.
    """
    return range(gpus) if plan.gpus is None else plan.gpus


@dataclass(frozen=True)
class HeldExperts:
    """The experts that one rank holds in each layer with experts.

    Args:
        experts: range of expert numbers; may be empty.
        part: number of the slice of each expert's hidden columns that the rank holds, from 0.
        parts: number of slices into which the experts are cut; 1: the rank holds whole experts.
    """

    rank: int
    experts: Range
    part: int = 0
    parts: int = 1

    @property
    def count(self) -> int:
        """Number of experts that the rank holds, whole or as a slice of each."""
        return self.experts[1] - self.experts[0]


def held_experts(member: Member, total: int) -> tuple[HeldExperts, ...]:
    """Return the experts that each rank of a unit holds."""
    ranges = member.experts or ((0, total),)
    if len(ranges) > 1:
        return tuple(HeldExperts(rank, own) for rank, own in zip(member.ranks, ranges, strict=True))
    parts = len(member.ranks)
    return tuple(HeldExperts(rank, ranges[0], part, parts) for part, rank in enumerate(member.ranks))


def expert_domains(stage: Stage, total: int) -> tuple[tuple[HeldExperts, ...], ...]:
    """Return the expert domains of a stage: for each, the experts of its ranks, in ascending order of rank.

    A unit without experts belongs to the expert domain before it, or to the first.
    """
    domains: list[list[HeldExperts]] = [[]]
    together = 0  # experts of the last domain's ranks; the slices of an expert count once
    for domain in stage.domains:
        if stage.takes_micro_batches and domains[-1]:
            domains.append([])
            together = 0
        for member in (member for group in domain.groups for member in group.members):
            held = held_experts(member, total)
            own = sum(one.count for one in held if one.part == 0)
            if together >= total and own:
                domains.append([])
                together = 0
            domains[-1] += held
            together += own
    return tuple(tuple(sorted(one, key=lambda held: held.rank)) for one in domains)
