"""One domain's best layout: groupings tried, the best of them balanced, and the best of these polished."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from random import Random

from megatron_hexi.planner.balance import balance, rebalanced
from megatron_hexi.planner.groupings import (
    EXHAUSTIVE,
    Choice,
    SiteClass,
    all_partitions,
    choices,
    group_by_choice,
    groups_a_site,
    idle_heads,
    mixed_groupings,
    rearranged,
    site_classes,
    unequal_choices,
)
from megatron_hexi.planner.guess import FirstGuess
from megatron_hexi.planner.layout import Grouping, Layout
from megatron_hexi.planner.orders import alternating, facing, other_orders
from megatron_hexi.planner.polish import polish
from megatron_hexi.planner.rates import Rates
from megatron_hexi.planner.trial import Judge, Trial
from megatron_hexi.planner.units import Fleet
from megatron_hexi.planner.wander import changed

#: KV blocks in flight while groupings are compared: one for the wire, one for groups that are out of step.
_WINDOW = 2
#: Groups a site with which all classes begin.
_DENSITIES = (0.0, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0)
#: Heads that idle less by this part of the time are worth a step further.
_IDLE = 0.1
#: Groupings of up to so many groups and units are rearranged, so often at most.
_FEW_GROUPS = 12
_FEW_UNITS = 64
_REARRANGEMENTS = 3
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
#: Memory overdrawn by so little is mended when finalists are balanced; more of it at once, in a few rounds,
#: the later ones with fewer keys in flight, for these take memory too. Mending makes a layout slower: one
#: that takes this factor of the best already is left alone.
_SLIGHT = 0.01
_BEHIND = 1.1
_MENDS = (_WINDOW, 1, 1)
_ROUNDS = 3
#: Waiting for keys that is worth another order, as a part of the time.
_WAITING = 0.005
#: Random changes at most, and at most without one that is kept. What takes less than a factor of the best's
#: time is worth balancing; of what is found, so many groupings are kept.
_STEPS, _PATIENCE, _WORTH_BALANCING, _FOUND = 400, 100, 1.03, 4


class DomainSearch:
    """The search for one domain on all units of a fleet.

    Args:
        judge: times layouts.
        fleet: the units.
        micro_batches: of the domain's replica.
    """

    def __init__(self, judge: Judge, fleet: Fleet, micro_batches: int) -> None:
        self._judge = judge
        self._fleet = fleet
        self._micro_batches = micro_batches
        self._rates = Rates(fleet, _WINDOW)
        self._guess = FirstGuess(fleet, self._rates)
        self._tried: dict[Grouping, Trial] = {}
        self._best: Trial | None = None

    def run(self, polished: bool = True) -> Trial:
        """The best found on all units; without the last small changes if not `polished`."""
        if len(self._fleet.units) <= EXHAUSTIVE:
            for grouping in all_partitions(self._fleet):
                self._try(grouping)
        else:
            self._descend()
        return self._finish(polished)

    def wander(self, groupings: Sequence[Grouping], walks: int, partly: bool = False) -> list[Trial]:
        """The best that random changes of groupings come by, and what promised most.

        Changes begin at the one that promises most, and at the one that is best in the end.

        Args:
            groupings: where changes begin, of all units.
            walks: series of changes from each start; without any, the groupings themselves are looked at.
            partly: units may be left out, there and on the way.
        """
        budget = _polish_budget(len(self._fleet.units))
        tried = [self._try(grouping) for grouping in groupings]
        if not walks:
            return [self._finish()]
        balanced = [balance(self._judge, self._rates, trial, _ROUNDS) for trial in tried]
        ended = [polish(self._judge, trial, budget) for trial in balanced]
        starts = grouping_of(min(tried, key=_promise)), grouping_of(min(ended, key=_order))
        for start in dict.fromkeys(starts):
            for walk in range(walks):
                self._walk(start, partly, Random(walk // 2), balancing=walk % 2 == 1)
        found = [balance(self._judge, self._rates, trial, _ROUNDS) for trial in self._most_promising(_FOUND)]
        return [*ended, self._finish(), *found]

    def _walk(self, grouping: Grouping, partly: bool, chance: Random, balancing: bool) -> None:
        """Each change is kept if it promises more.

        What a grouping promises before it is balanced, and after, leads different ways: both are gone.
        """
        here, kept = self._try(grouping), 0
        for step in range(_STEPS):
            if step - kept > _PATIENCE:
                break
            there = self._try(changed(chance, self._fleet, grouping_of(here), partly))
            short, seconds = here.promise
            if balancing and there.promise < (short, _WORTH_BALANCING * seconds):
                there = self._enter(balance(self._judge, self._rates, there, 1))
            if there.promise < here.promise:
                here, kept = there, step

    def _finalists(self) -> list[Trial]:
        """Fewer where each takes longer."""
        units = len(self._fleet.units)
        return self._most_promising(5 if units <= _FEWEST else 3 if units <= 64 else 2)

    def _most_promising(self, most: int) -> list[Trial]:
        return sorted(self._tried.values(), key=_promise)[:most]

    def _finish(self, polished: bool = True) -> Trial:
        """The best of what was tried, balanced to the end."""
        balanced = [balance(self._judge, self._rates, trial, _ROUNDS) for trial in self._finalists()]
        balanced.sort(key=_order)
        # Where memory is full, fewer keys in flight leave room for another balance.
        for trial in balanced[: _narrowed(len(self._fleet.units))]:
            if trial.fullness > _TIGHT and trial.window > 1:
                narrow = self._judge.try_out(self._fleet, trial.layouts, 1)
                if not balanced[0].fits or narrow.iteration_s < _NARROW * balanced[0].iteration_s:
                    balanced.append(balance(self._judge, self._rates, narrow, _ROUNDS))
        best, *others = sorted(balanced, key=_order)
        if not polished or best.fullness > _HOPELESS:
            return best
        units = len(self._fleet.units)
        rivals = [
            best,
            *(other for other in others[: _rivals(units)] if other.iteration_s < _NEAR * best.iteration_s),
        ]
        return min((polish(self._judge, trial, _polish_budget(units)) for trial in rivals), key=_order)

    def _descend(self) -> None:
        """All classes alike first; from the best of these one class after another a step coarser or finer."""
        classes = site_classes(self._fleet)
        units = len(self._fleet.units)
        ladders = {
            name: choices(name[1], len(sites), units, self._rates.local_heads)
            for name, sites in classes.items()
        }
        starts = []
        for density in _DENSITIES:
            chosen = {
                name: min(ladder, key=lambda choice: abs(groups_a_site(choice, len(classes[name])) - density))
                for name, ladder in ladders.items()
            }
            starts.append((self._try(group_by_choice(self._fleet, chosen), sparing=True).promise, chosen))
        for grouping in mixed_groupings(self._fleet, self._rates.local_heads):
            self._try(grouping, sparing=True)
        promise, chosen = min(starts, key=lambda start: start[0])
        improved = True
        while improved:
            improved = False
            for name, ladder in ladders.items():
                for option in self._neighbours(name, ladder, chosen[name], len(classes[name])):
                    other = chosen | {name: option}
                    found = self._try(group_by_choice(self._fleet, other), sparing=True).promise
                    if found < promise:
                        promise, chosen, improved = found, other, True
        self._rearrange()

    def _rearrange(self) -> None:
        """From the best grouping so far, two groups joined or one cut: one pair of each kind is tried."""
        for _ in range(_REARRANGEMENTS):
            best = min(self._tried.values(), key=lambda trial: trial.promise)
            grouping = grouping_of(best)
            if len(grouping) > _FEW_GROUPS or len(self._fleet.units) > _FEW_UNITS:
                return
            found = min((self._try(other) for other in rearranged(self._fleet, grouping)), key=_promise)
            if found.promise >= best.promise:
                return

    def _neighbours(self, name: SiteClass, ladder: list[Choice], choice: Choice, sites: int) -> list[Choice]:
        """A step coarser, a step finer; where heads do not go round there, also the next where fewer idle."""
        unequal = unequal_choices(name[1], self._rates.local_heads)
        if choice not in ladder:
            return unequal
        place, found = ladder.index(choice), []
        for way in (ladder[:place][::-1], ladder[place + 1 :]):
            idle = [idle_heads(option, name[1], sites, self._rates.local_heads) for option in way]
            found += way[:1]
            found += [option for option, part in zip(way, idle, strict=True) if part < idle[0] - _IDLE][:1]
        return [*found, *unequal]

    def _try(self, grouping: Grouping, sparing: bool = False) -> Trial:
        """The grouping's first layout, scaled again where memory does not suffice, in its best order.

        Args:
            grouping: units by group.
            sparing: only try orders if the grouping could be the best so far without waiting for keys.
        """
        name = _unordered(grouping)
        if name not in self._tried:
            layout = self._nested(grouping)
            best = self._mended(layout)
            for parts in other_orders(layout.parts):
                if parts != layout.parts and self._order_matters(best, sparing):
                    best = min(best, self._mended(replace(layout, parts=parts)), key=_promise)
            self._enter(best)
        return self._tried[name]

    def _enter(self, trial: Trial) -> Trial:
        """Remember it, if it is its grouping's best; that one."""
        name = _unordered(grouping_of(trial))
        best = self._tried[name] = min(self._tried.get(name, trial), trial, key=_promise)
        if self._best is None or best.promise < self._best.promise:
            self._best = best
        return best

    def _mended(self, layout: Layout) -> Trial:
        best = trial = self._judge.try_out(self._fleet, [layout], _WINDOW)
        for window in _MENDS:
            if trial.excess <= _SLIGHT or self._is_behind(trial):
                break
            trial = self._judge.try_out(self._fleet, [rebalanced(self._rates, trial)], window)
            best = min(best, trial, key=_promise)
        return best

    def _is_behind(self, trial: Trial) -> bool:
        """Whether it cannot be the best by far; of a handful of units, every grouping gets its chance."""
        if self._best is None or len(self._fleet.units) <= EXHAUSTIVE:
            return False
        short, seconds = self._best.promise
        return not short and trial.iteration_s > _BEHIND * seconds

    def _order_matters(self, trial: Trial, sparing: bool) -> bool:
        """Whether it waits for keys, and may be the best in another order."""
        phases = trial.timing.phases
        if phases.exchange <= _WAITING * phases.total or self._is_behind(trial):
            return False
        best = self._best
        if not sparing or best is None or best.promise[0]:
            return True
        return phases.total - phases.exchange < best.iteration_s

    def _nested(self, grouping: Grouping) -> Layout:
        """The first guess, groups and members in an order that lets all keep pace."""
        layout = self._guess.layout(grouping, self._micro_batches)
        parts = facing(self._fleet, alternating(self._fleet, layout.parts))
        return Layout(parts, layout.micro_batches)


def grouping_of(trial: Trial) -> Grouping:
    """Units by group, ascending, of a trial of one replica."""
    return tuple(tuple(sorted(part.units)) for part in trial.layouts[0].parts)


def _unordered(grouping: Grouping) -> Grouping:
    """The same however groups and members are ordered."""
    return tuple(sorted(tuple(sorted(group)) for group in grouping))


def _order(trial: Trial) -> tuple[float, float]:
    return trial.order


def _promise(trial: Trial) -> tuple[bool, float]:
    return trial.promise


def _narrowed(units: int) -> int:
    """Finalists that are balanced again with fewer keys in flight, likewise."""
    return 3 if units <= 64 else 1


def _rivals(units: int) -> int:
    """Finalists besides the best that are polished too."""
    return 4 if units <= _FEWEST else 2 if units <= EXHAUSTIVE else 0


def _polish_budget(units: int) -> int:
    """Layouts that polishing may time: fewer where each takes longer."""
    return 120 if units <= EXHAUSTIVE else 60 if units <= 16 else 30 if units <= 64 else 8
