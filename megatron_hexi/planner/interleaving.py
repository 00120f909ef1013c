"""Interleaves the ministages of plans that the search found, where the cost model says that this is faster.

The search knows only stages that run whole. Here the stages of its best plans are cut into ministages that
run in interleaved 1F1B: equally many in each stage, fewer where a stage has fewer layers. Stages then keep
more activations: stages that no longer fit recompute more of them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Final

from megatron_hexi.cluster import Cluster
from megatron_hexi.cost import CostModel
from megatron_hexi.models import RECOMPUTES, Job
from megatron_hexi.models.job import RecomputeMode
from megatron_hexi.plan import Plan, Replica
from megatron_hexi.planner.features import is_allowed
from megatron_hexi.planner.joint import Candidate
from megatron_hexi.planner.layouts.trial import order_of
from megatron_hexi.planner.request import Request
from megatron_hexi.planner.rivals import best_of_each_kind
from megatron_hexi.planner.savings import least_seconds

#: Numbers of ministages that are tried.
_COUNTS: Final = (2, 3, 4, 6, 8)

#: Recomputation of each stage, by replica and number of the stage.
type _Recomputes = dict[tuple[int, int], RecomputeMode]


class Interleaving:
    """Interleaves ministages of plans for one request on one cluster.

    Args:
        request: the job, with the terms that are fixed.
        cluster: the cluster, with the memory that plans may use.
        faster_than: seconds of an iteration of a plan that is known to fit.
    """

    def __init__(self, request: Request, cluster: Cluster, faster_than: float = math.inf) -> None:
        self._request, self._faster_than = request, faster_than
        self._model = cache(lambda job: CostModel(job, cluster))
        self._tried: set[tuple[Plan, Job]] = set()
        self.trials = 0

    def best(self, plan: Candidate, found: Sequence[Candidate], deep: Sequence[Candidate] = ()) -> Candidate:
        """Return the best of a plan, and of this and other plans with their ministages interleaved.

        Args:
            found: plans that fit.
            deep: plans that the search made to be interleaved.
        """
        best = plan
        if not self._request.may_interleave:
            return best
        fastest = min(found, key=order_of, default=plan)
        for start in dict.fromkeys((plan, fastest, *best_of_each_kind(found, fastest), *deep)):
            least_s = least_seconds(start)
            for count in _COUNTS:
                best_s = min(best.iteration_s, self._faster_than)
                if least_s < best_s:
                    best = self._interleaved(start, count, best_s) or best
        return best

    def _interleaved(self, start: Candidate, count: int, faster_than: float) -> Candidate | None:
        """Return a plan with `count` interleaved ministages a stage; ``None``: too slow, or does not fit."""
        recomputes: _Recomputes = {
            (r, s): "selective" if isinstance(stage.recompute, int) else stage.recompute or "none"
            for r, replica in enumerate(start.plan.replicas)
            for s, stage in enumerate(replica.stages)
        }
        while True:
            plan = _cut(start, count, recomputes)
            known = plan == start.plan or (plan, start.job) in self._tried
            if known or not is_allowed(plan, start.job, self._request):
                return None
            self._tried.add((plan, start.job))
            self.trials += 1
            changed = Candidate(plan, start.job, self._model(start.job).timing(plan))
            if changed.iteration_s >= faster_than:
                return None
            if changed.fits:
                return changed
            full = {place for place, part in changed.timing.stage_fullness.items() if part > 1}
            is_fixed = "recompute" in self._request.fixed
            if is_fixed or not full or any(recomputes[place] == RECOMPUTES[-1] for place in full):
                return None
            for place in full:
                recomputes[place] = RECOMPUTES[RECOMPUTES.index(recomputes[place]) + 1]


def _cut(start: Candidate, count: int, recomputes: _Recomputes) -> Plan:
    """Return a plan with stages cut into `count` interleaved ministages, or fewer where layers are few."""

    def cut(number: int, replica: Replica) -> Replica:
        alone = len(replica.stages) == 1 or replica.ministages is not None
        if alone or start.timing.micro_batches[number] == 1:
            return replica
        own = min(count, *(sum(stage.ministage_sizes) for stage in replica.stages))
        if own == 1:
            return replica
        stages = (
            replace(stage, ministages=own, recompute=recomputes[number, s])
            for s, stage in enumerate(replica.stages)
        )
        return replace(replica, stages=tuple(stages), order="interleaved")

    replicas = (cut(number, replica) for number, replica in enumerate(start.plan.replicas))
    return replace(start.plan, replicas=tuple(replicas))
