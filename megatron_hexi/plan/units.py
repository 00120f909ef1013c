"""Tables of a job's units and domains, a row for each.

A plan of one stage that the job's pipeline repeats is written out here: stage s of p has the ranks that
follow those of the stages before it, as Megatron numbers them (tp-cp-dp-pp), and the s-th of p equal parts
of the layers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from megatron_hexi.plan.model import Domain, Exchange, Member, Plan, Range, Replica
from megatron_hexi.plan.shares import domain_micro_batches
from megatron_hexi.plan.terms import Offload, Recompute


@dataclass(frozen=True)
class DomainRow:
    """A domain of a stage: properties that all of its units share.

    Args:
        replica: number of its replica.
        stage: number of its stage in the replica.
        depth: stages of the replica.
        number: number of the domain in its stage.
        domain: its groups and members; in a stage that the job repeats, with the ranks of the first stage.
        first_rank: offset that is added to the ranks of `domain`.
        layers: the stage's transformer layers, of which only the number holds for ministages; ``None``: all
            of a stage that the job repeats.
        samples: samples that it takes of each micro-batch.
        micro_batches: micro-batches of an iteration that it takes, ascending; ``None``: all.
        recompute: what the stage's backward pass recomputes; ``None``: as the job says.
        exchange: how keys and values travel.
        ministages: layers of each of the stage's ministages; ``None``: it runs whole.
        offload: data of the stage that waits in host memory while it is not used.
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
    offload: tuple[Offload, ...]

    @property
    def width(self) -> int:
        """Tensor-parallel size of its units."""
        return len(self.domain.groups[0].members[0].ranks)

    @property
    def is_last(self) -> bool:
        """Whether the stage computes the loss."""
        return self.stage == self.depth - 1


@dataclass(frozen=True)
class Unit(DomainRow):
    """A unit, with the part of the sequence that it holds.

    Args:
        ranks: its tensor-parallel ranks in the job, ascending.
        member: its number among the members of the domain.
        group: number of its A2A group in the domain.
        tokens: size of its shard.
        heads: its query heads in attention.
        state: its share of the optimizer's state, relative to others that hold the same weights.
    """

    ranks: tuple[int, ...]
    member: int
    group: int
    tokens: int
    heads: Range
    state: int


def domain_rows(
    plan: Plan, micro_batch_size: int = 1, stages: int = 1, layers: int | None = None
) -> tuple[DomainRow, ...]:
    """Return all domains of a plan, in the order of replicas, stages and domains.

    Args:
        plan: a plan that passed its checks.
        micro_batch_size: samples of a micro-batch (B).
        stages: pipeline stages of the job, for a plan whose stage it repeats.
        layers: layers of the model, likewise; ``None``: rows of such a plan have no layers.
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
                offload=stage.offload or (),
            )


def unit_rows(
    plan: Plan, micro_batch_size: int = 1, stages: int = 1, layers: int | None = None
) -> tuple[Unit, ...]:
    """Return all units, in the order of their ranks. Arguments are those of `domain_rows`."""
    units = [
        Unit(
            **vars(row),
            ranks=tuple(rank + row.first_rank for rank in member.ranks),
            member=number,
            group=group,
            tokens=member.tokens,
            heads=member.heads,
            state=member.state,
        )
        for row in domain_rows(plan, micro_batch_size, stages, layers)
        for number, (group, member) in enumerate(_members(row.domain))
    ]
    return tuple(sorted(units, key=lambda unit: unit.ranks[0]))


def _members(domain: Domain) -> list[tuple[int, Member]]:
    """Return the members in the order of their ranks, each with the number of its group."""
    members = [(number, member) for number, group in enumerate(domain.groups) for member in group.members]
    return sorted(members, key=lambda pair: pair[1].lead)


def job_ranks(plan: Plan, stages: int) -> int:
    """Return the number of ranks of the job.

    Args:
        plan: the plan.
        stages: pipeline stages of the job, for a plan whose stage it repeats.
    """
    return plan.ranks * (stages if plan.is_repeated else 1)


def covers_gpus(plan: Plan, gpus: int) -> bool:
    """Whether a number of GPUs is that of the job's ranks: a multiple of those of a stage that it repeats."""
    return gpus > 0 and (gpus % plan.ranks == 0 if plan.is_repeated else gpus == plan.ranks)


def spell_ranks(plan: Plan) -> str:
    """Return the ranks of a plan as text, such as ``8 ranks``, or ``4 ranks a pipeline stage``."""
    return f"{plan.ranks} ranks{' a pipeline stage' if plan.is_repeated else ''}"


def rank_gpus(plan: Plan, gpus: int) -> Sequence[int]:
    """Return the GPU of each rank of the job, by number in the cluster file.

    Args:
        plan: the plan.
        gpus: number of GPUs of the cluster: without GPUs in the plan, ranks use all in file order.
    """
    return range(gpus) if plan.gpus is None else plan.gpus
