"""Moves of layers between neighbouring stages, and of what stages compute again.

Tables have the times of a mean layer. Where layers are of several kinds, a stage may get heavier or lighter
ones than the mean: too many for its memory, or for its time.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache

import numpy as np

from megatron_hexi.cost import Timing
from megatron_hexi.cost.once import iteration_phases
from megatron_hexi.cost.phases import Phases
from megatron_hexi.models import Job
from megatron_hexi.plan import Plan, Stage
from megatron_hexi.plan.recompute import Again, Recompute
from megatron_hexi.planner.layouts.trial import Candidate
from megatron_hexi.planner.moves.climb import Move
from megatron_hexi.planner.moves.edit import Place, stages_of, with_stages, written_out

#: Numbers of layers that move at once. With layers of several kinds more than one, to pass the few of another
#: kind between equal ones.
_STEPS = (1, 2, 3)
#: Numbers of layers by which fewer are computed again.
_FEWER = (1, 2, 4)


def layer_moves(base: Candidate) -> Iterator[Move]:
    """Yield each boundary between two stages of a replica moved by a few layers either way.

    A plan with a repeated stage has none.
    """
    least = _LeastOrder(base.plan, base.job, base.timing)
    steps = _STEPS[:1] if base.job.model.is_uniform else _STEPS
    for number, replica in enumerate(base.plan.replicas):
        bounds = [0, *(stage.layers[1] for stage in replica.stages if stage.layers)]
        for place in range(len(bounds) - 2):
            first, middle, last = bounds[place : place + 3]
            one, other = replica.stages[place : place + 2]
            cuts, other_cuts = one.ministage_count, other.ministage_count
            least_layers = base.job.first_layers if place == 0 else 1
            for moved in (middle + way * count for count in steps for way in (-1, 1)):
                if moved - first < (cuts or 0) or last - moved < (other_cuts or 1):
                    continue
                ahead = replace(one, layers=(first, moved), ministages=cuts)
                if ahead.ministage_sizes[0] >= least_layers:
                    behind = replace(other, layers=(moved, last), ministages=other_cuts)
                    yield least.move({(number, place): ahead, (number, place + 1): behind})


def recompute_moves(base: Candidate) -> Iterator[Move]:
    """Yield the plan with fewer layers computed again in a stage, and with one fewer in all stages.

    Tables estimate the memory of stages of several kinds of GPU, and do not know how tokens are dealt.
    """
    if base.job.pipeline_parallel > 1 or base.plan.has_ministages:
        return
    plan, job = written_out(base.plan, base.job, base.timing.micro_batches.tolist())
    least = _LeastOrder(plan, job, base.timing)
    fewer: dict[int, dict[Place, Stage]] = {}
    for place, stage in stages_of(plan):
        own = Again.of(stage.recompute)
        again = own.layers(sum(stage.ministage_sizes))
        for step in _FEWER:
            if again >= step or own.modules:
                mode: Recompute = again - step if own.is_whole and again > step else "none"
                fewer.setdefault(step, {})[place] = replace(stage, recompute=mode)
    for stages in fewer.values():
        yield from (least.move({place: stage}) for place, stage in stages.items())
    if len(fewer.get(1, ())) > 1:
        yield least.move(fewer[1])


class _LeastOrder:
    """Lower bounds of a plan's sort key (`Candidate.order`) after a move of layers, without timing the plan.

    The two stages' passes are known from one layer of each kind. All other stages of a replica stay as they
    are, unless other replicas share their weights: then sums of gradients, optimizer's step and memory of all
    stages may change, and count nothing.
    """

    def __init__(self, plan: Plan, job: Job, timing: Timing) -> None:
        self._timing, self._plan, self._job = timing, plan, job
        self._full, self._seconds = timing.stage_fullness, cache(self._stage_phases)
        #: Section and domain of each stage, by replica and stage.
        self._place = {
            (replica, section.number): (number, domain)
            for number, section in enumerate(timing.sections)
            for domain, replica in enumerate(section.replicas.tolist())
        }
        #: Ministages, and domains that take samples, are not bounded.
        self._is_known = all(pipeline.is_1f1b for pipeline in timing.pipelines) and all(
            len(stage.domains) == 1 for _, stage in stages_of(plan)
        )

    def move(self, changed: dict[Place, Stage]) -> Move:
        """Return the move to the plan with some stages changed in layers or recomputation."""
        plan = with_stages(self._plan, lambda place, stage: changed.get(place, stage))
        return Move(self._of(changed), plan, self._job)

    def _of(self, changed: dict[Place, Stage]) -> tuple[float, float]:
        """Return a lower bound of `Candidate.order` of the plan with some stages changed."""
        if not self._is_known:
            return 0.0, 0.0
        timing, replicas = self._timing, list(self._timing.replicas)
        for number in dict.fromkeys(replica for replica, _ in changed):
            pipeline = timing.pipelines[number]
            stages = [
                self._seconds(number, place, changed[number, place]) if (number, place) in changed else phases
                for place, phases in enumerate(pipeline.stage_phases)
            ]
            replicas[number] = pipeline.with_stage_phases(stages).phases
        kept = [] if len(replicas) > 1 else [stage for stage in self._place if stage not in changed]
        phases = iteration_phases(replicas, {stage: timing.once[stage] for stage in kept}, timing.spread)
        fullness = max((self._full[stage] for stage in kept), default=0.0)
        return max(0.0, fullness - 1), phases.total

    def _stage_phases(self, replica: int, place: int, stage: Stage) -> Phases:
        """Return the seconds of a micro-batch in a changed stage."""
        number, domain = self._place[replica, place]
        section, layers = self._timing.sections[number], stage.layers
        assert layers is not None, "only plans with layers in each stage have moves of them"
        count = layers[1] - layers[0]
        again = Again.of(stage.recompute or self._job.recompute).layers(count)
        here = np.arange(len(section.replicas)) == domain
        parts = replace(
            section.parts,
            layers=np.where(here, count, section.parts.layers),
            again=np.where(here, again, section.parts.again),
            ranges=np.where(here[:, None, None], [[layers]], np.asarray(section.parts.ranges)),
        )
        return self._timing.stages[number].of_parts(replace(section, parts=parts)).replicas[domain]
