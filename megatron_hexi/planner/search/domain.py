"""One domain's best layout: groupings tried, the best of them balanced, and the best of these polished."""

from __future__ import annotations

import math
from typing import NamedTuple

from megatron_hexi.planner.fleet.rates import Rates
from megatron_hexi.planner.fleet.units import Fleet
from megatron_hexi.planner.layouts.trial import Judge, Trial, order_of
from megatron_hexi.planner.search.balance import balance
from megatron_hexi.planner.search.descend import descend
from megatron_hexi.planner.search.groupings import all_partitions
from megatron_hexi.planner.search.polish import polish
from megatron_hexi.planner.search.tried import EXHAUSTIVE, WINDOW, Tried

#: Finalists that are polished although they are not the best take less than this factor of its time.
_NEAR = 1.3
#: Memory that is full enough to keep tokens from where they would be done fastest.
_TIGHT = 0.97
#: Finalists that take less than this factor of the best's time with fewer keys in flight are balanced so.
_NARROW = 1.05
#: Where memory is short by this factor, no small change makes the best layout fit.
_HOPELESS = 2.0
#: Rounds of balancing.
_ROUNDS = 3


class _Effort(NamedTuple):
    """How much is tried.

    Args:
        finalists: groupings that are balanced.
        narrowed: finalists that are balanced again with fewer keys in flight.
        rivals: finalists besides the best that are polished too.
        polish: layouts that polishing each may time.
    """

    finalists: int
    narrowed: int
    rivals: int
    polish: int


#: By units, up to so many: less where each layout takes longer to time.
_EFFORTS = {
    3: _Effort(finalists=5, narrowed=3, rivals=4, polish=120),
    EXHAUSTIVE: _Effort(finalists=3, narrowed=3, rivals=2, polish=120),
    16: _Effort(finalists=3, narrowed=3, rivals=0, polish=60),
    64: _Effort(finalists=3, narrowed=3, rivals=0, polish=30),
    math.inf: _Effort(finalists=2, narrowed=1, rivals=0, polish=8),
}


class DomainSearch:
    """The search for one domain on all units of a fleet.

    Args:
        judge: times layouts.
        fleet: the units.
        micro_batches: of the domain's replica.
    """

    def __init__(self, judge: Judge, fleet: Fleet, micro_batches: int) -> None:
        self._judge, self._fleet = judge, fleet
        self._rates = Rates(fleet, WINDOW, judge.shards, micro_batches)
        self._tried = Tried(judge, fleet, self._rates, micro_batches)
        self._effort = next(effort for most, effort in _EFFORTS.items() if len(fleet.units) <= most)

    def run(self, polished: bool = True) -> Trial:
        """The best found on all units; without the last small changes if not `polished`."""
        if len(self._fleet.units) <= EXHAUSTIVE:
            for grouping in all_partitions(self._fleet):
                self._tried.attempt(grouping)
        else:
            descend(self._tried, self._fleet, self._rates.local_heads)
        best, *others = self._balanced_finalists()
        if not polished or best.timing.fullness > _HOPELESS:
            return best
        near = [one for one in others[: self._effort.rivals] if one.iteration_s < _NEAR * best.iteration_s]
        return min((polish(self._judge, trial, self._effort.polish) for trial in [best, *near]), key=order_of)

    def _balanced_finalists(self) -> list[Trial]:
        """The best of what was tried, balanced to the end, the best first."""
        balanced = [self._balanced(trial) for trial in self._tried.most_promising(self._effort.finalists)]
        balanced.sort(key=order_of)
        # Where memory is full, fewer keys in flight leave room for another balance.
        for trial in balanced[: self._effort.narrowed]:
            if trial.timing.fullness > _TIGHT and trial.window > 1:
                narrow = self._judge.try_out(self._fleet, trial.layouts, 1)
                if not balanced[0].fits or narrow.iteration_s < _NARROW * balanced[0].iteration_s:
                    balanced.append(self._balanced(narrow))
        return sorted(balanced, key=order_of)

    def _balanced(self, trial: Trial) -> Trial:
        return balance(self._judge, self._rates, trial, _ROUNDS)
