"""The sections of a plan: units that are timed together.

The units of a section do the same kind of work at the same time: they are those of all domains, in stages
with the same number in any replica, that have the same terms (tensor-parallel size, samples of a micro-batch,
recomputation, exchange). Messages of a section share links with each other, but not with messages of other
sections. In a plan with a repeated stage, each pipeline stage is a section.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from megatron_hexi.cost.arrays import Bools, Ints
from megatron_hexi.cost.encoder import ImagesOfUnits, images_of_units
from megatron_hexi.cost.layer_bytes import kept_weights
from megatron_hexi.cost.model_part import ModelPart, chunk_ranges
from megatron_hexi.cost.placement import Placement, Placer
from megatron_hexi.cost.plan_arrays import PlanArrays, domain_arrays
from megatron_hexi.errors import PlanError
from megatron_hexi.mesh import most_kept, passes_ahead
from megatron_hexi.models.job import Job
from megatron_hexi.plan import Exchange, Plan
from megatron_hexi.plan.heads import divided_domain
from megatron_hexi.plan.model import Range
from megatron_hexi.plan.recompute import Again, Recompute, of_layer
from megatron_hexi.plan.units import DomainRow, domain_rows


@dataclass(frozen=True, eq=False)
class Section:
    """Units that are timed together.

    Args:
        number: number of the units' stages in their replicas.
        job: the job with the section's samples of a micro-batch, tensor-parallel size and recomputation.
        window: prefetch depth of the exchange, in steps.
        arrays: tokens, heads and groups of the units; a replica there is a domain of the section.
        replicas: number of each domain's replica in the plan, [domains].
        takes: numbers of the micro-batches that each domain takes, [domains]; ``None``: all of its replica.
        parts: the domains' parts of the model, numbers or arrays [domains].
        ranks: the units' ranks in the job, [U, tensor_parallel].
        units: number of each unit, [U]: in the stage for a plan with a repeated stage, else in the plan.
        placement: the units' GPUs.
        images: images of a micro-batch that the units encode; ``None``: they encode none.
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
    placement: Placement
    images: ImagesOfUnits | None = None

    @property
    def replica(self) -> Ints:
        """Number of each unit's replica in the plan, [U]."""
        return self.replicas[self.arrays.unit_replica]

    @cached_property
    def part(self) -> ModelPart:
        """The units' parts of the model, numbers or arrays [U]."""
        return self.parts.of(self.arrays.unit_replica)

    def turns(self, micro_batches: Ints) -> Ints:
        """Return the number of micro-batches that each unit takes, [U], from those of each replica."""
        taken = [
            micro_batches[replica] if own is None else len(own)
            for replica, own in zip(self.replicas.tolist(), self.takes, strict=True)
        ]
        return np.array(taken)[self.arrays.unit_replica]

    def by_domain[N: (int, float)](self, values: NDArray[Any] | N) -> list[N]:
        """Return one number for each domain, from a number or an array [domains] as in `parts`."""
        return values.tolist() if isinstance(values, np.ndarray) else [values] * len(self.replicas)


class _SectionTerms(NamedTuple):
    """The terms that domains of one section have in common."""

    stage: int
    width: int
    samples: int
    mode: Recompute
    exchange: Exchange


def plan_sections(
    plan: Plan,
    job: Job,
    placer: Placer,
    gpus: Sequence[int] | None = None,
    part: ModelPart | None = None,
    *,
    micro_batches: Ints,
) -> list[Section]:
    """Return all sections of a plan that passed its checks, by stage number.

    Args:
        job: the job, which gives the number of pipeline stages to a plan with a repeated stage.
        gpus: number in the cluster of each rank's GPU; ``None``: see `Placer.place`.
        part: the part of the model in the plan's only stage; ``None``: the part that the job assigns to it.

    Raises:
        PlanError: a domain has several groups, and the model layers with a state.
    """
    divided = divided_domain(plan, job.model.has_state)
    if divided is not None:
        raise PlanError(
            f"model {job.model.name} has layers whose state does not pass between groups yet, and "
            f"{divided[0]} has a domain of {divided[1]} groups; put its members into one group"
        )
    found: dict[_SectionTerms, list[DomainRow]] = {}
    for row in domain_rows(plan, job.micro_batch_size, job.pipeline_parallel, job.model.layers):
        terms = _SectionTerms(
            stage=row.stage,
            width=row.width,
            samples=row.samples[1] - row.samples[0],
            mode=of_layer(row.recompute or job.recompute),
            exchange=row.exchange,
        )
        found.setdefault(terms, []).append(row)
    order = sorted(found, key=lambda terms: terms.stage)
    ranks = [_ranks(found[terms]) for terms in order]
    plain = [_in_bf16(found[terms]) for terms in order] if job.precision == "fp8" else None
    is_latent = plan.workload.latent_exchange is not None
    jobs = [_section_job(job, terms.width, terms.samples, terms.mode, is_latent) for terms in order]
    leads = np.sort(np.concatenate([own[:, 0] for own in ranks]))
    return [
        Section(
            number=terms.stage,
            job=own_job,
            window=terms.exchange.window,
            arrays=domain_arrays(
                replace(plan.workload, tensor_parallel=terms.width),
                [row.domain for row in found[terms]],
                terms.exchange.parts,
            ),
            replicas=np.array([row.replica for row in found[terms]]),
            takes=tuple(row.micro_batches for row in found[terms]),
            parts=part or _parts(found[terms], job, micro_batches, own_job),
            ranks=own,
            units=np.searchsorted(leads, own[:, 0]) % plan.units,
            placement=placement,
            images=images_of_units(found[terms], own_job, part),
        )
        for terms, own_job, own, placement in zip(
            order, jobs, ranks, placer.place(plan, ranks, gpus, plain), strict=True
        )
    ]


@lru_cache(maxsize=256)  # with what the job derives from its model
def _section_job(job: Job, width: int, samples: int, mode: Recompute, latent_exchange: bool) -> Job:
    """Return the job of one micro-batch in one stage, with the terms of a section's units."""
    return replace(
        job,
        tensor_parallel=width,
        pipeline_parallel=1,
        virtual_stages=1,
        micro_batch_size=samples,
        global_batch_size=samples,
        recompute=mode,
        latent_exchange=latent_exchange,
    )


def _ranks(rows: Sequence[DomainRow]) -> Ints:
    """Return the ranks of the units of some domains of one stage, ascending, [U, tensor_parallel]."""
    ranks = np.array([m.ranks for row in rows for group in row.domain.groups for m in group.members])
    return ranks[np.argsort(ranks[:, 0])] + rows[0].first_rank


def _in_bf16(rows: Sequence[DomainRow]) -> Bools:
    """Return whether a plan has each of these units compute in bf16 in a job in fp8, as `_ranks`, [U]."""
    members = [member for row in rows for group in row.domain.groups for member in group.members]
    return np.array([member.precision == "bf16" for member in sorted(members, key=lambda one: one.ranks)])


def _parts(rows: Sequence[DomainRow], job: Job, micro_batches: Ints, own_job: Job) -> ModelPart:
    """Return the part of the model that each domain holds, [domains]; `own_job` is the section's."""
    chunks = job.virtual_stages
    layers, again = [], []
    ranges = np.zeros((len(rows), max(len(row.ministages or range(chunks)) for row in rows), 2), dtype=int)
    for number, row in enumerate(rows):
        own = _layer_ranges(row, job)
        ranges[number, : len(own)] = own
        layers.append(sum(stop - first for first, stop in own))
        again.append(Again.of(row.recompute or job.recompute).layers(layers[-1], chunks))
    return ModelPart(
        layers=np.array(layers),
        again=np.array(again),
        is_first=np.array([row.stage == 0 for row in rows]),
        is_last=np.array([row.is_last for row in rows]),
        ahead=np.array([_kept_at_a_time(row, job, int(micro_batches[row.replica]), own_job) for row in rows]),
        ministages=np.array([len(row.ministages or ()) if row.in_turn else 0 for row in rows]),
        rows_on_host=np.array(["activations" in row.offload for row in rows]),
        ranges=ranges,
        chunks=chunks,
        # Of the first of several chunks, two groups of micro-batches run forward before one runs backward.
        first_ahead=np.array([row.depth * (1 + (chunks > 1 or row.interleaved)) for row in rows]),
    )


def _layer_ranges(row: DomainRow, job: Job) -> Sequence[Range]:
    """Return the layers of each ministage of a domain, or of each chunk of the job's."""
    if row.ministages is not None:
        return row.ministages
    assert row.layers is not None, "the job says how many there are"
    first, stop = row.layers
    return chunk_ranges(job, first, stop - first)


def _kept_at_a_time(row: DomainRow, job: Job, micro_batches: int, own_job: Job) -> float:
    """Return the largest number of passes whose activations are kept at a time.

    With interleaved ministages: the number of whole micro-batches whose activations take as many bytes.
    """
    if not row.interleaved or row.ministages is None:
        return passes_ahead(row.depth, row.stage, job.virtual_stages) + 1
    kinds, weights = job.model.kind_of_layers, kept_weights(own_job)
    sizes = [sum(weights[kind] for kind in kinds[first:stop]) for first, stop in row.ministages]
    sizes[-1] += job.model.mtp_layers * weights[kinds[-1]] * row.is_last
    return most_kept(row.depth, row.stage, micro_batches, sizes) / sum(sizes)
