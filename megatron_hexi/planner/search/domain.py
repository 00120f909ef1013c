"""One domain's best layout: groupings tried, the best of them balanced, and the best of these polished."""

from __future__ import annotations

from megatron_hexi.planner.fleet.rates import Rates
from megatron_hexi.planner.fleet.units import Fleet
from megatron_hexi.planner.layouts.trial import Judge, Trial
from megatron_hexi.planner.search.balance import balance
from megatron_hexi.planner.search.descend import descend
from megatron_hexi.planner.search.groupings import all_partitions
from megatron_hexi.planner.search.polish import polish
from megatron_hexi.planner.search.tried import EXHAUSTIVE, WINDOW, Tried

#: Of so few units every partition is balanced and polished.
_FEWEST = 3
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

    def run(self, polished: bool = True) -> Trial:
        """The best found on all units; without the last small changes if not `polished`."""
        if len(self._fleet.units) <= EXHAUSTIVE:
            for grouping in all_partitions(self._fleet):
                self._tried.attempt(grouping)
        else:
            descend(self._tried, self._fleet, self._rates.local_heads)
        return self._finish(polished)

    def _balanced(self, trial: Trial, rounds: int = _ROUNDS) -> Trial:
        return balance(self._judge, self._rates, trial, rounds)

    def _finish(self, polished: bool = True) -> Trial:
        """The best of what was tried, balanced to the end."""
        units = len(self._fleet.units)
        balanced = [self._balanced(trial) for trial in self._tried.most_promising(_finalists(units))]
        balanced.sort(key=_order)
        # Where memory is full, fewer keys in flight leave room for another balance.
        for trial in balanced[: _narrowed(units)]:
            if trial.timing.fullness > _TIGHT and trial.window > 1:
                narrow = self._judge.try_out(self._fleet, trial.layouts, 1)
                if not balanced[0].fits or narrow.iteration_s < _NARROW * balanced[0].iteration_s:
                    balanced.append(self._balanced(narrow))
        best, *others = sorted(balanced, key=_order)
        if not polished or best.timing.fullness > _HOPELESS:
            return best
        rivals = [
            best,
            *(other for other in others[: _rivals(units)] if other.iteration_s < _NEAR * best.iteration_s),
        ]
        return min((polish(self._judge, trial, _polish_budget(units)) for trial in rivals), key=_order)


def _order(trial: Trial) -> tuple[float, float]:
    return trial.order


def _finalists(units: int) -> int:
    """Fewer where each takes longer."""
    return 5 if units <= _FEWEST else 3 if units <= 64 else 2


def _narrowed(units: int) -> int:
    """Finalists that are balanced again with fewer keys in flight, likewise."""
    return 3 if units <= 64 else 1


def _rivals(units: int) -> int:
    """Finalists besides the best that are polished too."""
    return 4 if units <= _FEWEST else 2 if units <= EXHAUSTIVE else 0


def _polish_budget(units: int) -> int:
    """Layouts that polishing may time: fewer where each takes longer."""
    return 120 if units <= EXHAUSTIVE else 60 if units <= 16 else 30 if units <= 64 else 8
