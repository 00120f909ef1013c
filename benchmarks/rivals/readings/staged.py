"""Layouts of pipelines with different stages, as published planners choose them, timed by the cost model.

A planner says which GPUs are a stage and how much of the model it should have. Fitting that in memory is the
same for all planners: layers beyond what a stage holds go to the other stages, and each stage recomputes no
more than it must.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import numpy as np

from megatron_hexi.cluster import Cluster
from megatron_hexi.cost import CostModel, ceiling_tokens_per_s
from megatron_hexi.models import Job
from megatron_hexi.plan import Domain, Group, JobTerms, Member, Plan, Replica, Stage
from megatron_hexi.plan.recompute import RECOMPUTES, Recompute
from megatron_hexi.plan.units import rank_gpus
from megatron_hexi.planner.fleet.units import find_units
from megatron_hexi.planner.joint import Candidate
from megatron_hexi.planner.joint.placing import StagePlace, number_ranks
from megatron_hexi.planner.layouts.deal import assign_in_turn, assign_tokens
from megatron_hexi.planner.layouts.trial import order_of
from megatron_hexi.planner.request import Request

#: The most times that layers are reassigned by the memory that the last assignment took.
_ROUNDS = 3
#: Number of drafts that are settled, and the factor with which a share of overdrawn memory adds to a draft's
#: seconds when drafts are compared.
_SETTLED, _EXCESS = 4, 2


class StageChoice(NamedTuple):
    """A stage that a published planner chose.

    Args:
        units: GPUs of each tensor-parallel unit, numbered in the cluster.
        weight: its part of the layers, relative to the pipeline's other stages.
        samples: samples of a micro-batch that each unit processes; a single unit processes all.
    """

    units: tuple[tuple[int, ...], ...]
    weight: float
    samples: tuple[int, ...]


#: Stages of a pipeline, the first one first.
Pipeline = tuple[StageChoice, ...]


@dataclass(frozen=True)
class _Assignment:
    """Layers and recomputation of each stage, and micro-batches of each pipeline."""

    layers: tuple[tuple[int, ...], ...]
    again: tuple[tuple[Recompute, ...], ...]
    micro_batches: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class _Draft:
    """Pipelines with a first assignment, and its cost."""

    pipelines: tuple[Pipeline, ...]
    assignment: _Assignment
    candidate: Candidate


class StagedJudge:
    """Assigns layers, recomputation and micro-batches to pipelines, and times them.

    Args:
        request: the job, with the terms that are fixed.
        cluster: the cluster that the job runs on.
    """

    def __init__(self, request: Request, cluster: Cluster) -> None:
        self.request, self.cluster = request, cluster
        devices = {id(rank.device): rank.device for rank in cluster.ranks}
        rates = {key: ceiling_tokens_per_s(request.job, [device]) for key, device in devices.items()}
        #: Tokens/s of each GPU at its best rates.
        self.speeds = [rates[id(rank.device)] for rank in cluster.ranks]
        #: Usable GiB of each GPU.
        self.memory = [rank.device.usable_gib for rank in cluster.ranks]
        alone = replace(request.job, tensor_parallel=1, pipeline_parallel=1)
        #: All GPUs in canonical order, so that the order in the cluster file does not matter.
        self.order = [unit.gpus[0][0] for unit in find_units(alone, cluster).units]
        fixed = "recompute" in request.fixed
        self._modes: tuple[Recompute, ...] = (request.job.recompute,) if fixed else RECOMPUTES
        self._models: dict[tuple[int, int, int], CostModel] = {}
        self.trials = 0

    def best(self, choices: Iterable[tuple[tuple[Pipeline, ...], int]]) -> Candidate | None:
        """Return the best of some pipelines, each with its micro-batch size; ``None``: none is possible.

        All are timed with the most recomputation. Layers and recomputation are then fitted to memory for the
        best of them.
        """
        first = [draft for draft in itertools.starmap(self._first, choices) if draft is not None]
        first.sort(key=lambda draft: (1 + _EXCESS * draft.candidate.order[0]) * draft.candidate.iteration_s)
        assignment = [self._settle(draft) for draft in first[:_SETTLED]]
        return min(assignment, key=order_of, default=None)

    def _first(self, pipelines: tuple[Pipeline, ...], micro_batch_size: int) -> _Draft | None:
        """Assign layers by weight and micro-batches by speed; ``None`` where that is impossible."""
        job = self.request.job
        total = job.global_batch_size // micro_batch_size
        if max(map(len, pipelines)) > job.model.layers or len(pipelines) > total:
            return None
        placed = {
            StagePlace(r, s, len(pipeline)): [gpu for unit in stage.units for gpu in unit]
            for r, pipeline in enumerate(pipelines)
            for s, stage in enumerate(pipeline)
        }
        gpus = number_ranks(self.cluster, placed)
        if not gpus:
            return None
        layers = tuple(
            _assign_layers(job.model.layers, [stage.weight for stage in pipeline], None)
            for pipeline in pipelines
        )
        rates = [sum(self._rate(stage) for stage in pipeline) for pipeline in pipelines]
        again = tuple((self._modes[-1],) * len(pipeline) for pipeline in pipelines)
        assignment = _Assignment(layers, again, _assign_batch(total, [1 / rate for rate in rates]))
        return _Draft(pipelines, assignment, self._candidate(pipelines, assignment, micro_batch_size, gpus))

    def _settle(self, draft: _Draft) -> Candidate:
        """Reassign layers and micro-batches, then reduce recomputation as far as memory allows."""
        pipelines, assignment, candidate = draft.pipelines, draft.assignment, draft.candidate
        size, gpus = candidate.job.micro_batch_size, self._gpus(candidate)
        best = assignment, candidate
        for _ in range(_ROUNDS):
            reassigned = self._reassigned(pipelines, assignment, candidate)
            if reassigned == assignment:
                break
            assignment, candidate = reassigned, self._candidate(pipelines, reassigned, size, gpus)
            best = min(best, (assignment, candidate), key=lambda pair: pair[1].order)
        assignment, candidate = best
        if len(self._modes) == 1 or not candidate.fits:
            return candidate
        return self._less_again(pipelines, assignment, candidate)

    def _gpus(self, candidate: Candidate) -> Sequence[int]:
        return tuple(rank_gpus(candidate.plan, len(self.cluster.ranks)))

    def _rate(self, stage: StageChoice) -> float:
        return sum(self.speeds[gpu] for unit in stage.units for gpu in unit)

    def _reassigned(
        self, pipelines: Sequence[Pipeline], assignment: _Assignment, candidate: Candidate
    ) -> _Assignment:
        """Reassign layers as far as memory holds them, and micro-batches by the pipelines' timed seconds."""
        layers = []
        for pipeline, assigned, full in zip(pipelines, assignment.layers, _fullness(candidate), strict=True):
            caps = np.maximum(1, np.floor(np.array(assigned) / np.maximum(full, 1e-9)))
            # A stage that fits may keep its layers, one that does not may get no more.
            caps = np.where(np.array(full) <= 1, np.maximum(caps, assigned), np.minimum(caps, assigned))
            layers.append(_assign_layers(sum(assigned), [stage.weight for stage in pipeline], caps))
        periods = [
            max(stage.total for stage in pipeline_timing.stage_phases)
            for pipeline_timing in candidate.timing.pipelines
        ]
        return replace(
            assignment,
            layers=tuple(layers),
            micro_batches=_assign_batch(sum(assignment.micro_batches), periods),
        )

    def _less_again(
        self, pipelines: Sequence[Pipeline], assignment: _Assignment, candidate: Candidate
    ) -> Candidate:
        """Return the candidate with as little recomputation on each stage as memory allows."""
        size, gpus = candidate.job.micro_batch_size, self._gpus(candidate)
        again = [list(modes) for modes in assignment.again]
        for mode in reversed(RECOMPUTES[:-1]):
            uniform = replace(assignment, again=tuple((mode,) * len(modes) for modes in again))
            fullness = _fullness(self._candidate(pipelines, uniform, size, gpus))
            for stage_modes, full in zip(again, fullness, strict=True):
                stage_modes[:] = [
                    mode if part <= 1 else old for part, old in zip(full, stage_modes, strict=True)
                ]
        less = replace(assignment, again=tuple(map(tuple, again)))
        return min(candidate, self._candidate(pipelines, less, size, gpus), key=order_of)

    def _candidate(
        self,
        pipelines: Sequence[Pipeline],
        assignment: _Assignment,
        micro_batch_size: int,
        gpus: Sequence[int],
    ) -> Candidate:
        self.trials += 1
        rank = {gpu: number for number, gpu in enumerate(gpus)}
        replicas = []
        for pipeline, layers, again, count in zip(
            pipelines, assignment.layers, assignment.again, assignment.micro_batches, strict=True
        ):
            stages, first = [], 0
            for stage, number, mode in zip(pipeline, layers, again, strict=True):
                stages.append(
                    Stage(self._domains(stage, rank), layers=(first, first + number), recompute=mode)
                )
                first += number
            replicas.append(Replica(tuple(stages), count))
        widths = {len(unit) for pipeline in pipelines for stage in pipeline for unit in stage.units}
        width = widths.pop() if len(widths) == 1 else 0
        base = self.request.job
        shares = any(len(stage.units) > 1 for pipeline in pipelines for stage in pipeline)
        plan = Plan(
            replace(base.workload(), tensor_parallel=width),
            tuple(replicas),
            job=JobTerms(micro_batch_size=micro_batch_size) if shares else JobTerms(),
            gpus=None if list(gpus) == list(range(len(self.cluster.ranks))) else tuple(gpus),
        )
        model = self._model(width or 1, micro_batch_size, len(pipelines))
        return Candidate(plan, model.job, model.timing(plan))

    def _domains(self, stage: StageChoice, rank: dict[int, int]) -> tuple[Domain, ...]:
        """Return one domain for each unit, which has all tokens and heads of its samples."""
        job = self.request.job
        several = len(stage.units) > 1
        domains = []
        for unit, samples in zip(stage.units, stage.samples, strict=True):
            heads = job.model.heads // len(unit)
            member = Member(tuple(sorted(rank[gpu] for gpu in unit)), job.seq_length, (0, heads))
            group = Group(((0, job.seq_length),), (member,))
            domains.append(Domain((group,), samples if several else None))
        return tuple(sorted(domains, key=lambda domain: domain.groups[0].members[0].lead))

    def _model(self, width: int, micro_batch_size: int, replicas: int) -> CostModel:
        key = width, micro_batch_size, replicas
        if key not in self._models:
            job: Job = replace(
                self.request.job,
                tensor_parallel=width,
                pipeline_parallel=1,
                micro_batch_size=micro_batch_size,
                recompute="none",
                data_parallel=replicas,
            )
            self._models[key] = CostModel(job, self.cluster)
        return self._models[key]


def _fullness(candidate: Candidate) -> list[list[float]]:
    """Return the fullest GPU's share of used memory, for each replica and stage."""
    full, replicas = candidate.timing.stage_fullness, candidate.plan.replicas
    return [[full[r, s] for s in range(len(replica.stages))] for r, replica in enumerate(replicas)]


def _assign_layers(layers: int, weights: Sequence[float], caps: np.ndarray | None) -> tuple[int, ...]:
    """Assign layers in proportion to weights, at least one each, within the caps if possible."""
    dealt = list(assign_tokens(layers, np.array(weights), caps))
    while min(dealt) < 1:
        dealt[dealt.index(max(dealt))] -= 1
        dealt[dealt.index(min(dealt))] += 1
    return tuple(dealt)


def _assign_batch(micro_batches: int, seconds: Sequence[float]) -> tuple[int, ...]:
    """Assign at least one micro-batch to each pipeline, given its seconds for one."""
    return assign_in_turn(micro_batches, [partial(operator.mul, each) for each in seconds], least=1)


def spell_stages(plan: Plan, cluster: Cluster) -> str:
    """Return a plan as text, such as ``40 x (8 H100, TP 4: 27 layers / 24 A100, TP 8: 37 layers)``."""
    gpus = rank_gpus(plan, len(cluster.ranks))
    replicas = []
    for replica in plan.replicas:
        stages = []
        for stage in replica.stages:
            gpu_counts: dict[str, int] = {}
            for member in stage.members:
                for rank in member.ranks:
                    kind = cluster.ranks[gpus[rank]].device.name.partition("-")[0]
                    gpu_counts[kind] = gpu_counts.get(kind, 0) + 1
            who = " + ".join(f"{count} {kind}" for kind, count in gpu_counts.items())
            layers = "" if stage.layers is None else f": {stage.layers[1] - stage.layers[0]} layers"
            stages.append(f"{who}, TP {len(stage.members[0].ranks)}{layers}")
        replicas.append(f"{replica.micro_batches} x ({' / '.join(stages)})")
    return "; ".join(dict.fromkeys(replicas))
