"""Collectives of gradients and weights, once an iteration and between ministages, and owners of the state."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cache
from typing import NamedTuple

import numpy as np

from megatron_hexi.cost.arrays import Floats, Ints
from megatron_hexi.cost.experts import ExpertsOnRanks
from megatron_hexi.cost.held_weights import HeldWeights
from megatron_hexi.cost.hosts import Hosts
from megatron_hexi.cost.lanes import Passing
from megatron_hexi.cost.memory import owned_params, part_params, weight_bytes
from megatron_hexi.cost.model_part import ModelPart, Present
from megatron_hexi.cost.rings import Rings
from megatron_hexi.cost.sections import Section
from megatron_hexi.grouping import grouped
from megatron_hexi.mesh import Bucket, Mesh, Residence, Way, bucket_residence, ministage_passes
from megatron_hexi.models.job import Job


class WeightCollective(NamedTuple):
    """A collective of all gradients, or of all weights, over the ranks that hold the same, once an iteration.

    Args:
        element_bytes: bytes of each weight in the collective.
        hides_behind: the pass behind which it travels; ``None``: it is exposed.
    """

    element_bytes: float
    hides_behind: Way | None


def weight_collectives(
    job: Job, *, has_ministages: bool = False
) -> tuple[WeightCollective, WeightCollective]:
    """Return the reduce-scatter of gradients, and the all-gather of weights after the optimizer's step.

    With `overlap_gradients` both are hidden, but not the weights if ministages need them one after the other.
    """
    hidden, each = job.overlap_gradients, weight_bytes(job)
    # Only trained weights change, and frozen ones stay where they are; else ministages gather all of theirs.
    gathered = each.weight if has_ministages and not job.lora_rank else job.trained_share * job.element_bytes
    return (
        WeightCollective(each.gradient, "backward" if hidden else None),
        WeightCollective(gathered, "forward" if hidden and not has_ministages else None),
    )


@dataclass(frozen=True, eq=False)
class Turn:
    """A collective of all gradients, or of all weights, once an iteration.

    Args:
        seconds: seconds of each domain, over all sets of holders that its ranks are in, [sections][domains].
        hides_behind: the pass of a layer behind which it travels; ``None``: it is exposed.
    """

    seconds: list[Floats]
    hides_behind: Way | None


@dataclass(frozen=True, eq=False)
class Reductions:
    """Collectives of all ranks of the job, and places of weights, gradients and state.

    Args:
        turns: the collectives of an iteration, in order.
        owned: number of weights whose optimizer state a GPU of each unit keeps, [sections], numbers or [U].
        present: numbers of weights on the device and in host memory at the peak, [sections]; ``None``: all
            are on the device.
        passing: transfers of ministages, by replica and stage.
    """

    turns: tuple[Turn, ...]
    owned: list[Floats | float]
    present: list[Present | None]
    passing: Mapping[tuple[int, int], Passing] = field(default_factory=dict)


def repeated_reductions(
    job: Job,
    sections: Sequence[Section],
    rings: Rings,
    shards: int | None,
    experts: Sequence[ExpertsOnRanks | None],
) -> Reductions:
    """Return the collectives of a repeated stage, each over all ranks of a pipeline stage, as in Megatron.

    With the distributed optimizer gradients are reduce-scattered and weights all-gathered, without it
    gradients are all-reduced (twice their bytes).

    Args:
        shards: number of units that share the optimizer's state; ``None``: the units of the plan.
    """
    held = [
        (section.parts.of(np.int64(0)), section.placement.stage.gpus, len(section.replicas))
        for section in sections
    ]
    owned: list[Floats | float] = []
    for (part, gpus, _), placed in zip(held, experts, strict=True):
        owners = shards or len(gpus)
        owned.append(owned_params(job, part_params(job, part, trained=True), owners))
        if placed is not None:
            copies = len(np.unique(placed.domain)) * owners / len(gpus)
            routed = part_params(job, part, placed.whole) - part_params(job, part)
            owned[-1] = owned[-1] + owned_params(job, routed, max(copies, 1))
    return Reductions(repeated_turns(job, held, rings), owned, [None] * len(owned))


def repeated_turns(job: Job, stages: Iterable[tuple[ModelPart, Ints, int]], rings: Rings) -> tuple[Turn, ...]:
    """Return the collectives of gradients and weights of a repeated stage, in the order in which they run.

    Args:
        stages: for each pipeline stage, its part of the model, the first GPU of each unit in rank order, and
            the number of domains.
    """
    collectives = weight_collectives(job)
    turns = tuple(Turn([], one.hides_behind) for one in collectives)
    for part, gpus, domains in stages:
        params = part_params(job, part, trained=True)
        for turn, one in zip(turns, collectives, strict=True):
            seconds = rings.seconds(gpus, float(params * one.element_bytes), job.tensor_parallel)
            turn.seconds.append(np.full(domains, seconds))
    if job.distributed_optimizer:
        return turns
    gradients, _ = turns
    return (Turn([2 * seconds for seconds in gradients.seconds], gradients.hides_behind),)


def uneven_reductions(
    mesh: Mesh, job: Job, sections: Sequence[Section], rings: Rings, hosts: Hosts
) -> Reductions:
    """Return the collectives of stages that differ: one for each set of ranks that hold the same weights.

    Gradients are reduced to the owners of the optimizer's state, and weights come from there. All ranks take
    the sets in one order, so a rank in several sets waits for the others of each. Gradients may hide behind
    the backward pass and weights behind the next forward pass. Weights and gradients that ministages fetch
    and send travel at other times (`cost.lanes`).
    """
    weights = HeldWeights(job, mesh)
    owned = np.zeros(len(mesh.units))
    lead, gpu = (np.zeros(len(mesh.units), dtype=np.int64) for _ in range(2))
    for section in sections:
        gpu[section.ranks] = section.placement.gpus
        lead[section.ranks] = section.placement.gpus[:, :1]
    in_turn = any(unit.in_turn for unit in mesh.units)
    collectives = weight_collectives(job, has_ministages=in_turn)
    busy = np.zeros((len(collectives), len(mesh.units)))
    placing, travel = _Placing(job, mesh), _Travel(job, mesh)
    for bucket, least in weights.buckets():
        holders = np.array(bucket.holders)
        params = weights.size(bucket)
        gpus, width = _ring(mesh, holders, weights.width, lead, gpu)
        seconds = [rings.seconds(gpus, params * one.element_bytes, width, least) for one in collectives]
        for rank, whole, own in weights.of(bucket):
            owned[rank] += own
            kept = placing.add(bucket, rank, whole, own)
            travel.add(kept, rank, seconds, whole if kept.whole else own)
        if kept.whole:  # for all of its holders, or for none (`mesh.keeping`)
            busy[:, holders] = (busy[:, holders].max(axis=1) + seconds)[:, None]
    found = placing.at_peak()
    return Reductions(
        turns=tuple(
            Turn(
                [_by_domain(section, times[section.ranks].max(axis=1)) for section in sections],
                one.hides_behind,
            )
            for times, one in zip(busy, collectives, strict=True)
        ),
        owned=[owned[section.ranks].max(axis=1) for section in sections],
        present=[
            found.of(section.ranks) if in_turn or mesh.plan.has_offload else None for section in sections
        ],
        passing=travel.passing(gpu, hosts),
    )


class _Travel:
    """Adds up the transfers of weights and gradients of each rank's ministages.

    These are transfers between ranks, and to and from host memory.
    """

    def __init__(self, job: Job, mesh: Mesh) -> None:
        self._element, self._gradient, _ = weight_bytes(job)
        if job.lora_rank:  # adapters alone travel
            self._element = job.trained_share * job.element_bytes
        self._mesh = mesh
        most = max(len(unit.ministages or ()) for unit in mesh.units)
        #: Seconds of gathers and sums, and bytes from and to host memory, [ranks, ministages] each.
        self._gathers, self._sums, self._inward, self._outward = np.zeros((4, len(mesh.units), most))

    def add(self, kept: Residence, rank: int, seconds: Sequence[float], count: float) -> None:
        """Add the transfers of a bucket on one rank.

        Args:
            seconds: seconds of the collectives of the bucket's gradients and of its weights.
            count: number of the bucket's weights that the rank keeps between the passes of its ministage.
        """
        number = kept.ministage
        if number is None:
            return
        if not kept.whole:
            self._sums[rank, number] += seconds[0]
            self._gathers[rank, number] += seconds[1]
        self._inward[rank, number] += count * self._element * kept.weights_on_host
        self._outward[rank, number] += count * self._gradient * kept.gradients_on_host

    def passing(self, gpus: Ints, hosts: Hosts) -> dict[tuple[int, int], Passing]:
        """Return the transfers of each stage's slowest rank, by replica and stage."""
        if not self._gathers.size:
            return {}
        inward, outward = (
            np.stack([hosts.copy_seconds(gpus, column) for column in size.T], axis=1)
            for size in (self._inward, self._outward)
        )
        units = enumerate(self._mesh.units)
        ranks = grouped(((unit.replica, unit.stage), rank) for rank, unit in units if unit.in_turn)
        found = {}
        for stage, own in ranks.items():
            count = len(self._mesh.units[own[0]].ministages or ())
            gathers, sums, copies_in, copies_out = (
                times[own].max(axis=0)[:count] for times in (self._gathers, self._sums, inward, outward)
            )
            found[stage] = Passing(gathers, sums, copies_in, copies_out)
        return found


class _Placing:
    """Counts each rank's weights, gradients and state on the device and in host memory (`mesh.residence`)."""

    def __init__(self, job: Job, mesh: Mesh) -> None:
        self._element, self._gradient, _ = weight_bytes(job)
        self._are_frozen = bool(job.lora_rank)
        self._mesh = mesh
        self._offload = [unit.offload for unit in mesh.units]
        self._counts = {name: np.zeros(len(mesh.units)) for name in (one.name for one in fields(Present))}
        #: Number of weights of each ministage of a rank.
        self._by_number: defaultdict[int, defaultdict[int, float]] = defaultdict(lambda: defaultdict(float))
        self._most = cache(self._most_at_once)  # ranks of a stage are alike

    def add(self, bucket: Bucket, rank: int, whole: float, own: float) -> Residence:
        """Add a bucket to the counts of a rank, and return its residence there.

        Args:
            whole: number of weights of the bucket on the rank.
            own: number of these whose optimizer state the rank keeps.
        """
        kept, counts = bucket_residence(bucket, rank, self._offload[rank]), self._counts
        if kept.passes:
            assert kept.ministage is not None
            self._by_number[rank][kept.ministage] += whole
            rest = whole if kept.whole else own
            if self._are_frozen:  # the runtime gathers and offloads what is trained: the adapters
                counts["weights"][rank] += whole
            else:
                counts["host_weights" if kept.weights_on_host else "weights"][rank] += rest
            counts["host_gradients" if kept.gradients_on_host else "gradients"][rank] += rest
        else:
            counts["weights"][rank] += whole
            counts["gradients"][rank] += whole
            counts["host_gradients"][rank] += own * kept.gradients_on_host
        counts["host_state" if kept.state_on_host else "state"][rank] += own
        counts["host_masters"][rank] += own * (kept.state_on_host and not kept.weights_on_host)
        return kept

    def at_peak(self) -> Present:
        """Return the counts at the time when weights and gradients take most bytes on the device."""
        here, added = self._counts["weights"].copy(), self._counts["gradients"].copy()
        for rank, sizes in self._by_number.items():
            unit = self._mesh.units[rank]
            most = self._most(len(unit.ministages or (1,)), unit.is_last, tuple(sizes.items()))
            here[rank] += most[0] * (not self._are_frozen)
            added[rank] += most[1]
        return Present(**{**self._counts, "weights": here, "gradients": added})

    def _most_at_once(
        self, ministages: int, gives_loss: bool, sizes: tuple[tuple[int, float], ...]
    ) -> tuple[float, float]:
        """Return the numbers of weights and of gradients on the device in the ministage pass with most bytes.

        `sizes` are pairs of a ministage's number and its number of weights.
        """
        of = defaultdict(float, sizes)
        sums = (
            (sum(of[number] for number in one.weights), sum(of[number] for number in one.gradients))
            for one in ministage_passes(ministages, gives_loss)
        )
        return max(sums, key=lambda pair: self._element * pair[0] + self._gradient * pair[1])


def _ring(mesh: Mesh, holders: Ints, width: Sequence[int], lead: Ints, gpu: Ints) -> tuple[Ints, int]:
    """Return the GPUs of a set of holders, and the number of such rings that run at the same time.

    If units of one size hold the same weights, each of their tensor-parallel ranks has a ring, all equally
    long.
    """
    places = {(width[rank], mesh.units[rank].ranks.index(rank)) for rank in holders.tolist()}
    if len(places) == 1:
        return lead[holders], next(iter(places))[0]
    return gpu[holders], 1


def _by_domain(section: Section, seconds: Floats) -> Floats:
    longest = np.zeros(len(section.replicas))
    np.maximum.at(longest, section.arrays.unit_replica, seconds)
    return longest
