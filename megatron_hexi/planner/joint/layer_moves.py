"""Moves layers between neighbouring stages of a plan with layers of several kinds, and times each plan.

Tables have the times of a mean layer. Where layers are of several kinds, a stage may get heavier or lighter
ones than the mean: too many for its memory, or for its time.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from typing import NamedTuple

import numpy as np

from megatron_hexi.cost import CostModel
from megatron_hexi.cost.once import iteration_phases
from megatron_hexi.cost.phases import Phases
from megatron_hexi.models.job import layers_again
from megatron_hexi.plan import Plan
from megatron_hexi.planner.layouts.trial import Candidate

#: Numbers of layers that move at once: more than one, to pass the few of another kind between equal ones.
_STEPS = (1, 2, 3)
#: The most plans that are tried.
_MOST_TRIALS = 200


class _Move(NamedTuple):
    """A boundary between two stages of a replica that is moved."""

    replica: int
    stage: int
    layers: tuple[int, int, int]


def with_layers_moved(best: Candidate, model: CostModel) -> Candidate:
    """Return the candidate with layers moved, a boundary at a time, while that fits better or is faster.

    Args:
        best: a plan; one with a repeated stage has no layers to move, and is returned unchanged.
    """
    left = _MOST_TRIALS
    while True:
        before, least = best, _LeastOrder(best)
        # The most promising first: once one has been timed, its time rules out most of the others.
        for bound, move in sorted((least.of(move), move) for move in _moves(before.plan)):
            if bound >= best.order:
                break
            if not left:
                return best
            left -= 1
            plan = _moved(before.plan, move)
            other = Candidate(plan, best.job, model.timing(plan))
            best = min(best, other, key=lambda one: one.order)
        if best is before:
            return best


class _LeastOrder:
    """Lower bounds of a plan's sort key (`Candidate.order`) after a move of layers, without timing the plan.

    The two stages' passes are known from one layer of each kind. All other stages of a replica stay as they
    are, unless other replicas share their weights: then sums of gradients, optimizer's step and memory of all
    stages may change, and count nothing.
    """

    def __init__(self, base: Candidate) -> None:
        timing = self._timing = base.timing
        self._job, self._stages = base.job, [replica.stages for replica in base.plan.replicas]
        self._full, self._seconds = timing.stage_fullness, cache(self._stage_phases)
        #: Section and domain of each stage, by replica and stage.
        self._place = {
            (replica, section.number): (number, domain)
            for number, section in enumerate(timing.sections)
            for domain, replica in enumerate(section.replicas.tolist())
        }
        #: Ministages, and domains that take samples, are not bounded.
        self._is_known = all(pipeline.is_1f1b for pipeline in timing.pipelines) and all(
            len(stage.domains) == 1 for stages in self._stages for stage in stages
        )

    def of(self, move: _Move) -> tuple[float, float]:
        """Return a lower bound of `Candidate.order` of the plan with a boundary moved."""
        if not self._is_known:
            return 0.0, 0.0
        number, timing = move.replica, self._timing
        pipeline = timing.pipelines[number]
        first, middle, last = move.layers
        changed = {(number, move.stage): (first, middle), (number, move.stage + 1): (middle, last)}
        stages = list(pipeline.stage_phases)
        for (_, stage), layers in changed.items():
            stages[stage] = self._seconds(number, stage, layers)
        kept = [] if len(self._stages) > 1 else [stage for stage in self._place if stage not in changed]
        replicas = list(timing.replicas)
        replicas[number] = pipeline.with_stage_phases(stages).phases
        phases = iteration_phases(replicas, {stage: timing.once[stage] for stage in kept}, timing.spread)
        fullness = max((self._full[stage] for stage in kept), default=0.0)
        return max(0.0, fullness - 1), phases.total

    def _stage_phases(self, replica: int, stage: int, layers: tuple[int, int]) -> Phases:
        """Return the seconds of a micro-batch in a stage with other layers."""
        number, domain = self._place[replica, stage]
        section, recompute = self._timing.sections[number], self._stages[replica][stage].recompute
        count = layers[1] - layers[0]
        again = layers_again(count, self._job.recompute if recompute is None else recompute)
        here = np.arange(len(section.replicas)) == domain
        parts = replace(
            section.parts,
            layers=np.where(here, count, section.parts.layers),
            again=np.where(here, again, section.parts.again),
            ranges=np.where(here[:, None, None], [[layers]], np.asarray(section.parts.ranges)),
        )
        return self._timing.stages[number].of_parts(replace(section, parts=parts)).replicas[domain]


def _moves(plan: Plan) -> Iterator[_Move]:
    """Yield each boundary between two stages of a replica moved by a few layers either way."""
    for number, replica in enumerate(plan.replicas):
        bounds = [0, *(stage.layers[1] for stage in replica.stages if stage.layers)]
        for place in range(len(replica.stages) - 1):
            first, middle, last = bounds[place : place + 3]
            for moved in (middle + way * count for count in _STEPS for way in (-1, 1)):
                if first < moved < last:
                    yield _Move(number, place, (first, moved, last))


def _moved(plan: Plan, move: _Move) -> Plan:
    """Return the plan with a boundary moved."""
    replicas = list(plan.replicas)
    stages, (first, middle, last) = list(replicas[move.replica].stages), move.layers
    stages[move.stage] = replace(stages[move.stage], layers=(first, middle))
    stages[move.stage + 1] = replace(stages[move.stage + 1], layers=(middle, last))
    replicas[move.replica] = replace(replicas[move.replica], stages=tuple(stages))
    return replace(plan, replicas=tuple(replicas))
