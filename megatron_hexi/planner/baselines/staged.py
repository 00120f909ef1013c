"""Layouts of pipelines with stages of their own, as published planners choose them, judged by the cost model.

A planner says which GPUs are a stage and how much of the model it should have; what memory then asks for is
found here, the same way for all of them: layers beyond what a stage holds go to the others, and each stage
computes again no more than it must.
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
from megatron_hexi.cost import RECOMPUTES, CostModel, Job, ceiling_tokens_per_s
from megatron_hexi.plan import Domain, Group, JobTerms, Member, Plan, Replica, Stage
from megatron_hexi.plan.terms import Recompute
from megatron_hexi.plan.units import rank_gpus
from megatron_hexi.planner.fleet.units import find_units
from megatron_hexi.planner.joint import Candidate
from megatron_hexi.planner.joint.placing import Place, number_ranks
from megatron_hexi.planner.layouts.deal import deal_in_turn, deal_tokens
from megatron_hexi.planner.layouts.trial import order_of
from megatron_hexi.planner.request import Request

#: Times that layers are dealt anew by what memory held of them.
_ROUNDS = 3
#: Layouts that are settled; until then, memory overdrawn by a part counts as so many times that part of time.
_SETTLED, _EXCESS = 4, 2


class StageChoice(NamedTuple):
    """A stage as a planner chose it.

    Args:
        units: GPUs of the cluster of each tensor-parallel unit.
        weight: its part of the layers, relative to the pipeline's other stages.
        samples: of a micro-batch, of each unit; of a stage of one unit: all.
    """

    units: tuple[tuple[int, ...], ...]
    weight: float
    samples: tuple[int, ...]


#: The first stage first.
Pipeline = tuple[StageChoice, ...]


@dataclass(frozen=True)
class _Settled:
    """What is left to settle for some pipelines: layers and recomputation of each stage, micro-batches."""

    layers: tuple[tuple[int, ...], ...]
    again: tuple[tuple[Recompute, ...], ...]
    micro_batches: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class _Draft:
    """Pipelines that are to be settled, and what they cost as they are."""

    pipelines: tuple[Pipeline, ...]
    settled: _Settled
    found: Candidate


class StagedJudge:
    """Judges pipelines of one request on one cluster.

    Args:
        request: the job, and what of it is fixed.
        cluster: where.
    """

    def __init__(self, request: Request, cluster: Cluster) -> None:
        self.request, self.cluster = request, cluster
        devices = {id(rank.device): rank.device for rank in cluster.ranks}
        rates = {key: ceiling_tokens_per_s(request.job, [device]) for key, device in devices.items()}
        #: Tokens/s of each GPU at its best rates.
        self.speeds = [rates[id(rank.device)] for rank in cluster.ranks]
        #: GiB of each GPU.
        self.memory = [rank.device.usable_gib for rank in cluster.ranks]
        alone = replace(request.job, tensor_parallel=1, pipeline_parallel=1)
        #: All GPUs in canonical order: what the cluster file lists first decides nothing.
        self.order = [unit.gpus[0][0] for unit in find_units(alone, cluster).units]
        fixed = "recompute" in request.fixed
        self._modes: tuple[Recompute, ...] = (request.job.recompute,) if fixed else RECOMPUTES
        self._models: dict[tuple[int, int, int], CostModel] = {}
        self.trials = 0

    def best(self, choices: Iterable[tuple[tuple[Pipeline, ...], int]]) -> Candidate | None:
        """The best of some pipelines, each with its micro-batch size; ``None``: none can be cut so.

        All are timed with everything computed again. What memory asks for is settled for the best of them.
        """
        first = [one for one in itertools.starmap(self._first, choices) if one is not None]
        first.sort(key=lambda one: (1 + _EXCESS * one.found.order[0]) * one.found.iteration_s)
        settled = [self._settle(one) for one in first[:_SETTLED]]
        return min(settled, key=order_of, default=None)

    def _first(self, pipelines: tuple[Pipeline, ...], micro_batch_size: int) -> _Draft | None:
        """Layers by weights, the batch by speeds; ``None`` where that cannot be, or ranks not be numbered."""
        job = self.request.job
        total = job.global_batch_size // micro_batch_size
        if max(map(len, pipelines)) > job.model.layers or len(pipelines) > total:
            return None
        placed = {
            Place(r, s, len(pipeline)): [gpu for unit in stage.units for gpu in unit]
            for r, pipeline in enumerate(pipelines)
            for s, stage in enumerate(pipeline)
        }
        gpus = number_ranks(self.cluster, placed)
        if not gpus:
            return None
        layers = tuple(
            _deal_layers(job.model.layers, [stage.weight for stage in pipeline], None)
            for pipeline in pipelines
        )
        rates = [sum(self._rate(stage) for stage in pipeline) for pipeline in pipelines]
        again = tuple((self._modes[-1],) * len(pipeline) for pipeline in pipelines)
        settled = _Settled(layers, again, _deal_batch(total, [1 / rate for rate in rates]))
        return _Draft(pipelines, settled, self._candidate(pipelines, settled, micro_batch_size, gpus))

    def _settle(self, draft: _Draft) -> Candidate:
        """Its layers and micro-batches dealt anew, and no more computed again than must be."""
        pipelines, settled, found = draft.pipelines, draft.settled, draft.found
        size, gpus = found.job.micro_batch_size, self._gpus(found)
        best = settled, found
        for _ in range(_ROUNDS):
            dealt = self._dealt_again(pipelines, settled, found)
            if dealt == settled:
                break
            settled, found = dealt, self._candidate(pipelines, dealt, size, gpus)
            best = min(best, (settled, found), key=lambda one: one[1].order)
        settled, found = best
        if len(self._modes) == 1 or not found.fits:
            return found
        return self._less_again(pipelines, settled, found)

    def _gpus(self, found: Candidate) -> Sequence[int]:
        return tuple(rank_gpus(found.plan, len(self.cluster.ranks)))

    def _rate(self, stage: StageChoice) -> float:
        return sum(self.speeds[gpu] for unit in stage.units for gpu in unit)

    def _dealt_again(self, pipelines: Sequence[Pipeline], settled: _Settled, found: Candidate) -> _Settled:
        """Layers that memory holds, and micro-batches by the seconds that pipelines really take."""
        layers = []
        for pipeline, own, full in zip(pipelines, settled.layers, _fullness(found), strict=True):
            caps = np.maximum(1, np.floor(np.array(own) / np.maximum(full, 1e-9)))
            # What fits as it is may keep it.
            caps = np.where(np.array(full) <= 1, np.maximum(caps, own), np.minimum(caps, own))
            layers.append(_deal_layers(sum(own), [stage.weight for stage in pipeline], caps))
        periods = [max(stage.total for stage in one.stages) for one in found.timing.pipelines]
        return replace(
            settled,
            layers=tuple(layers),
            micro_batches=_deal_batch(sum(settled.micro_batches), periods),
        )

    def _less_again(self, pipelines: Sequence[Pipeline], settled: _Settled, found: Candidate) -> Candidate:
        """The same with each stage computing again as little as fits."""
        size, gpus = found.job.micro_batch_size, self._gpus(found)
        again = [list(modes) for modes in settled.again]
        for mode in reversed(RECOMPUTES[:-1]):
            uniform = replace(settled, again=tuple((mode,) * len(modes) for modes in again))
            fullness = _fullness(self._candidate(pipelines, uniform, size, gpus))
            for own, full in zip(again, fullness, strict=True):
                own[:] = [mode if part <= 1 else old for part, old in zip(full, own, strict=True)]
        less = replace(settled, again=tuple(map(tuple, again)))
        return min(found, self._candidate(pipelines, less, size, gpus), key=order_of)

    def _candidate(
        self, pipelines: Sequence[Pipeline], settled: _Settled, micro_batch_size: int, gpus: Sequence[int]
    ) -> Candidate:
        self.trials += 1
        rank = {gpu: number for number, gpu in enumerate(gpus)}
        replicas = []
        for pipeline, layers, again, count in zip(
            pipelines, settled.layers, settled.again, settled.micro_batches, strict=True
        ):
            stages, first = [], 0
            for stage, number, mode in zip(pipeline, layers, again, strict=True):
                stages.append(Stage(self._domains(stage, rank), (first, first + number), mode))
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
        """A domain of one unit for each: it has all tokens and heads of its samples."""
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
    """The part of its memory that each stage's fullest GPU needs, by replica."""
    full, replicas = candidate.timing.stage_fullness, candidate.plan.replicas
    return [[full[r, s] for s in range(len(replica.stages))] for r, replica in enumerate(replicas)]


def _deal_layers(layers: int, weights: Sequence[float], caps: np.ndarray | None) -> tuple[int, ...]:
    """Layers in proportion to weights, one at least each, none beyond the caps if that can be."""
    dealt = list(deal_tokens(layers, np.array(weights), caps))
    while min(dealt) < 1:
        dealt[dealt.index(max(dealt))] -= 1
        dealt[dealt.index(min(dealt))] += 1
    return tuple(dealt)


def _deal_batch(micro_batches: int, seconds: Sequence[float]) -> tuple[int, ...]:
    """Micro-batches of each pipeline, one at least, by the seconds that it needs for one."""
    return deal_in_turn(micro_batches, [partial(operator.mul, each) for each in seconds], least=1)


def spell_stages(plan: Plan, cluster: Cluster) -> str:
    """``40 x (8 H100, TP 4: 27 layers / 24 A100, TP 8: 37 layers)``: micro-batches and stages by replica.

    Args:
        plan: any.
        cluster: that it is for.
    """
    gpus = rank_gpus(plan, len(cluster.ranks))
    replicas = []
    for replica in plan.replicas:
        stages = []
        for stage in replica.stages:
            found: dict[str, int] = {}
            for member in stage.members:
                for rank in member.ranks:
                    kind = cluster.ranks[gpus[rank]].device.name.partition("-")[0]
                    found[kind] = found.get(kind, 0) + 1
            who = " + ".join(f"{count} {kind}" for kind, count in found.items())
            layers = "" if stage.layers is None else f": {stage.layers[1] - stage.layers[0]} layers"
            stages.append(f"{who}, TP {len(stage.members[0].ranks)}{layers}")
        replicas.append(f"{replica.micro_batches} x ({' / '.join(stages)})")
    return "; ".join(dict.fromkeys(replicas))
