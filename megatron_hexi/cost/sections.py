"""The units of a plan by what they are timed with.

A section is units that do the same kind of work at the same time: of all stages with one number in their
replicas, the domains whose terms are alike (tensor-parallel size, samples of a micro-batch, recomputation,
exchange). Its messages share links with each other, and with nothing of another section. Of a plan whose one
stage the job repeats, each pipeline stage is a section.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np

from megatron_hexi.cost.arrays import Floats, Ints
from megatron_hexi.cost.job import Job, RecomputeMode, layers_again, recompute_mode
from megatron_hexi.cost.layer import Stage
from megatron_hexi.cost.memory import ModelPart
from megatron_hexi.cost.plan_arrays import PlanArrays, domain_arrays, plan_arrays
from megatron_hexi.mesh import stage_deal
from megatron_hexi.plan import Domain, Exchange, Plan


@dataclass(frozen=True, eq=False)
class Ground:
    """GPUs of a section's units; what does not depend on what they hold.

    Args:
        gpus: the cluster's GPU of each rank, [U, tensor_parallel].
        stage: what the units run on.
        usable: bytes that a GPU of each unit has, [U].
    """

    gpus: Ints
    stage: Stage
    usable: Floats


@dataclass(frozen=True, eq=False)
class Section:
    """Units that are timed together.

    Args:
        number: of their stages, in the replicas.
        job: theirs: samples of a micro-batch, tensor-parallel size, recomputation.
        window: exchange steps under way ahead of the one in use.
        arrays: what they hold; what is a replica there is a domain of the section.
        replicas: the plan's replica of each domain, [domains].
        takes: the micro-batches of an iteration that each domain takes, [domains]; ``None``: all.
        parts: what the domains have of the model, numbers or [domains].
        ranks: of the job, [U, tensor_parallel].
        units: their numbers, [U]: in their pipeline stage where the job repeats one, else in the plan.
        ground: their GPUs.
    """

    number: int
    job: Job
    window: int
    arrays: PlanArrays
    replicas: Ints
    takes: tuple[tuple[int, ...] | None, ...]
    parts: ModelPart
    ranks: Ints
    units: Ints
    ground: Ground

    @property
    def replica(self) -> Ints:
        """The plan's replica of each unit, [U]."""
        return self.replicas[self.arrays.unit_replica]

    @cached_property
    def part(self) -> ModelPart:
        """What the units have of the model, numbers or [U]."""
        return self.parts.of(self.arrays.unit_replica)

    def turns(self, micro_batches: Ints) -> Ints:
        """How many micro-batches each unit takes of those of its replica, [U]."""
        taken = [
            micro_batches[replica] if own is None else len(own)
            for replica, own in zip(self.replicas.tolist(), self.takes, strict=True)
        ]
        return np.array(taken)[self.arrays.unit_replica]

    def by_domain(self, values: Ints | int) -> list[int]:
        """Numbers of `parts`, one a domain."""
        return values.tolist() if isinstance(values, np.ndarray) else [values] * len(self.replicas)


#: Finds the GPUs of sections from their ranks.
Stand = Callable[[Sequence[Ints]], list[Ground]]


def plan_sections(plan: Plan, job: Job, stand: Stand, part: ModelPart | None = None) -> list[Section]:
    """All sections of a plan that passed its checks, by stage number.

    Args:
        plan: the plan.
        job: the job, with the number of stages where they are alike.
        stand: finds their GPUs.
        part: what the one stage of a plan has of the model; ``None``: what the job says.

    Raises:
        PlanError: its one stage is repeated, and has domains, state or recomputation of its own.
    """
    return _repeated(plan, job, stand, part) if plan.is_repeated else _uneven(plan, job, stand)


def repeated_ranks(plan: Plan, job: Job) -> list[Ints]:
    """Ranks of each pipeline stage as Megatron numbers them by default (tp-cp-dp-pp), [U, tp] each."""
    stages, width = job.pipeline_parallel, job.tensor_parallel
    return list(np.arange(stages * plan.units * width).reshape(stages, plan.units, width))


def _repeated(plan: Plan, job: Job, stand: Stand, part: ModelPart | None) -> list[Section]:
    arrays, ranks = plan_arrays(plan), repeated_ranks(plan, job)
    return [
        Section(
            number=number,
            job=job,
            window=plan.exchange.window,
            arrays=arrays,
            replicas=np.arange(len(plan.replicas)),
            takes=(None,) * len(plan.replicas),
            parts=part or ModelPart.of_job(job, number),
            ranks=own,
            units=np.arange(plan.units),
            ground=ground,
        )
        for number, (own, ground) in enumerate(zip(ranks, stand(ranks), strict=True))
    ]


class _Terms(NamedTuple):
    """What domains of one section have in common."""

    number: int
    width: int
    samples: int
    mode: RecomputeMode
    exchange: Exchange


class _Place(NamedTuple):
    """A domain, what it takes, and what its stage has: layers, those computed again, stages from it on."""

    replica: int
    domain: Domain
    takes: tuple[int, ...] | None
    layers: int
    again: int
    ahead: int
    ministages: int
    rows_on_host: bool


def _uneven(plan: Plan, job: Job, stand: Stand) -> list[Section]:
    found: dict[_Terms, list[_Place]] = {}
    for r, replica in enumerate(plan.replicas):
        for s, stage in enumerate(replica.stages):
            assert stage.layers is not None, "the plan passed its checks"
            recompute = job.recompute if stage.recompute is None else stage.recompute
            layers = stage.layers[1] - stage.layers[0]
            again = layers_again(layers, recompute)
            for domain, takes in zip(stage.domains, stage_deal(stage), strict=True):
                terms = _Terms(
                    number=s,
                    width=len(domain.members[0].ranks),
                    samples=domain.samples or job.micro_batch_size,
                    mode=recompute_mode(recompute),
                    exchange=stage.exchange or plan.exchange,
                )
                ahead, parts = len(replica.stages) - s, stage.ministages or 0
                place = _Place(r, domain, takes, layers, again, ahead, parts, stage.offloads("activations"))
                found.setdefault(terms, []).append(place)
    number_of = {member.lead: number for number, member in enumerate(plan.members)}
    order = sorted(found, key=lambda terms: terms.number)
    members = {
        terms: sorted((m for place in found[terms] for m in place.domain.members), key=lambda m: m.lead)
        for terms in order
    }
    ranks = [np.array([member.ranks for member in members[terms]]) for terms in order]
    return [
        Section(
            number=terms.number,
            job=replace(
                job,
                tensor_parallel=terms.width,
                pipeline_parallel=1,
                micro_batch_size=terms.samples,
                global_batch_size=terms.samples,
                recompute=terms.mode,
            ),
            window=terms.exchange.window,
            arrays=domain_arrays(
                replace(plan.workload, tensor_parallel=terms.width),
                [place.domain for place in found[terms]],
                terms.exchange.parts,
            ),
            replicas=np.array([place.replica for place in found[terms]]),
            takes=tuple(place.takes for place in found[terms]),
            parts=ModelPart(
                layers=np.array([place.layers for place in found[terms]]),
                again=np.array([place.again for place in found[terms]]),
                is_first=np.full(len(found[terms]), terms.number == 0),
                is_last=np.array([place.ahead == 1 for place in found[terms]]),
                ahead=np.array([place.ahead for place in found[terms]]),
                ministages=np.array([place.ministages for place in found[terms]]),
                rows_on_host=np.array([place.rows_on_host for place in found[terms]]),
            ),
            ranks=own,
            units=np.array([number_of[member.lead] for member in members[terms]]),
            ground=ground,
        )
        for terms, own, ground in zip(order, ranks, stand(ranks), strict=True)
    ]
