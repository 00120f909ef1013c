"""Megatron's uneven pipelines: stages of equal flags and GPU counts, with different numbers of layers.

--pipeline-model-parallel-layout, or --decoder-first-pipeline-num-layers and
--decoder-last-pipeline-num-layers, say how many layers each stage has; tensor-, context- and data-parallel
size and recomputation are those of the job. Ranks follow each other stage by stage, so that the nodes' order
decides which GPUs a stage has: fast nodes first, slow nodes first, or the nodes of one model of GPU alone.
Layers are assigned by the seconds of a layer on each stage, as far as memory holds them.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import inf

import numpy as np

from megatron_hexi.cluster import Cluster
from megatron_hexi.cost import CostModel, ceiling_tokens_per_s
from megatron_hexi.errors import HexiError
from megatron_hexi.models import RECOMPUTES, Job
from megatron_hexi.plan import Plan, Replica, Stage
from megatron_hexi.plan.layout import apportion
from megatron_hexi.planner.baselines.arrange import divisors, groups
from megatron_hexi.planner.fleet.units import Fleet, find_units
from megatron_hexi.planner.joint import DEEPEST, Candidate
from megatron_hexi.planner.joint.pipes import least_longest, moved_layers
from megatron_hexi.planner.layouts.layout import A2AGroup, Layout, build_domain
from megatron_hexi.planner.layouts.trial import order_of
from megatron_hexi.planner.request import Request

#: The most pipelines that are timed, best first by their GPUs' best rates; the most GPUs of a small cluster,
#: and the most pipelines on a larger one.
_TIMED, _FEW_GPUS, _TIMED_OF_MANY = 8, 128, 2
#: The most times that layers are assigned by the seconds of a timed plan.
_ROUNDS = 2


@dataclass(frozen=True)
class _Choice:
    """Megatron's parallel sizes, and the GPUs that they are used on.

    Args:
        all_units: GPUs of each tensor-parallel unit, in the order of ranks; the first ones are used.
        each: number of units of a stage, in all replicas.
        depth: number of stages.
        width: number of GPUs of a unit.
        replicas: data-parallel size.
        least_s: lower bound of an iteration's seconds, at the GPUs' best rates.
    """

    all_units: Sequence[tuple[int, ...]]
    each: int
    depth: int
    width: int
    replicas: int
    least_s: float

    @property
    def units(self) -> list[Sequence[tuple[int, ...]]]:
        """Units of each stage."""
        return [self.all_units[stage * self.each : (stage + 1) * self.each] for stage in range(self.depth)]


class UnevenLayers:
    """Finds the best uneven pipeline for one request on one cluster.

    Args:
        request: the job, with the terms that are fixed.
        cluster: the cluster that the job runs on.
    """

    def __init__(self, request: Request, cluster: Cluster) -> None:
        job = request.job
        self._request, self._cluster = request, cluster
        self._size = request.micro_batch_sizes()[0]
        self._micro_batches = job.global_batch_size // self._size
        self._modes = [job.recompute] if "recompute" in request.fixed else list(RECOMPUTES)
        devices = {id(rank.device): rank.device for rank in cluster.ranks}
        alone = replace(job, recompute="none", pipeline_parallel=1)
        self._rates = {key: ceiling_tokens_per_s(alone, [device]) for key, device in devices.items()}
        self._fleets: dict[tuple[int, tuple[int, ...]], Fleet] = {}
        self.trials = 0

    def best(self, faster_than: float = inf) -> Candidate | None:
        """Return the fastest pipeline that fits and beats `faster_than` seconds; ``None`` if none does."""
        choices = sorted(self._choices(), key=lambda choice: choice.least_s)
        best: Candidate | None = None
        few = len(self._cluster.ranks) <= _FEW_GPUS
        for choice in choices[: _TIMED if few else _TIMED_OF_MANY]:
            if choice.least_s >= faster_than:
                break
            candidate = self._settled(choice)
            if candidate is not None and candidate.iteration_s < faster_than:
                best, faster_than = candidate, candidate.iteration_s
        return best

    def _choices(self) -> Iterator[_Choice]:
        request, job = self._request, self._request.job
        depths = list(range(2, min(DEEPEST, job.model.layers) + 1))
        if "pipeline_parallel" in request.fixed:
            depths = [job.pipeline_parallel]
        counts = [job.data_parallel] if "data_parallel" in request.fixed else divisors(self._micro_batches)
        widest = max(len(node.ranks) for node in self._cluster.nodes)
        for width, nodes in itertools.product(request.widths(widest), self._orders()):
            units = [
                tuple(ranks[first : first + width])
                for ranks in (self._cluster.nodes[node].ranks for node in nodes)
                for first in range(0, len(ranks) - width + 1, width)
            ]
            rates = [sum(self._rates[id(self._cluster.ranks[gpu].device)] for gpu in unit) for unit in units]
            together = np.cumsum([0.0, *rates])
            for depth, replicas in itertools.product(depths, counts):
                each = len(units) // (depth * replicas) * replicas
                if request.context_parallel is not None:
                    each = min(each, request.context_parallel * replicas)
                    if each < request.context_parallel * replicas:
                        continue
                if depth == 1 or not each or self._micro_batches % replicas:
                    continue
                # All work at the best rates, while pipelines fill and drain.
                fill = 1 + (depth - 1) * replicas / self._micro_batches
                least_s = job.global_batch_size * job.seq_length / float(together[depth * each]) * fill
                yield _Choice(units, each, depth, width, replicas, least_s)

    def _orders(self) -> list[list[int]]:
        """Return orders of the nodes: fast nodes first, slow nodes first, nodes of each GPU model alone."""
        nodes = self._cluster.nodes
        speed = {number: self._rates[id(node.device)] for number, node in enumerate(nodes)}
        fast = sorted(speed, key=lambda number: (-speed[number], number))
        alike = all(node.device is nodes[0].device for node in nodes)
        orders = [fast] if alike else [fast, fast[::-1]]
        orders += ([n for n in fast if nodes[n].device is nodes[first].device] for first in fast)
        return [list(order) for order in dict.fromkeys(map(tuple, orders))]

    def _settled(self, choice: _Choice) -> Candidate | None:
        """Return a choice's fastest layout with the least recomputation that fits; ``None``: none fits."""
        layouts = self._layouts(choice)
        for mode in self._modes:
            tried = [
                self._dealt(choice, layout, replace(self._job(choice), recompute=mode)) for layout in layouts
            ]
            fitting = [candidate for candidate in tried if candidate is not None and candidate.fits]
            if fitting:
                return min(fitting, key=order_of)
        return None

    def _job(self, choice: _Choice) -> Job:
        return replace(
            self._request.job,
            tensor_parallel=choice.width,
            pipeline_parallel=1,
            data_parallel=choice.replicas,
            micro_batch_size=self._size,
        )

    def _layouts(self, choice: _Choice) -> list[list[tuple[int, ...]]]:
        """Return groupings of a stage's units in a replica: the largest groups, and groups inside a node."""
        size = len(choice.units[0]) // choice.replicas
        heads = self._job(choice).workload().local_heads
        node = max(1, min(len(node.ranks) for node in self._cluster.nodes) // choice.width)
        degrees = [degree for degree in divisors(size) if heads % degree == 0]
        inside = max((degree for degree in degrees if degree <= node), default=1)  # 1: none fits in a node
        return [groups(tuple(range(size)), degree, False) for degree in sorted({inside, degrees[-1]})]

    def _dealt(self, choice: _Choice, cut: list[tuple[int, ...]], job: Job) -> Candidate | None:
        """Return the best of a few layouts, as layers move to faster stages; ``None``: too few layers."""
        layers, depth = job.model.layers, len(choice.units)
        if depth > layers:
            return None
        model = CostModel(replace(job, recompute="none"), self._cluster)
        dealt, best = apportion(layers, [1.0] * depth), None
        for _ in range(_ROUNDS):
            plan = self._plan(choice, cut, job, dealt)
            candidate = Candidate(plan, model.job, model.timing(plan))
            self.trials += 1
            best = candidate if best is None else min(best, candidate, key=order_of)
            following = _deal_again(candidate, dealt, layers)
            if following is None or following == dealt:
                break
            dealt = following
        return best

    def _plan(self, choice: _Choice, cut: list[tuple[int, ...]], job: Job, dealt: Sequence[int]) -> Plan:
        gpus = [gpu for stage in choice.units for unit in stage for gpu in unit]
        rank = {gpu: number for number, gpu in enumerate(gpus)}
        size = len(choice.units[0]) // choice.replicas
        tokens = apportion(job.seq_length, [1.0] * size)
        replicas = []
        for replica in range(choice.replicas):
            stages, first = [], 0
            for units, layers in zip(choice.units, dealt, strict=True):
                replica_units = units[replica * size : (replica + 1) * size]
                fleet = self._fleet(job, replica_units)
                number = {unit.gpus[0]: place for place, unit in enumerate(fleet.units)}
                parts = []
                for places in cut:
                    members = tuple(number[replica_units[place]] for place in places)
                    heads = (job.workload().local_heads // len(places),) * len(places)
                    parts.append(A2AGroup(members, tuple(tokens[place] for place in places), heads))
                ranks = {number[unit]: tuple(rank[gpu] for gpu in unit) for unit in replica_units}
                domain = build_domain(fleet, Layout(tuple(parts), 1), ranks, gpus)
                stages.append(Stage((domain,), layers=(first, first + layers), recompute=job.recompute))
                first += layers
            replicas.append(Replica(tuple(stages), self._micro_batches // choice.replicas))
        everything = gpus == list(range(len(self._cluster.ranks)))
        return Plan(job.workload(), tuple(replicas), gpus=None if everything else tuple(gpus))

    def _fleet(self, job: Job, units: Sequence[tuple[int, ...]]) -> Fleet:
        gpus = tuple(gpu for unit in units for gpu in unit)
        key = job.tensor_parallel, gpus
        if key not in self._fleets:
            self._fleets[key] = find_units(job, self._cluster, gpus)
        return self._fleets[key]


def _deal_again(candidate: Candidate, dealt: Sequence[int], layers: int) -> list[int] | None:
    """Return each stage's new number of layers, by its slowest replica's time; ``None``: memory is short."""
    counts, full = np.arange(1, layers + 1), candidate.timing.stage_fullness
    seconds = []
    for stage, assigned in enumerate(dealt):
        took = max(pipeline.stage_phases[stage].total for pipeline in candidate.timing.pipelines)
        fullest = max(full[replica, stage] for replica in range(len(candidate.plan.replicas)))
        most = assigned if fullest <= 1 and assigned == layers else max(1, int(assigned / fullest))
        seconds.append(np.where(counts <= most, counts * took / assigned, np.inf))
    following = least_longest(np.array(seconds), layers)
    if following is None:
        return None
    pipeline = max(candidate.timing.pipelines, key=lambda pipeline_timing: pipeline_timing.phases.total)
    ways = ((pipeline.there + pipeline.back)[:, 0] / 2).tolist()
    return moved_layers(np.array(seconds), following, ways, int(candidate.timing.micro_batches[0]))


def spell_uneven(candidate: Candidate) -> str:
    """Return a plan as text, such as ``TP 4, PP 3, 2 replicas: 26/27/27 layers``."""
    plan, job = candidate.plan, candidate.job
    stages = plan.replicas[0].stages
    counts = "/".join(str(stage.layers[1] - stage.layers[0]) for stage in stages if stage.layers is not None)
    replicas = f", {len(plan.replicas)} replicas" if len(plan.replicas) > 1 else ""
    return f"TP {job.tensor_parallel}, PP {len(stages)}{replicas}: {counts} layers"


def why_no_uneven(request: Request) -> str:
    """Return the reason why no uneven pipeline was found."""
    if (request.virtual_stages or 1) > 1:
        return "stages have equal chunks"
    if "pipeline_parallel" in request.fixed and request.job.pipeline_parallel == 1:
        return "it has one pipeline stage"
    return "no pipeline of equally many GPUs a stage was found that fits"


def best_uneven(request: Request, cluster: Cluster, faster_than: float = inf) -> tuple[Candidate | None, int]:
    """Return the best uneven pipeline that fits and is fast enough, and how many layouts were timed."""
    if (request.virtual_stages or 1) > 1:
        return None, 0
    try:
        search = UnevenLayers(request, cluster)
        return search.best(faster_than), search.trials
    except HexiError:  # a GPU that cannot do the job, or that makes no unit
        return None, 0
