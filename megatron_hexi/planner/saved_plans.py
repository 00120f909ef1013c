"""Variants of plans that save memory: of plans for these GPUs, and of plans for GPUs with more memory."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from megatron_hexi.cluster import Cluster
from megatron_hexi.models import Job
from megatron_hexi.plan import Plan
from megatron_hexi.planner.joint import Candidate, JointSearches
from megatron_hexi.planner.layouts.trial import order_of
from megatron_hexi.planner.request import Request
from megatron_hexi.planner.rivals import best_of_each_kind
from megatron_hexi.planner.savings import Savings, recomputes

#: Multiples of the GPUs' memory to plan for, and the most layouts of a search that are changed: the fastest,
#: and as many of other kinds.
_ROOMIER, _STARTS = (2.0, 4.0), 3
#: On up to this many GPUs, plans for GPUs with more memory and of one stage are tried even if a plan fits.
_FEW_GPUS = 128


#: Plans whose variants were compared with the best: plan, job, and the part of the GPUs' memory it may use.
type Known = set[tuple[Plan, Job, float]]


class SavedPlans:
    """Searches for variants of plans that need less memory, for one request on one cluster.

    Args:
        request: the job, with the terms that are fixed.
        memory: the part of each GPU's usable memory that plans may use, from 0 to 1.
        searches: the joint searches, which find plans without savings.
        faster_than: seconds of an iteration that a variant must beat.
        known: plans whose variants were compared with the best before, of the same job and cluster, each with
            the memory that it may use; plans that are changed here are added.
    """

    def __init__(
        self,
        request: Request,
        cluster: Cluster,
        memory: float,
        searches: JointSearches,
        faster_than: float = math.inf,
        known: Known | None = None,
    ) -> None:
        self._known: Known = set() if known is None else known
        self._request, self._cluster = request, cluster
        self._memory, self._searches = memory, searches
        self._faster_than = faster_than
        self._savings = Savings(request, cluster.with_memory_margin(1 - memory), faster_than)

    @property
    def trials(self) -> int:
        """Number of layouts that were timed, besides those of the searches."""
        return self._savings.trials

    def best(self, plan: Candidate, found: list[Candidate]) -> Candidate:
        """Return the fastest of a plan, its memory-saving variants, and those of the best other plans."""
        starts = [plan, *best_of_each_kind(found, plan)[: _STARTS - 1]]
        # Samples in place of tokens are worth most where all layers are on all GPUs.
        whole = (one for one in found if all(len(replica.stages) == 1 for replica in one.plan.replicas))
        shallow = min(whole, key=order_of, default=plan)
        if shallow not in starts and shallow.job.pipeline_parallel == 1:
            starts.append(shallow)
        changed = [plan, *map(self._savings.best, filter(self._is_new, starts))]
        is_short_of_memory = plan.job.recompute != "none" or recomputes(plan.plan)
        if is_short_of_memory and len(self._cluster.ranks) <= _FEW_GPUS:
            faster_than = min(self._faster_than, min(changed, key=order_of).iteration_s)
            changed += self._fitting(self._roomier(_ROOMIER[0], self._request, faster_than))
            changed += self._fitting(self._one_stage(self._request, faster_than))
        best = min(changed, key=order_of)
        return plan if best.iteration_s >= plan.iteration_s else best

    def made_to_fit(self) -> Candidate | None:
        """Change plans for GPUs with more memory until they fit, and return the best; ``None``: none fits.

        Savings change which plan is fastest: with rows on the host, narrow tensor-parallel units
        may beat the wide ones that come closest to fitting without. So each size is searched by itself too.
        """
        best: Candidate | None = None
        searches: list[Callable[[float], list[Candidate]]] = [
            *(partial(self._roomier, times, self._request) for times in _ROOMIER),
            *(partial(self._roomier, max(_ROOMIER), request) for request in self._of_one_width()),
            *(partial(self._one_stage, request) for request in (self._request, *self._of_one_width())),
        ]
        for search in searches:
            fitting = self._fitting(search(self._faster_than if best is None else best.iteration_s))
            best = min([*fitting, *([best] if best else [])], key=order_of, default=None)
        if best is not None:
            return best
        return first_plan(self._searches, self._request, self._cluster)  # the planner of `advice`

    def _fitting(self, overdrawn: list[Candidate]) -> list[Candidate]:
        """Return, for plans that overdraw memory, variants that fit and are faster than the best so far."""
        tried = map(self._savings.made_to_fit, filter(self._is_new, overdrawn))
        return [changed for changed in tried if changed is not None]

    def _is_new(self, plan: Candidate) -> bool:
        """Whether no search, for any placement of experts, compared a plan's variants yet; note the plan."""
        name = plan.plan, plan.job, self._memory
        if name in self._known:
            return False
        self._known.add(name)
        return True

    def _roomier(self, times: float, request: Request, faster_than: float) -> list[Candidate]:
        """Return the best plans for GPUs with `times` the memory that may beat `faster_than` seconds."""
        plans = self._searches.plans(request, self._cluster, times * self._memory, faster_than)
        fastest = sorted(plans, key=order_of)[:_STARTS]
        others = best_of_each_kind(plans, fastest[0]) if fastest else ()
        return [*fastest, *(plan for plan in others[:_STARTS] if plan not in fastest)]

    def _of_one_width(self) -> list[Request]:
        """Return a request for each tensor-parallel size, with that size fixed; empty if only one exists."""
        request = self._request
        widths = request.widths(max(len(node.ranks) for node in self._cluster.nodes))
        fixed = request.fixed | {"tensor_parallel"}
        requests = [replace(request, job=request.with_width(width), fixed=fixed) for width in widths]
        return requests if len(widths) > 1 else []

    def _one_stage(self, request: Request, faster_than: float) -> list[Candidate]:
        """Return the best plan of a single stage as if GPUs had more memory; an empty list if there is none.

        In a single stage the last ministage is not recomputed: its forward pass runs only once.
        """
        job, alone = request.job, frozenset({"pipeline_parallel", "data_parallel"})
        is_ruled_out = any(getattr(job, name) != 1 for name in alone & request.fixed)
        if is_ruled_out or len(self._cluster.ranks) > _FEW_GPUS:
            return []
        job = replace(job, pipeline_parallel=1, data_parallel=1)
        single_stage = replace(request, job=job, fixed=request.fixed | alone)
        plans = self._searches.plans(single_stage, self._cluster, max(_ROOMIER) * self._memory, faster_than)
        return sorted(plans, key=order_of)[:1]


def first_plan(searches: JointSearches, request: Request, cluster: Cluster) -> Candidate | None:
    """Return the first plan that fits, with as few replicas as possible; ``None`` if no plan does.

    If none fits, a plan for GPUs with more memory is changed to save memory.
    """
    plan = searches.with_few_replicas(request, cluster, 1.0)
    if plan is None:
        roomier = searches.with_few_replicas(request, cluster, max(_ROOMIER))
        plan = roomier and Savings(request, cluster).made_to_fit(roomier)
    return plan
