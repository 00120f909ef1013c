"""Which of its layouts is a baseline's best: those that can be are timed, by what they take at least."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import compress
from math import inf

from megatron_hexi.planner.baselines.floor import Floor
from megatron_hexi.planner.baselines.rules import Entrant
from megatron_hexi.planner.layouts.layout import Layout
from megatron_hexi.planner.layouts.trial import Judge, Progress, Trial

#: Steps of the exchange that the overlap may have under way.
WINDOWS = (1, 2, 4)
#: What rounding may do to a lower bound.
_ROUNDING = 1e-9


@dataclass(frozen=True, eq=False)
class Entry:
    """A layout that was timed."""

    candidate: Entrant
    trial: Trial


class Race:
    """Times layouts of baselines.

    A layout is passed over where its lower bound says that it cannot be the best of any baseline that may use
    it, or is not faster than asked for. What it takes with less computed again is another bound; where that
    fits, it is not tried with more.

    Args:
        faster_than: seconds of an iteration.
        tell: told how far it is.
    """

    def __init__(self, faster_than: float, tell: Progress | None) -> None:
        #: One for each job that layouts are of.
        self._judges: dict[int, Judge] = {}
        self._faster_than = faster_than
        self._tell = tell or (lambda _what, _done, _of: None)
        #: Seconds that layouts take at least, whatever is computed again.
        self._least: dict[tuple[object, ...], float] = {}
        #: Of each baseline the best of its layouts, one that fits if any does.
        self.best: dict[str, Entry] = {}

    @property
    def trials(self) -> int:
        """Layouts that were timed."""
        return sum(judge.trials for judge in self._judges.values())

    def run(self, heats: Iterable[tuple[Floor, Sequence[Entrant]]]) -> None:
        """Find the best of each baseline, of layouts of several fleets.

        Args:
            heats: those of each fleet, and its floor; of a layout those that compute less again come first.
        """
        entrants: list[tuple[float, bool, Entrant]] = []
        for floor, some in heats:
            room = floor.may_fit([one.layouts for one in some])
            if self._faster_than < inf:
                some, room = list(compress(some, room)), room[room]
            if some:
                seconds = floor.seconds([one.layouts for one in some]) * (1 - _ROUNDING)
                entrants += zip(seconds.tolist(), room.tolist(), some, strict=True)
        entrants.sort(key=lambda entrant: entrant[0])
        for done, (least, has_room, one) in enumerate(entrants):
            self._tell("baselines", done, len(entrants))
            key = one.fleet.units, one.layouts
            least = max(least, self._least.get(key, 0.0))
            # What does not fit is of interest where nothing does.
            nothing_fits = any(self._limit(name) == inf for name in one.texts)
            if self._may_win(one, least) and (has_room or nothing_fits):
                self._least[key] = self._time(one, least)

    def _time(self, candidate: Entrant, least_s: float) -> float:
        """Each window that may be the layout's best; what it takes at least with more computed again."""
        fleet = candidate.fleet
        judge = self._judges.setdefault(id(fleet.job), Judge(fleet))
        for window in _windows(candidate.layouts):
            if window > 1 and not self._may_win(candidate, least_s):
                return least_s
            trial = judge.try_out(fleet, candidate.layouts, window)
            self._enter(Entry(candidate, trial))
            least_s = max(least_s, _without_exchange(trial) * (1 - _ROUNDING))
            if not trial.fits:
                return least_s  # a larger window takes more memory
            if least_s >= trial.iteration_s * (1 - 2 * _ROUNDING):
                break  # nothing left that a window could hide
        return inf

    def _enter(self, entry: Entry) -> None:
        for name in entry.candidate.texts:
            best = self.best.get(name)
            if best is None or entry.trial.order < best.trial.order:
                self.best[name] = entry

    def _may_win(self, candidate: Entrant, least_s: float) -> bool:
        """Whether the layout may be the best of a baseline."""
        return any(least_s < self._limit(name) for name in candidate.texts)

    def _limit(self, name: str) -> float:
        best = self.best.get(name)
        return best.trial.iteration_s if best is not None and best.trial.fits else self._faster_than


def _windows(layouts: Sequence[Layout]) -> Iterator[int]:
    """Windows that differ: with so many steps under way as there are, all begin at once."""
    steps = max(len(layout.parts) for layout in layouts) - 1
    reached = 0
    for window in WINDOWS:
        if window == 1 or reached < steps:
            yield window
        reached = window


def _without_exchange(trial: Trial) -> float:
    """Seconds that an iteration would take if the exchange added nothing; no window makes it shorter.

    A pass that becomes shorter hides less of the gradients, but is run at least as often as they are sent.
    """
    timing = trial.timing
    shown = (
        sum(stage.replicas[number].exchange for stage in timing.stages) * int(count)
        for number, count in enumerate(timing.micro_batches)
    )
    return trial.iteration_s - max(shown)
