"""Small random changes of whole layouts: what balance and polish, kind by kind, leave.

Where keys bound a plan, an inner group and an outer one of the same units do not want the same: they see and
send different parts of the others' keys, and wait for each other's. So tokens of one group, tokens and heads
inside one, the order of groups, and who is in which are changed, one at a time (moves.py): a change is kept,
and made again twice as far, if the cost model likes it. Groups that stand in another order, or have other
units, are out of step until they have other tokens: these are moved before it is asked.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from random import Random

import numpy as np

from megatron_hexi.planner.layouts.layout import units_by_rank
from megatron_hexi.planner.layouts.trial import Judge, Trial
from megatron_hexi.planner.tuning.moves import Change, Parts, drawn, shared

#: What is less than this part faster is as fast.
_LEAST = 1e-6
#: What takes less than this factor of the best's time is levelled, so often at most: groups have tokens by
#: when they are done, to one of these powers.
_ALMOST, _LEVELLINGS, _EXPONENTS = 1.01, 2, (0.5, 1.0)


@dataclass(frozen=True)
class Effort:
    """What tuning may take.

    Args:
        trials: layouts to time at most.
        patience: of them, one after the other, that are no better before it ends.
        steps: logarithms of the factors by which tokens are changed.
        series: of random numbers.
    """

    trials: int
    patience: int
    steps: tuple[float, ...]
    series: int


def tune(judge: Judge, trial: Trial, effort: Effort) -> Trial:
    """The best that is found.

    Replicas that are alike are changed alike.

    Args:
        judge: times layouts.
        trial: where changes begin.
        effort: how long to look.
    """
    chance, alike = Random(effort.series), _alike(trial)
    end, gained = judge.trials + effort.trials, judge.trials
    for _ in range(effort.trials):
        if judge.trials >= min(end, gained + effort.patience):
            break
        replicas, exponent = chance.choice(alike), chance.choice(_EXPONENTS)
        move = drawn(chance, trial.fleet, trial.layouts[replicas[0]], effort.steps)
        while judge.trials < end:
            other = _changed(judge, trial, replicas, move.change)
            if other is not None and move.further is None:
                other = _levelled(judge, other, trial, replicas, exponent, end)
            if other is None or not _is_better(other, trial):
                break
            trial, gained = other, judge.trials
            if move.further is None:
                break
            move = move.further()
    return trial


def _is_better(one: Trial, other: Trial) -> bool:
    return (one.excess, one.iteration_s * (1 + _LEAST)) < other.order


def _changed(judge: Judge, trial: Trial, replicas: Sequence[int], change: Change) -> Trial | None:
    """The trial with some replicas changed; ``None`` if that changes nothing."""
    layouts = list(trial.layouts)
    for number in replicas:
        layouts[number] = replace(layouts[number], parts=change(layouts[number].parts))
    if tuple(layouts) == trial.layouts:
        return None
    return judge.try_out(trial.fleet, layouts, trial.window)


def _levelled(
    judge: Judge, trial: Trial, rival: Trial, replicas: Sequence[int], exponent: float, end: int
) -> Trial:
    """The trial with tokens moved to groups that are done early, if it is almost as good as its rival."""
    for _ in range(_LEVELLINGS):
        is_close = trial.excess <= rival.excess and trial.iteration_s < _ALMOST * rival.iteration_s
        if not is_close or _is_better(trial, rival) or judge.trials >= end:
            break
        other = _changed(judge, trial, replicas, _by_end(trial, exponent))
        if other is None or not _is_better(other, trial):
            break
        trial = other
    return trial


def _by_end(trial: Trial, exponent: float) -> Change:
    """Fewer tokens for groups that are done late with all passes of a layer, on the slowest stage."""
    stages = [sum(one.finish for one in stage.passes) for stage in trial.timing.stages]
    units = units_by_rank(trial.fleet, trial.layouts)
    # A group may have nothing to do.
    done = dict(zip(units, np.maximum(np.max(stages, axis=0), 1e-30), strict=True))

    def change(parts: Parts) -> Parts:
        return shared(parts, np.array([part.total / done[part.units[0]] ** exponent for part in parts]))

    return change


def _alike(trial: Trial) -> list[list[int]]:
    """Replicas whose groups have the same kinds of units."""
    units, alike = trial.fleet.units, dict[Hashable, list[int]]()
    for number, layout in enumerate(trial.layouts):
        kinds = tuple(tuple(units[unit].kind for unit in part.units) for part in layout.parts)
        alike.setdefault((kinds, layout.micro_batches), []).append(number)
    return list(alike.values())
