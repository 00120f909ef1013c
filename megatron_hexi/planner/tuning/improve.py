"""Where the bound leaves something to be found: random changes of groupings, then of whole layouts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from megatron_hexi.planner.budget import EXHAUSTIVE, Budget
from megatron_hexi.planner.fleet.units import Fleet
from megatron_hexi.planner.layouts.layout import Grouping
from megatron_hexi.planner.layouts.trial import Judge, Trial
from megatron_hexi.planner.search.domain import DomainSearch
from megatron_hexi.planner.search.tried import grouping_of
from megatron_hexi.planner.tuning.solver import refine
from megatron_hexi.planner.tuning.tune import Effort, tune

#: Where the bound leaves more than this part to be found, a plan is improved.
LEFT = 0.01
#: Of so few units that groupings are changed, some are left out and others come in.
_FEW_TO_CHOOSE = 40
#: Less tuning than that is not worth while.
_LEAST_TRIALS = 30
#: The bound leaves so much to be found, as a part of the time, that all of it is worth looking for; where it
#: leaves less, patience is less, but this part of it at least.
_MUCH, _LITTLE = 0.03, 0.2

_Groups = frozenset[frozenset[frozenset[int]]]


def improve(
    judge: Judge, fleet: Fleet, best: Trial, groupings: Sequence[Grouping], least_s: float, budget: Budget
) -> Trial:
    """The best that random changes come by: as good as `best` or better.

    Which of some groupings is the best shows when each is tuned: those that wait for keys gain most.

    Args:
        judge: times layouts.
        fleet: all units.
        best: the best so far.
        groupings: of all units as one replica, that are worth a look (those that the bound names).
        least_s: an iteration that no plan passes.
        budget: how long to look.
    """
    rivals = dict[_Groups, Trial]()
    found = [best, *_changed(judge, fleet, best, groupings, budget)]
    for trial in sorted(found, key=lambda trial: trial.order):
        rivals.setdefault(_groups(trial), trial)
    field = list(rivals.values())
    units = len(best.fleet.units)
    # A trial takes about as the square of units.
    scale = min(1.0, budget.tuned / units) ** 2
    worth = min(1.0, max(_LITTLE, (best.iteration_s / least_s - 1 - LEFT) / (_MUCH - LEFT)))
    for series, (count, trials, patience, steps) in enumerate(budget.tunings):
        effort = Effort(max(budget.trials, int(scale * trials)), int(worth * patience * units), steps, series)
        if effort.trials >= _LEAST_TRIALS:
            field = [tune(judge, trial, effort) for trial in sorted(field, key=lambda one: one.order)[:count]]
    tuned = min(field, key=lambda trial: trial.order)
    return best if tuned is best else refine(judge, tuned).trial


def _groups(trial: Trial) -> _Groups:
    """The GPUs of each group of each replica."""
    units = trial.fleet.units
    return frozenset(
        frozenset(frozenset(units[unit].gpus[0][0] for unit in part.units) for part in layout.parts)
        for layout in trial.layouts
    )


def _changed(
    judge: Judge, fleet: Fleet, best: Trial, groupings: Sequence[Grouping], budget: Budget
) -> list[Trial]:
    """What changes of the best grouping come by, and of those that the bound names.

    For few units, since each layout takes its time.
    """
    alone = replace(fleet, job=replace(fleet.job, data_parallel=1))
    micro_batches = fleet.job.global_batch_size // fleet.job.micro_batch_size
    starts: list[tuple[Fleet, Sequence[Grouping], bool]] = []
    if len(best.layouts) == 1 and budget.walks:
        starts.append((best.fleet, [grouping_of(best)], False))
    if groupings:
        starts.append((alone, groupings, False))
    if len(best.layouts) == 1 and budget.walks and len(fleet.units) <= _FEW_TO_CHOOSE:
        number = {unit.gpus: place for place, unit in enumerate(fleet.units)}
        units = [number[unit.gpus] for unit in best.fleet.units]
        here = tuple(tuple(units[unit] for unit in group) for group in grouping_of(best))
        starts.append((alone, [here], True))
    found = list[Trial]()
    for part, candidates, partly in starts:
        if EXHAUSTIVE < len(part.units) <= budget.walked:
            search = DomainSearch(judge, part, micro_batches)
            found += search.wander(candidates, budget.walks, partly)
    return found
