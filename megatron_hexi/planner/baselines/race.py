"""Finds the fastest layouts of Megatron's flags: equal ones of each baseline, and uneven pipelines.

Of equal layouts only those are timed whose lower bound allows them to be the best.

Uneven pipelines have stages of equal flags and GPU counts, with different numbers of layers:
--pipeline-model-parallel-layout, or --decoder-first-pipeline-num-layers and
--decoder-last-pipeline-num-layers, say how many. Ranks follow each other stage by stage, so that the nodes'
order decides which GPUs a stage has: fast nodes first, slow nodes first, or the nodes of one model of GPU
alone. Layers are assigned by the seconds of a layer on each stage, as far as memory holds them.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cache, partial
from math import inf
from typing import NamedTuple

import numpy as np

from megatron_hexi.cluster import Cluster
from megatron_hexi.cost import CostModel, ceiling_tokens_per_s
from megatron_hexi.errors import HexiError
from megatron_hexi.models import Job
from megatron_hexi.plan.layout import apportion
from megatron_hexi.plan.recompute import Recompute
from megatron_hexi.planner.baselines.flags import FlagLayout
from megatron_hexi.planner.baselines.rules import consecutive, divisors
from megatron_hexi.planner.fleet.units import stages_in_turn
from megatron_hexi.planner.joint import DEEPEST, Candidate
from megatron_hexi.planner.joint.pipes import least_longest, moved_layers
from megatron_hexi.planner.layouts.trial import Progress, order_of
from megatron_hexi.planner.recomputation import offered
from megatron_hexi.planner.request import Request

#: Prefetch depths of the exchange that are tried, in steps.
WINDOWS = (1, 2, 4)
#: Tolerance for rounding in a lower bound, as a part of it.
_ROUNDING = 1e-9
#: The most uneven pipelines that are timed, best first by their GPUs' best rates; the most GPUs of a small
#: cluster, and the most pipelines on a larger one.
_TIMED, _FEW_GPUS, _TIMED_OF_MANY = 8, 128, 2
#: The most times that layers are assigned by the seconds of a timed plan.
_ROUNDS = 2


class Entrant(NamedTuple):
    """A layout of Megatron's flags that may be timed.

    Args:
        least_s: lower bound of its seconds.
        fullness: lower bound of the part of its memory that the fullest GPU needs.
        job: the job of the layout's fleet with recomputation and chunks.
    """

    least_s: float
    fullness: float
    layout: FlagLayout
    job: Job


class Timed(NamedTuple):
    """An entrant's timed plan with its prefetch depth."""

    entrant: Entrant
    candidate: Candidate
    window: int


class Race:
    """Finds the best layout of each baseline by the cost model.

    A layout is timed only if its lower bound is below the best time of a baseline that may use the layout, or
    below `faster_than` while no layout of that baseline fits. The time of a layout with less recomputation is
    a lower bound of the same layout with more. A layout that fits in memory with less recomputation is not
    tried with more.

    Args:
        faster_than: seconds of an iteration that layouts must beat; infinite: no limit.
        progress: callback, receives (phase, done, total).
        most: the most layouts that are timed, those with the least bounds.
    """

    def __init__(
        self, cluster: Cluster, faster_than: float, progress: Progress | None, most: float = inf
    ) -> None:
        self._most = most
        self._model = cache(partial(CostModel, cluster=cluster))
        self._progress = progress or (lambda _what, _done, _of: None)
        #: Lower bounds of layouts' seconds with more recomputation than was timed, by number of chunks.
        self._least: dict[tuple[FlagLayout, int], float] = {}
        #: Lower bounds of layouts' seconds in any number of chunks, by recomputation.
        self._busiest: dict[tuple[FlagLayout, Recompute], float] = {}
        #: Seconds that layouts of each baseline must beat.
        self._limits: dict[str, float] = defaultdict(lambda: faster_than)
        #: The best layouts of each baseline, which fit if any do.
        self.best: dict[str, Timed] = {}
        self.trials = 0

    def run(self, entrants: Iterable[Entrant]) -> None:
        """Find the best layout of each baseline that may fit."""
        entrants = sorted((one for one in entrants if one.least_s < inf), key=lambda one: one.least_s)
        for done, entrant in enumerate(entrants):
            self._progress("layouts of Megatron's flags", done, len(entrants))
            if self.trials >= self._most:
                break
            if entrant.fullness > 1 or not self._may_win(entrant, entrant.least_s):
                continue
            key = entrant.layout, entrant.job.virtual_stages
            busiest_s = self._busiest.get((entrant.layout, entrant.job.recompute), 0.0)
            least_s = max(entrant.least_s, self._least.get(key, 0.0), busiest_s)
            if self._may_win(entrant, least_s):
                self._least[key] = self._time(entrant, least_s)

    def add_fullest(self, entrants: Iterable[Entrant]) -> None:
        """Time, for each baseline none of whose layouts may fit, the one that lacks least memory."""
        for entrant in sorted(entrants, key=lambda one: (one.fullness, one.least_s)):
            if entrant.least_s < inf and not all(name in self.best for name in entrant.layout.texts):
                self._enter(self._timed(entrant, 1))

    def _time(self, entrant: Entrant, least_s: float) -> float:
        """Time a layout with each promising prefetch window; return a lower bound with more recomputation."""
        windows = _windows(entrant.layout)
        for window in windows:
            if window > 1 and not self._may_win(entrant, least_s):
                return least_s
            timed = self._timed(entrant, window)
            # Where another window may hide the exposed exchange, it does not count.
            hidden = ("exchange",) if len(windows) > 1 else ()
            busiest_s = _of_busiest_stage(timed.candidate, hidden)
            if entrant.job.model.is_uniform:  # else each number of chunks gives a stage other layers
                among_chunks = _of_busiest_stage(timed.candidate, (*hidden, "pipeline"))
                self._busiest[entrant.layout, entrant.job.recompute] = among_chunks
            if not self._may_win(entrant, busiest_s):
                return max(least_s, busiest_s)  # before its passes are timed, which takes longest
            self._enter(timed)
            iteration_s = timed.candidate.iteration_s
            # Without exposed exchange, it bounds every window: a shorter pass hides less of the gradients'
            # messages, but runs at least as often as these are sent.
            hidden_s = max(
                pipeline.micro_batches * sum(phases.exchange for phases in pipeline.stage_phases)
                for pipeline in timed.candidate.timing.pipelines
            )
            least_s = max(least_s, (iteration_s - hidden_s) * (1 - _ROUNDING))
            if not timed.candidate.fits:
                return least_s  # a larger window takes more memory
            if least_s >= iteration_s * (1 - 2 * _ROUNDING):
                break  # nothing left that a window could hide
        return inf

    def _timed(self, entrant: Entrant, window: int) -> Timed:
        self.trials += 1
        plan, job = entrant.layout.plan(entrant.job, window)
        return Timed(entrant, Candidate(plan, job, self._model(job).timing(plan)), window)

    def _enter(self, timed: Timed) -> None:
        candidate = timed.candidate
        for name in timed.entrant.layout.texts:
            best = self.best.get(name)
            if best is None or candidate.order < best.candidate.order:
                self.best[name] = timed
                if candidate.fits:
                    self._limits[name] = candidate.iteration_s

    def _may_win(self, entrant: Entrant, least_s: float) -> bool:
        """Whether the layout may be the best of a baseline."""
        return any(least_s < self._limits[name] for name in entrant.layout.texts)


def _windows(layout: FlagLayout) -> Sequence[int]:
    """Return the prefetch windows to try: up to the first that covers all steps of the exchange."""
    steps = max(len(own.parts) for own in layout.layouts) - 1
    return WINDOWS[: 1 + sum(window < steps for window in WINDOWS[:-1])]


def _of_busiest_stage(candidate: Candidate, without: Sequence[str]) -> float:
    """Return the seconds that a replica's busiest stage works, without some phases: a lower bound."""
    return (1 - _ROUNDING) * max(
        pipeline.micro_batches
        * max(
            phases.total - sum(getattr(phases, name) for name in without) for phases in pipeline.stage_phases
        )
        for pipeline in candidate.timing.pipelines
    )


class _Choice(NamedTuple):
    """Megatron's parallel sizes, and the GPUs that they are used on.

    Args:
        least_s: lower bound of an iteration's seconds, at the GPUs' best rates.
        job: with tensor-parallel size.
        depth: number of stages.
        units: GPUs of each tensor-parallel unit, in the order of ranks.
        replicas: data-parallel size.
    """

    least_s: float
    job: Job
    depth: int
    units: Sequence[tuple[int, ...]]
    replicas: int


def best_uneven(request: Request, cluster: Cluster, faster_than: float = inf) -> tuple[Candidate | None, int]:
    """Return the fastest uneven pipeline that fits and is fast enough, and how many layouts were timed."""
    if (request.virtual_stages or 1) > 1:
        return None, 0
    modes = offered(request, request.job)
    model, best, trials = cache(partial(CostModel, cluster=cluster)), None, 0
    most = _TIMED if len(cluster.ranks) <= _FEW_GPUS else _TIMED_OF_MANY
    try:
        for choice in sorted(_choices(request, cluster), key=lambda choice: choice.least_s)[:most]:
            if choice.least_s >= faster_than:
                break
            flags = replace(choice.job, pipeline_parallel=choice.depth)
            layouts = _layouts(choice, flags, cluster)
            for mode in modes:  # the least recomputation that fits
                job = replace(flags, recompute=mode)
                tried = [candidate for layout in layouts for candidate in _dealt(layout, job, model)]
                trials += len(tried)
                candidate = min(tried, key=order_of, default=None)
                if candidate is not None and candidate.fits:
                    if candidate.iteration_s < faster_than:
                        best, faster_than = candidate, candidate.iteration_s
                    break
    except HexiError:  # a GPU that cannot do the job, or that makes no unit
        return None, trials
    return best, trials


def _choices(request: Request, cluster: Cluster) -> Iterator[_Choice]:
    job, nodes = request.job, cluster.nodes
    size = request.micro_batch_sizes()[0]
    micro_batches = job.global_batch_size // size
    alone = replace(job, recompute="none", pipeline_parallel=1)
    rate_of = {id(node.device): ceiling_tokens_per_s(alone, [node.device]) for node in nodes}
    depths = list(range(2, min(DEEPEST, job.model.layers) + 1))
    if "pipeline_parallel" in request.fixed:
        depths = [job.pipeline_parallel] if job.pipeline_parallel > 1 else []
    counts = [job.data_parallel] if "data_parallel" in request.fixed else divisors(micro_batches)
    widths = request.widths(max(len(node.ranks) for node in nodes))
    for width, order in itertools.product(widths, _orders(cluster, rate_of)):
        flags = replace(request.with_width(width), micro_batch_size=size, recompute="none")
        units = [
            tuple(ranks[first : first + width])
            for ranks in (nodes[node].ranks for node in order)
            for first in range(0, len(ranks) - width + 1, width)
        ]
        rates = [width * rate_of[id(cluster.ranks[unit[0]].device)] for unit in units]
        together = np.cumsum([0.0, *rates])
        for depth, replicas in itertools.product(depths, counts):
            each = len(units) // (depth * replicas) * replicas
            if request.context_parallel is not None:
                if each < request.context_parallel * replicas:
                    continue
                each = request.context_parallel * replicas
            if not each or micro_batches % replicas:
                continue
            # All work at the best rates, while pipelines fill and drain.
            fill = 1 + (depth - 1) * replicas / micro_batches
            least_s = job.global_batch_size * job.seq_length / float(together[depth * each]) * fill
            yield _Choice(least_s, flags, depth, units[: depth * each], replicas)


def _orders(cluster: Cluster, rate_of: dict[int, float]) -> list[tuple[int, ...]]:
    """Return orders of the nodes: fast nodes first, slow nodes first, nodes of each GPU model alone."""
    nodes = cluster.nodes
    fast = sorted(range(len(nodes)), key=lambda number: (-rate_of[id(nodes[number].device)], number))
    alike = all(node.device is nodes[0].device for node in nodes)
    orders = [fast] if alike else [fast, fast[::-1]]
    orders += ([n for n in fast if nodes[n].device is nodes[first].device] for first in fast)
    return list(dict.fromkeys(map(tuple, orders)))


def _layouts(choice: _Choice, job: Job, cluster: Cluster) -> list[FlagLayout]:
    """Return layouts with a stage's units in the largest groups, and in groups inside a node."""
    fleet = stages_in_turn(job, cluster, choice.units)
    node = max(1, min(len(node.ranks) for node in cluster.nodes) // job.tensor_parallel)
    heads = job.workload().local_heads
    degrees = [one for one in divisors(len(fleet.units) // choice.replicas) if heads % one == 0]
    inside = max((degree for degree in degrees if degree <= node), default=1)  # 1: none fits in a node
    return [
        FlagLayout(fleet, consecutive(fleet, choice.replicas, degree))
        for degree in sorted({inside, degrees[-1]})
    ]


def _dealt(layout: FlagLayout, job: Job, model: Callable[[Job], CostModel]) -> Iterator[Candidate]:
    """Yield a layout's timed plans, as layers move to faster stages."""
    layers = job.model.layers
    dealt = apportion(layers, [1.0] * job.pipeline_parallel)
    if dealt[0] < job.first_layers:
        return
    for _ in range(_ROUNDS):
        plan, own = replace(layout, layers=tuple(dealt)).plan(job, 1)
        candidate = Candidate(plan, own, model(own).timing(plan))
        yield candidate
        following = _deal_again(candidate, dealt, layers)
        if following is None or following == dealt or following[0] < job.first_layers:
            break
        dealt = following


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
