"""Climbs from a plan to better ones by moves, the most promising first, each plan timed once.

A move is a changed plan with a lower bound of what it can reach. Moves of all kinds are tried in the order of
their bounds, the cost model confirms what they promise, and the first bound that is no better than the best
plan ends a round. The work is limited by a number of timings, so the same input gives the same plan.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from typing import Final, NamedTuple

from megatron_hexi.cost import CostModel
from megatron_hexi.models import Job
from megatron_hexi.plan import Plan
from megatron_hexi.planner.layouts.trial import Candidate, order_of
from megatron_hexi.planner.moves.edit import MemoryOption, Place, with_options

#: Plans up to this factor slower than a known one are followed: another move may make up for it, as moved
#: layers do where stages run in ministages.
_FOLLOWED: Final = 1.06


class Family(NamedTuple):
    """Moves that differ by a count alone: where one of them leads too far, those after it are not tried.

    Args:
        far: factor of the best plan's seconds from which on a plan of the family rules out those after it.
        grows: whether later moves need more memory, and all are as fast with equal options. Then plans
            count with the options that make them fit, and one that never fits rules out those after it; else
            plans count with their first options.
    """

    name: str
    far: float
    grows: bool = False


class Move(NamedTuple):
    """A changed plan.

    Args:
        least: a lower bound of the plan's sort key (`Candidate.order`).
        ladders: memory options of stages, the cheapest first. A stage takes the first, and the next as long
            as it has no room; stages without options stay as they are. Each ladder is slower than the one
            before it, and is tried where that one does not fit without recomputation.
    """

    least: tuple[float, float]
    plan: Plan
    job: Job
    ladders: Sequence[Mapping[Place, Sequence[MemoryOption]]] = ({},)
    family: Family | None = None


#: Yields the moves of one kind from a plan.
type Moves = Callable[[Candidate], Iterable[Move]]


class Climb:
    """Climbs from plans of one job on one cluster; the climbs share the plans that were timed.

    Args:
        kinds: the moves of each kind.
        model: returns the cost model of a job.
        is_allowed: whether a plan may be chosen.
    """

    def __init__(
        self,
        kinds: Sequence[Moves],
        model: Callable[[Job], CostModel],
        is_allowed: Callable[[Plan, Job], bool] = lambda _plan, _job: True,
    ) -> None:
        self._kinds, self._is_allowed = kinds, is_allowed
        self._model = model
        #: Returns a plan with its timing; each is timed once.
        self.timed = cache(self._time)
        self.trials = 0

    def best(self, start: Candidate, most: int, faster_than: float = math.inf) -> Candidate:
        """Return the best plan that moves lead to, or the plan itself.

        Args:
            most: the most plans that are timed.
            faster_than: seconds of an iteration of a known plan that fits; much slower ones are not followed.
        """
        best, end = start, self.trials + most
        faster_than *= _FOLLOWED
        while True:
            before, ruled_out = best, set[Family | None]()
            for least, move in _in_order([move for kind in self._kinds for move in kind(before)]):
                if least >= best.order or self.trials >= end:
                    break
                limit = min(faster_than, best.iteration_s) if best.fits else faster_than
                if move.least >= best.order or move.least[1] >= limit or move.family in ruled_out:
                    continue
                changed, is_far = self._settled(move, limit)
                if is_far:
                    ruled_out.add(move.family)
                if changed is not None:
                    best = min(best, changed, key=order_of)
            if best is before or self.trials >= end:
                return best

    def _settled(self, move: Move, faster_than: float) -> tuple[Candidate | None, bool]:
        """Return a move's plan, each stage with the first option that leaves it room.

        ``None``: it is not allowed, no faster than `faster_than` seconds, or has no room with any option. The
        second value is whether it rules out those after it in its family.
        """
        best, family, is_far = None, move.family, False
        for ladder in move.ladders:
            tried = list(self._steps(move, ladder, faster_than))
            if not tried:
                break
            last = tried[-1]
            if family is not None and ladder is move.ladders[0]:
                judged = last if family.grows else tried[0]
                never_fits = family.grows and not last.fits and last.iteration_s < faster_than
                is_far = never_fits or judged.iteration_s >= family.far * faster_than
            if last.iteration_s < faster_than and (last.fits or not ladder):
                best, faster_than = last, last.iteration_s
            if tried[0].iteration_s >= faster_than:
                break
        return best, is_far

    def _steps(
        self, move: Move, ladder: Mapping[Place, Sequence[MemoryOption]], faster_than: float
    ) -> Iterator[Candidate]:
        """Yield a move's plans, with more memory saved in each, up to one that fits or is too slow."""
        options = {place: list(own) for place, own in ladder.items()}
        while True:
            plan = with_options(move.plan, {place: own[0] for place, own in options.items()})
            if not self._is_allowed(plan, move.job):
                return
            changed = self.timed(plan, move.job)
            yield changed
            if changed.fits or changed.iteration_s >= faster_than:
                return
            full = [place for place, part in changed.timing.stage_fullness.items() if part > 1]
            if not full or any(len(options.get(place, ())) < 2 for place in full):
                return
            for place in full:
                del options[place][0]

    def _time(self, plan: Plan, job: Job) -> Candidate:
        self.trials += 1
        return Candidate(plan, job, self._model(job).timing(plan))


def _in_order(moves: Sequence[Move]) -> list[tuple[tuple[float, float], Move]]:
    """Return moves with the least bound of their family, by that bound; a family stays in its order."""
    least = dict[Family, tuple[float, float]]()
    for move in moves:
        if move.family is not None:
            least[move.family] = min(least.get(move.family, move.least), move.least)
    bounds = [move.least if move.family is None else least[move.family] for move in moves]
    return sorted(zip(bounds, moves, strict=True), key=lambda entry: entry[0])
