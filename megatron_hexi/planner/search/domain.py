"""Searches the best layout of a domain: tries groupings, balances the best, polishes the best of these."""

from __future__ import annotations

import math
from functools import cached_property

from megatron_hexi.planner.fleet.rates import Rates
from megatron_hexi.planner.fleet.units import Fleet
from megatron_hexi.planner.layouts.trial import Judge, Trial, order_of
from megatron_hexi.planner.search.balance import balance
from megatron_hexi.planner.search.groupings import (
    all_partitions,
    group_by_counts,
    group_counts,
    mixed_groupings,
    rearranged,
    site_classes,
)
from megatron_hexi.planner.search.polish import polish
from megatron_hexi.planner.search.tried import EXHAUSTIVE, WINDOW, TriedGroupings, grouping_of, promise_of

#: Numbers of groups per site with which all classes begin.
_DENSITIES = (0.0, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0)
#: The most groups and units of a grouping that is rearranged, and the most times that one is.
_FEW_GROUPS = 12
_FEW_UNITS = 64
_REARRANGEMENTS = 3


def descend(tried: TriedGroupings, fleet: Fleet, heads: int) -> None:
    """Try uniform groupings, then from the best one make groups larger or smaller, step by step.

    Each step changes the number of groups on all sites of one class: sites of the same kind and size.
    """
    classes = site_classes(fleet)
    units = len(fleet.units)
    ladders = {name: group_counts(name[1], len(sites), units, heads) for name, sites in classes.items()}
    starts = []
    for density in _DENSITIES:
        counts = {
            name: min(ladder, key=lambda count: abs(count / len(classes[name]) - density))
            for name, ladder in ladders.items()
        }
        starts.append((tried.attempt(group_by_counts(fleet, counts)).promise, counts))
    for grouping in mixed_groupings(fleet, heads):
        tried.attempt(grouping)
    promise, counts = min(starts, key=lambda start: start[0])
    improved = True
    while improved:
        improved = False
        for name, ladder in ladders.items():
            place = ladder.index(counts[name])
            for count in ladder[max(0, place - 1) : place] + ladder[place + 1 : place + 2]:
                new_counts = counts | {name: count}
                new_promise = tried.attempt(group_by_counts(fleet, new_counts)).promise
                if new_promise < promise:
                    promise, counts, improved = new_promise, new_counts, True
    _rearrange(tried, fleet)


def _rearrange(tried: TriedGroupings, fleet: Fleet) -> None:
    """Try the best grouping so far with two groups joined or one cut, as long as one of these is better."""
    for _ in range(_REARRANGEMENTS):
        [best] = tried.most_promising(1)
        grouping = grouping_of(best)
        if len(grouping) > _FEW_GROUPS or len(fleet.units) > _FEW_UNITS:
            return
        found = min((tried.attempt(other) for other in rearranged(fleet, grouping)), key=promise_of)
        if found.promise >= best.promise:
            return


#: Fullness of memory from which on it keeps tokens from the units that would process them fastest.
_TIGHT = 0.97
#: Finalists that take less than this factor of the best's time with a window of 1 are balanced with it.
_NARROW = 1.05
#: A layout that needs more than this factor of its memory is not made to fit by small changes.
_HOPELESS = 2.0
#: Rounds of balancing.
_ROUNDS = 3
#: For a few units, the most finalists that are polished besides the best, if they take less than this factor
#: of its time.
_RIVALS, _NEAR = 2, 1.3
#: The most layouts that are timed for a few units that are not polished.
_COARSE = 24
#: By the most units: the number of groupings that are balanced, and of layouts that polishing each may time.
#: Fewer where each takes longer.
_EFFORTS = {EXHAUSTIVE: (3, 120), 16: (3, 60), 64: (3, 30), math.inf: (2, 8)}


class DomainSearch:
    """The search for one domain on all units of a fleet.

    Args:
        judge: the judge that times layouts.
        micro_batches: micro-batches that the domain's replica processes in an iteration.
    """

    def __init__(self, judge: Judge, fleet: Fleet, micro_batches: int) -> None:
        self._judge, self._fleet = judge, fleet
        self._rates = Rates(fleet, WINDOW, judge.shards, micro_batches)
        self._micro_batches = micro_batches
        self._few = len(fleet.units) <= EXHAUSTIVE
        #: Among a few units of several kinds heads can be balanced only roughly.
        self._is_coarse = self._few and len({unit.kind for unit in fleet.units}) > 1
        efforts = (effort for most, effort in _EFFORTS.items() if len(fleet.units) <= most)
        self._finalists, self._budget = next(efforts)

    def run(self, polished: bool = True) -> Trial:
        """Return the best layout on all units, which are searched once, polished or not.

        Args:
            polished: whether small changes of it are tried; a few always are where heads are balanced
                roughly.
        """
        best, *others = self._balanced_finalists
        if best.timing.fullness > _HOPELESS:
            return best
        if not polished:
            return polish(self._judge, best, _COARSE) if self._is_coarse else best
        finalists = [best]
        if self._few:
            finalists += (one for one in others[:_RIVALS] if one.iteration_s < _NEAR * best.iteration_s)
        return min((polish(self._judge, trial, self._budget) for trial in finalists), key=order_of)

    @cached_property
    def _balanced_finalists(self) -> list[Trial]:
        """Trials of the most promising groupings, balanced, the best first."""
        tried = TriedGroupings(self._judge, self._fleet, self._rates, self._micro_batches)
        if not self._fleet.job.model.spans_groups:
            tried.attempt((tuple(range(len(self._fleet.units))),))
        elif self._few:
            for grouping in all_partitions(self._fleet):
                tried.attempt(grouping)
        else:
            descend(tried, self._fleet, self._rates.local_heads)
        balanced = [self._balanced(trial) for trial in tried.most_promising(self._finalists)]
        balanced.sort(key=order_of)
        # Where memory is full, fewer keys in flight leave room for another balance.
        for trial in tuple(balanced):
            if trial.timing.fullness > _TIGHT and trial.window > 1:
                narrow = self._judge.try_out(self._fleet, trial.layouts, 1)
                if not balanced[0].fits or narrow.iteration_s < _NARROW * balanced[0].iteration_s:
                    balanced.append(self._balanced(narrow))
        return sorted(balanced, key=order_of)

    def _balanced(self, trial: Trial) -> Trial:
        return balance(self._judge, self._rates, trial, _ROUNDS)
