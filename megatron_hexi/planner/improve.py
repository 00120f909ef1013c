"""Improves the plans that the joint search found, and changes plans for more memory until they fit.

The starts of the climbs are the fastest plan and the best of other kinds; where memory is short, also plans
for GPUs with more of it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import cache, partial

from megatron_hexi.cluster import Cluster
from megatron_hexi.cost import CostModel
from megatron_hexi.models import Job
from megatron_hexi.plan import Plan
from megatron_hexi.plan.units import domain_rows, job_ranks
from megatron_hexi.planner.features import is_allowed
from megatron_hexi.planner.joint import Candidate, JointSearches
from megatron_hexi.planner.layouts.trial import order_of
from megatron_hexi.planner.moves import (
    Climb,
    ExpertMoves,
    MemoryMoves,
    Moves,
    layer_moves,
    least_seconds,
    recompute_moves,
    recomputes,
    sample_moves,
)
from megatron_hexi.planner.request import Request

#: Multiples of the GPUs' memory to plan for where nothing fits, or where memory is short.
_ROOMIER = (2.0, 4.0)
#: The most plans for GPUs with more memory that are changed: the fastest, and as many of other kinds.
_STARTS = 3
#: On up to this many GPUs, plans for GPUs with more memory are tried even if a plan fits.
_FEW_GPUS = 128
#: Saving memory has made plans faster by up to 10 %: a search whose plan is slower than this factor of a
#: known one is not run again for GPUs with more memory.
_OUT_OF_REACH = 1.1
#: Where saving memory takes less than this factor of a plan's time, any number of replicas may be as fast.
_SAVED = 0.9
#: The most layouts that are kept besides the chosen one.
_MOST_RIVALS = 6

#: Properties that layouts of one kind share: replicas, pipeline depths, tensor-parallel sizes, GPUs in use.
type _Kind = tuple[int, tuple[int, ...], tuple[int, ...], int]


class Improvement:
    """Improves plans of one job on one cluster, each once for all placements of experts.

    Args:
        request: the job, with the terms that are fixed.
        memory: the part of each GPU's usable memory that plans may use, from 0 to 1.
        searches: the joint searches, which find the plans.
    """

    def __init__(self, request: Request, cluster: Cluster, memory: float, searches: JointSearches) -> None:
        self._cluster, self._memory, self._searches = cluster, memory, searches
        self._timings = request.most_timings
        roomy = cluster.with_memory_margin(1 - memory)
        kinds: list[Moves] = [ExpertMoves(roomy), MemoryMoves(request, roomy)]
        if request.rules.allow("unequal_stages"):
            kinds.append(layer_moves)
            if request.context_parallel is None and "micro_batch_size" not in request.fixed:
                kinds.append(sample_moves)
            if "recompute" not in request.fixed:
                kinds.append(recompute_moves)
        model = cache(partial(CostModel, cluster=roomy))
        self._climb = Climb(kinds, model, partial(is_allowed, request=request))
        self._known: set[tuple[Plan, Job]] = set()

    @property
    def trials(self) -> int:
        """Number of layouts that were timed, besides those of the searches."""
        return self._climb.trials

    def best(
        self,
        request: Request,
        plan: Candidate,
        found: list[Candidate],
        faster_than: float = math.inf,
    ) -> Candidate:
        """Return the fastest plan that moves lead to from a plan and from the best others.

        Args:
            request: the job, with its placement of experts.
            found: plans that fit.
            faster_than: seconds of an iteration of a plan that is known to fit.
        """
        starts = [plan, *best_of_each_kind(found, plan)]
        # Samples in place of tokens are worth most where all layers are on all GPUs.
        shallow = min(filter(_is_shallow, found), key=order_of, default=plan)
        starts += [shallow] if shallow not in starts else []
        best = self.climbed(starts, min(faster_than, plan.iteration_s)) or plan
        is_short_of_memory = plan.job.recompute != "none" or recomputes(plan.plan)
        is_near = plan.iteration_s < _OUT_OF_REACH * faster_than
        is_quick = request.effort == "low" or len(self._cluster.ranks) > _FEW_GPUS
        if is_short_of_memory and is_near and not is_quick:
            # As many replicas: where memory is short, more only hold more weights.
            job = replace(request.job, data_parallel=len(plan.plan.replicas))
            alike = replace(request, job=job, fixed=request.fixed | {"data_parallel"})
            for times in _ROOMIER:
                limit = min(faster_than, best.iteration_s)
                faster = self.climbed(self._roomier(times, alike, limit), limit)
                if faster is None and request.effort == "normal":
                    break
                best = faster or best
            if best.iteration_s < _SAVED * plan.iteration_s and "data_parallel" not in request.fixed:
                limit = min(faster_than, best.iteration_s)
                best = self.climbed(self._roomier(max(_ROOMIER), request, limit), limit) or best
        return best

    def made_to_fit(self, request: Request, faster_than: float = math.inf) -> Candidate | None:
        """Change plans for GPUs with more memory until they fit, and return the best; ``None``: none fits.

        Saving memory changes which plan is fastest: with rows on the host, narrow tensor-parallel units
        may beat the wide ones that come closest to fitting without. So each size is searched by itself too.
        """
        best: Candidate | None = None
        searches = [
            *((times, request) for times in _ROOMIER),
            *((max(_ROOMIER), one) for one in _of_one_width(request, self._cluster)),
        ]
        for times, one in searches:
            limit = faster_than if best is None else best.iteration_s
            best = self.climbed(self._roomier(times, one, limit), limit) or best
        if best is None:  # the planner of `advice`
            best = first_plan(self._searches, request, self._cluster)
        return best

    def climbed(self, starts: Iterable[Candidate], faster_than: float) -> Candidate | None:
        """Return the fastest plan that fits to which moves lead from the starts.

        ``None``: none takes less than `faster_than` seconds.
        """
        best, end = None, self._climb.trials + self._timings
        for start in starts:
            # Samples in place of tokens may win more than what the bound counts.
            is_slow = not _is_shallow(start) and least_seconds(start.timing, math.inf) >= faster_than
            if (start.plan, start.job) in self._known or is_slow:
                continue
            self._known.add((start.plan, start.job))
            changed = self._climb.best(start, end - self._climb.trials, faster_than)
            if changed.fits and changed.iteration_s < faster_than:
                best, faster_than = changed, changed.iteration_s
        return best

    def _roomier(self, times: float, request: Request, faster_than: float) -> list[Candidate]:
        """Return the best plans for GPUs with `times` the memory that may beat `faster_than` seconds."""
        plans = self._searches.plans(request, self._cluster, times * self._memory, faster_than)
        fastest = sorted(plans, key=order_of)[:_STARTS]
        others = best_of_each_kind(plans, fastest[0]) if fastest else ()
        few = [*fastest, *(plan for plan in others[:_STARTS] if plan not in fastest)]
        return self.timed_here(few)

    def timed_here(self, plans: Iterable[Candidate]) -> list[Candidate]:
        """Return plans for GPUs with more memory as they are on these GPUs, most of which do not fit."""
        return [self._climb.timed(plan.plan, plan.job) for plan in plans]


def _is_shallow(candidate: Candidate) -> bool:
    """Whether every replica of a plan is a single stage."""
    return all(len(replica.stages) == 1 for replica in candidate.plan.replicas)


def _of_one_width(request: Request, cluster: Cluster) -> Iterator[Request]:
    """Yield a request for each tensor-parallel size, with that size fixed; nothing if only one exists."""
    widths = request.widths(max(len(node.ranks) for node in cluster.nodes))
    if len(widths) > 1:
        fixed = request.fixed | {"tensor_parallel"}
        yield from (replace(request, job=request.with_width(width), fixed=fixed) for width in widths)


def first_plan(searches: JointSearches, request: Request, cluster: Cluster) -> Candidate | None:
    """Return the first plan that fits, with as few replicas as possible; ``None`` if no plan does.

    If none fits, a plan for GPUs with more memory is changed to save memory.
    """
    plan = searches.with_few_replicas(request, cluster, 1.0)
    if plan is None:
        roomier = searches.with_few_replicas(request, cluster, max(_ROOMIER))
        if roomier is not None:
            improvement = Improvement(request, cluster, 1.0, searches)
            plan = improvement.climbed(improvement.timed_here([roomier]), math.inf)
    return plan


def best_of_each_kind(found: Iterable[Candidate], best: Candidate) -> tuple[Candidate, ...]:
    """Return the fastest plan of each kind except that of the chosen plan, fastest first."""
    seen = {_kind(best)}
    rivals: list[Candidate] = []
    for candidate in sorted(found, key=lambda candidate_plan: candidate_plan.iteration_s):
        if _kind(candidate) not in seen:
            seen.add(_kind(candidate))
            rivals.append(candidate)
    return tuple(rivals[:_MOST_RIVALS])


def _kind(candidate: Candidate) -> _Kind:
    plan, stages = candidate.plan, candidate.job.pipeline_parallel
    rows = domain_rows(plan, stages=stages)
    depths = tuple(sorted({row.replica: row.depth for row in rows}.values()))
    widths = tuple(sorted({row.width for row in rows}))
    return len(plan.replicas), depths, widths, job_ranks(plan, stages)
