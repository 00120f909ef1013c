"""Where the bound leaves something to be found: random changes of groupings, then of whole layouts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from megatron_hexi.planner.groupings import EXHAUSTIVE
from megatron_hexi.planner.layout import Grouping
from megatron_hexi.planner.search import DomainSearch, grouping_of
from megatron_hexi.planner.solver import refine
from megatron_hexi.planner.trial import Judge, Trial
from megatron_hexi.planner.tune import tune
from megatron_hexi.planner.units import Fleet

#: Groupings of more than a handful of units and up to so many are changed at random.
_FEW_ENOUGH = 96
#: Of so few, some are left out and others come in.
_FEW_TO_CHOOSE = 40
#: Layouts that differ in their groups are tuned by so many trials each; the best of them by so many more, or
#: of more units than this by fewer.
_RIVALS, _AT_FIRST = 6, 60
_FEW_TO_TUNE, _AT_LAST, _OF_MANY = 128, 300, 30


def improve(judge: Judge, fleet: Fleet, best: Trial, groupings: Sequence[Grouping]) -> Trial:
    """The best that random changes come by: as good as `best` or better.

    Which of some groupings is the best shows when each is tuned: those that wait for keys gain most.

    Args:
        judge: times layouts.
        fleet: all units.
        best: the best so far.
        groupings: of all units as one replica, that are worth a look (those that the bound names).
    """
    alone = [best] if len(best.layouts) == 1 else []
    rivals = dict[frozenset[frozenset[int]], Trial]()
    for trial in sorted([*alone, *_changed(judge, fleet, best, groupings)], key=lambda trial: trial.order):
        if len(rivals) < _RIVALS:
            rivals.setdefault(_groups(trial), trial)
    found = [best, *rivals.values()]
    if len(rivals) > 1:
        found = [best, *(tune(judge, trial, _AT_FIRST) for trial in rivals.values())]
    winner = min(found, key=lambda trial: trial.order)
    budget = _AT_LAST if len(winner.fleet.units) <= _FEW_TO_TUNE else _OF_MANY
    tuned = tune(judge, winner, budget)
    return best if tuned is best else refine(judge, tuned).trial


def _groups(trial: Trial) -> frozenset[frozenset[int]]:
    """The GPUs of each group."""
    units = trial.fleet.units
    return frozenset(
        frozenset(units[unit].gpus[0][0] for unit in part.units) for part in trial.layouts[0].parts
    )


def _changed(judge: Judge, fleet: Fleet, best: Trial, groupings: Sequence[Grouping]) -> list[Trial]:
    """What changes of the best grouping come by, and of those that the bound names.

    For few units, since each layout takes its time.
    """
    alone = replace(fleet, job=replace(fleet.job, data_parallel=1))
    starts: list[tuple[Fleet, Sequence[Grouping], bool]] = []
    if len(best.layouts) == 1:
        starts.append((best.fleet, [grouping_of(best)], False))
    if groupings:
        starts.append((alone, groupings, False))
    if len(best.layouts) == 1 and len(fleet.units) <= _FEW_TO_CHOOSE:
        number = {unit.gpus: place for place, unit in enumerate(fleet.units)}
        units = [number[unit.gpus] for unit in best.fleet.units]
        here = tuple(tuple(units[unit] for unit in group) for group in grouping_of(best))
        starts.append((alone, [here], True))
    found, micro_batches = list[Trial](), fleet.job.global_batch_size // fleet.job.micro_batch_size
    for part, candidates, partly in starts:
        if EXHAUSTIVE < len(part.units) <= _FEW_ENOUGH:
            found += DomainSearch(judge, part, micro_batches).wander(candidates, partly)
    return found
