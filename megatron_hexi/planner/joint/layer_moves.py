"""Moves layers between neighbouring stages of a plan with layers of several kinds, and times each plan.

Tables have the times of a mean layer. Where layers are of several kinds, a stage may get heavier or lighter
ones than the mean: too many for its memory, or for its time.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from megatron_hexi.cluster import Cluster
from megatron_hexi.cost import CostModel
from megatron_hexi.plan import Plan
from megatron_hexi.planner.layouts.trial import Candidate

#: Numbers of layers that move at once: more than one, to pass the few of another kind between equal ones.
_STEPS = (1, 2, 3)
#: The most plans that are timed.
_MOST_TRIALS = 200


def with_layers_moved(best: Candidate, cluster: Cluster) -> Candidate:
    """Return the candidate with layers moved, a boundary at a time, while that fits better or is faster.

    Args:
        best: a plan; one with a repeated stage has no layers to move, and is returned unchanged.
        cluster: the cluster that it runs on.
    """
    model, left = CostModel(best.job, cluster), _MOST_TRIALS
    while True:
        before = best
        for plan in _neighbours(before.plan):
            if not left:
                return best
            left -= 1
            other = Candidate(plan, best.job, model.timing(plan))
            best = min(best, other, key=lambda one: one.order)
        if best is before:
            return best


def _neighbours(plan: Plan) -> Iterator[Plan]:
    """Yield the plan with each boundary between two stages of a replica moved by a few layers either way."""
    for number, replica in enumerate(plan.replicas):
        bounds = [0, *(stage.layers[1] for stage in replica.stages if stage.layers)]
        for place in range(len(replica.stages) - 1):
            first, middle, last = bounds[place : place + 3]
            for moved in (middle + way * count for count in _STEPS for way in (-1, 1)):
                if not first < moved < last:
                    continue
                stages = list(replica.stages)
                stages[place] = replace(stages[place], layers=(first, moved))
                stages[place + 1] = replace(stages[place + 1], layers=(moved, last))
                replicas = list(plan.replicas)
                replicas[number] = replace(replica, stages=tuple(stages))
                yield replace(plan, replicas=tuple(replicas))
