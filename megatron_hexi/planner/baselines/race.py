"""Finds the best layout of each baseline; times only layouts whose lower bound allows them to be the best."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import inf

from megatron_hexi.planner.baselines.floor import Floor
from megatron_hexi.planner.baselines.rules import BaselineLayouts
from megatron_hexi.planner.layouts.layout import Layout
from megatron_hexi.planner.layouts.trial import Judge, Progress, Trial

#: Prefetch depths of the exchange that are tried, in steps.
WINDOWS = (1, 2, 4)
#: Tolerance for rounding in a lower bound, as a part of it.
_ROUNDING = 1e-9


@dataclass(frozen=True, eq=False)
class TimedLayouts:
    """Layouts of all replicas for some baselines, and their timed plan."""

    candidate: BaselineLayouts
    trial: Trial


class BaselineSearch:
    """Finds the best layout of each baseline by the cost model.

    A layout is timed only if its lower bound is below the best time of a baseline that may use the layout, or
    below `faster_than` while no layout of that baseline fits. The time of a layout with less recomputation is
    a lower bound of the same layout with more. A layout that fits in memory with less recomputation is not
    tried with more.

    Args:
        faster_than: seconds of an iteration that layouts must beat; infinite: no limit.
        progress: callback, receives (phase, done, total).
    """

    def __init__(self, faster_than: float, progress: Progress | None) -> None:
        #: The judge of each job, by the job's id.
        self._judges: dict[int, Judge] = {}
        self._faster_than = faster_than
        self._progress = progress or (lambda _what, _done, _of: None)
        #: Lower bounds of layouts' seconds with more recomputation than was timed.
        self._least: dict[tuple[object, ...], float] = {}
        #: Lower bounds of layouts' seconds in any number of chunks, from one that was timed.
        self._busiest: dict[tuple[object, ...], float] = {}
        #: The best layouts of each baseline, which fit if any do.
        self.best: dict[str, TimedLayouts] = {}

    @property
    def trials(self) -> int:
        """Number of layouts that were timed."""
        return sum(judge.trials for judge in self._judges.values())

    def run(self, entrants_by_fleet: Iterable[Sequence[BaselineLayouts]]) -> None:
        """Find the best layout of each baseline over several fleets.

        Args:
            entrants_by_fleet: each fleet's layouts, fleets with less recomputation first.
        """
        entrants: list[tuple[float, bool, BaselineLayouts]] = []
        for candidates in entrants_by_fleet:
            if not candidates:
                continue
            floor = Floor(candidates[0].fleet, [each.layouts for each in candidates])
            seconds = floor.seconds() * (1 - _ROUNDING)
            entrants += (
                entrant
                for entrant in zip(seconds.tolist(), floor.may_fit().tolist(), candidates, strict=True)
                if entrant[0] < inf and (entrant[1] or self._faster_than == inf)
            )
        entrants.sort(key=lambda entrant: entrant[0])
        for done, (least, has_room, layouts) in enumerate(entrants):
            self._progress("layouts of Megatron's flags", done, len(entrants))
            key = layouts.fleet.units, layouts.layouts, layouts.fleet.job.virtual_stages
            least = max(least, self._least.get(key, 0.0), self._busiest.get(key[:2], 0.0))
            # A layout that does not fit is of interest only if none does.
            nothing_fits = any(self._limit(name) == inf for name in layouts.texts)
            if self._may_win(layouts, least) and (has_room or nothing_fits):
                self._least[key] = self._time(layouts, least)

    def _time(self, candidate: BaselineLayouts, least_s: float) -> float:
        """Time a layout with each promising prefetch window; return a lower bound with more recomputation."""
        fleet = candidate.fleet
        judge = self._judges.setdefault(id(fleet.job), Judge(fleet, in_steps=False))
        for window in _windows(candidate.layouts):
            if window > 1 and not self._may_win(candidate, least_s):
                return least_s
            trial = judge.try_out(fleet, candidate.layouts, window)
            busiest_s = _of_busiest_stage(trial) * (1 - _ROUNDING)
            if fleet.job.model.is_uniform:  # else each number of chunks gives a stage other layers
                self._busiest[fleet.units, candidate.layouts] = busiest_s
            if not self._may_win(candidate, busiest_s):
                return max(least_s, busiest_s)  # before its passes are timed, which takes longest
            self._enter(TimedLayouts(candidate, trial))
            least_s = max(least_s, _without_exchange(trial) * (1 - _ROUNDING))
            if not trial.fits:
                return least_s  # a larger window takes more memory
            if least_s >= trial.iteration_s * (1 - 2 * _ROUNDING):
                break  # nothing left that a window could hide
        return inf

    def _enter(self, entry: TimedLayouts) -> None:
        for name in entry.candidate.texts:
            best = self.best.get(name)
            if best is None or entry.trial.order < best.trial.order:
                self.best[name] = entry

    def _may_win(self, candidate: BaselineLayouts, least_s: float) -> bool:
        """Whether the layout may be the best of a baseline."""
        return any(least_s < self._limit(name) for name in candidate.texts)

    def _limit(self, name: str) -> float:
        best = self.best.get(name)
        return best.trial.iteration_s if best is not None and best.trial.fits else self._faster_than


def _windows(layouts: Sequence[Layout]) -> Iterator[int]:
    """Yield the prefetch windows to try: up to the first that covers all steps of the exchange."""
    steps = max(len(layout.parts) for layout in layouts) - 1
    reached = 0
    for window in WINDOWS:
        if window == 1 or reached < steps:
            yield window
        reached = window


def _without_exchange(trial: Trial) -> float:
    """Return the seconds of an iteration without exposed exchange: a lower bound for every window.

    A shorter pass hides less of the gradients' messages, but runs at least as often as these are sent.
    """
    timing = trial.timing
    shown = (
        sum(stage.replicas[number].exchange for stage in timing.stages) * int(count)
        for number, count in enumerate(timing.micro_batches)
    )
    return trial.iteration_s - max(shown)


def _of_busiest_stage(trial: Trial) -> float:
    """Return the seconds that a replica's busiest stage works, without exposed exchange."""
    return max(
        pipeline.micro_batches * max(phases.total - phases.exchange for phases in pipeline.stage_phases)
        for pipeline in trial.timing.pipelines
    )
