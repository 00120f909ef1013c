"""Groupings tried in a search, each with its best layout so far."""

from __future__ import annotations

from dataclasses import replace

from megatron_hexi.planner.fleet.rates import Rates
from megatron_hexi.planner.fleet.units import Fleet
from megatron_hexi.planner.layouts.layout import Grouping, Layout
from megatron_hexi.planner.layouts.orders import alternating, facing, other_orders
from megatron_hexi.planner.layouts.trial import Judge, Trial
from megatron_hexi.planner.search.balance import rebalanced
from megatron_hexi.planner.search.guess import FirstGuess

#: Up to this many units, all partitions are tried: 52 for five, fewer where units are alike.
EXHAUSTIVE = 5
#: Prefetch depth while groupings are compared: a step for the wire, one for groups that are out of step.
WINDOW = 2
#: Memory overdrawn by less than this part is mended when finalists are balanced; more of it at once, by a few
#: rounds of rebalancing, the later ones with smaller windows, since keys in flight take memory too. Mending
#: makes a layout slower: one that already takes this factor of the best's time is not mended.
_SLIGHT = 0.01
_BEHIND = 1.1
_MENDS = (WINDOW, 1, 1)
#: Orders are tried where the wait for keys is more than this part of an iteration.
_WAITING = 0.005


class TriedGroupings:
    """Tries groupings of one domain on all units of a fleet.

    Args:
        judge: the judge that times layouts.
        rates: best rates of the units, for first layouts.
        micro_batches: micro-batches that the domain's replica processes in an iteration.
    """

    def __init__(self, judge: Judge, fleet: Fleet, rates: Rates, micro_batches: int) -> None:
        self._judge, self._fleet, self._rates, self._micro_batches = judge, fleet, rates, micro_batches
        self._guess = FirstGuess(fleet, rates)
        self._found: dict[Grouping, Trial] = {}
        self._best: Trial | None = None

    def most_promising(self, most: int) -> list[Trial]:
        """Return at most `most` trials of different groupings, the best first."""
        return sorted(self._found.values(), key=promise_of)[:most]

    def attempt(self, grouping: Grouping) -> Trial:
        """Return the trial of a grouping in the fastest order of groups, rebalanced if memory is short."""
        name = _unordered(grouping)
        if name not in self._found:
            layout = self._nested(grouping)
            best = self._mended(layout)
            for parts in other_orders(layout.parts):
                if parts != layout.parts and self._order_matters(best):
                    best = min(best, self._mended(replace(layout, parts=parts)), key=promise_of)
            self._found[name] = best
            if self._best is None or best.promise < self._best.promise:
                self._best = best
        return self._found[name]

    def _mended(self, layout: Layout) -> Trial:
        best = trial = self._judge.try_out(self._fleet, [layout], WINDOW)
        for window in _MENDS:
            if trial.excess <= _SLIGHT or self._is_behind(trial):
                break
            trial = self._judge.try_out(self._fleet, [rebalanced(self._rates, trial)], window)
            best = min(best, trial, key=promise_of)
        return best

    def _is_behind(self, trial: Trial) -> bool:
        """Return whether a trial is too slow to become the best; never with few units."""
        if self._best is None or len(self._fleet.units) <= EXHAUSTIVE:
            return False
        short, seconds = self._best.promise
        return not short and trial.iteration_s > _BEHIND * seconds

    def _order_matters(self, trial: Trial) -> bool:
        """Return whether another order of groups and members may be faster.

        Another order may help if the trial waits for keys, and would be the best so far without that wait.
        """
        phases, best = trial.timing.phases, self._best
        if phases.exchange <= _WAITING * phases.total or self._is_behind(trial):
            return False
        return best is None or best.promise[0] or phases.total - phases.exchange < best.iteration_s

    def _nested(self, grouping: Grouping) -> Layout:
        """Return the grouping's first layout, its groups and members ordered to even out the exchange."""
        layout = self._guess.layout(grouping, self._micro_batches)
        parts = facing(self._fleet, alternating(self._fleet, layout.parts))
        return Layout(parts, layout.micro_batches)


def grouping_of(trial: Trial) -> Grouping:
    """Return the units of each group of a trial with one replica, ascending in each group."""
    return tuple(tuple(sorted(part.units)) for part in trial.layouts[0].parts)


def promise_of(trial: Trial) -> tuple[bool, float]:
    """Return the sort key of a trial, see `Trial.promise`."""
    return trial.promise


def _unordered(grouping: Grouping) -> Grouping:
    """Return a key of the grouping that ignores the order of groups and members."""
    return tuple(sorted(tuple(sorted(group)) for group in grouping))
