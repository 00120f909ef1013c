"""Which of its layouts is a baseline's best: those that can be are timed, by what they take at least."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from megatron_hexi.planner.baselines.floor import Floor
from megatron_hexi.planner.baselines.rules import Candidate
from megatron_hexi.planner.layouts.layout import Layout
from megatron_hexi.planner.layouts.trial import Judge, Progress, Trial

#: Steps of the exchange that the overlap may have under way.
WINDOWS = (1, 2, 4)
#: What rounding may do to a lower bound.
_ROUNDING = 1e-9


@dataclass(frozen=True, eq=False)
class Entry:
    """A layout that was timed."""

    candidate: Candidate
    trial: Trial


@dataclass(eq=False)
class Standing:
    """How a baseline does.

    Args:
        best: the best of its layouts so far, one that fits if any does; ``None``: none was timed.
        passed: the first of the layouts that were passed over since they are not faster than asked for.
        least_s: what it takes at least.
    """

    best: Entry | None = None
    passed: Candidate | None = None
    least_s: float = 0.0


class Race:
    """Times layouts of baselines.

    A layout is passed over where its lower bound says that it cannot be the best of any baseline that may use
    it, or, for baselines of which nothing timed fits, that it is not faster than asked for. So each baseline
    ends with the best of all its layouts, or with none.

    Args:
        faster_than: seconds of an iteration.
        tell: told how far it is.
    """

    def __init__(self, faster_than: float, tell: Progress | None) -> None:
        #: One for each job that layouts are of.
        self._judges: dict[int, Judge] = {}
        self._faster_than = faster_than
        self._tell = tell or (lambda _what, _done, _of: None)
        self.standings: dict[str, Standing] = {}

    @property
    def trials(self) -> int:
        """Layouts that were timed."""
        return sum(judge.trials for judge in self._judges.values())

    def run(self, candidates: Sequence[Candidate]) -> None:
        """Find the best of each baseline."""
        floors: dict[int, Floor] = {}
        for one in candidates:
            if id(one.fleet) not in floors:
                floors[id(one.fleet)] = Floor(one.fleet)
        least = [floors[id(one.fleet)].seconds(one.layouts) * (1 - _ROUNDING) for one in candidates]
        for done, number in enumerate(sorted(range(len(candidates)), key=lambda number: least[number])):
            self._tell("baselines", done, len(candidates))
            if self._may_win(candidates[number], least[number]):
                self._time(candidates[number])

    def _time(self, candidate: Candidate) -> None:
        """The layout with each window that may be its best."""
        least = 0.0
        for window in _windows(candidate.layouts):
            if window > 1 and not self._may_win(candidate, least):
                return
            fleet = candidate.fleet
            judge = self._judges.setdefault(id(fleet.job), Judge(fleet))
            trial = judge.try_out(fleet, candidate.layouts, window)
            self._enter(Entry(candidate, trial))
            if not trial.fits:
                return  # a larger window takes more memory
            least = max(least, _without_exchange(trial) * (1 - _ROUNDING))
            if least >= trial.iteration_s * (1 - 2 * _ROUNDING):
                return  # nothing left that a window could hide

    def _enter(self, entry: Entry) -> None:
        for name in entry.candidate.texts:
            standing = self.standings[name]
            if standing.passed is not None:
                continue  # it might be the best of those timed only
            if standing.best is None or entry.trial.order < standing.best.trial.order:
                standing.best = entry

    def _may_win(self, candidate: Candidate, least_s: float) -> bool:
        """Whether the layout may be the best of a baseline."""
        wins = False
        for name in candidate.texts:
            standing = self.standings.setdefault(name, Standing())
            if standing.best is not None and standing.best.trial.fits:
                wins |= least_s < standing.best.trial.iteration_s
            elif least_s < self._faster_than:
                wins = True
            elif standing.passed is None:
                standing.passed, standing.least_s = candidate, least_s
        return wins


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
