"""Policies of a job: keep its plan, re-plan as training does, or always have the best plan."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from megatron_hexi.cost.arrays import Floats
from megatron_hexi.lab.scenario.candidate_plans import AS_THE_FILE_SAYS, PlacedPlan, Plans
from megatron_hexi.lab.scenario.conditions import Period
from megatron_hexi.lab.scenario.course import Course, CoursePiece, Runner, add_piece
from megatron_hexi.lab.scenario.scenario_model import Recovery, Replanning
from megatron_hexi.replan.planning.advisor import Advisor
from megatron_hexi.replan.planning.history import KEPT


class StaticRunner(Runner):
    """A job that keeps its plan, and waits until all of its nodes are back after a failure."""

    policy = "static"

    def choose(self, period: Period) -> PlacedPlan | None:
        """Return the given plan if no node of it is lost."""
        given = self.plans.given
        return None if given.nodes & period.conditions.lost else given


class ReplanningRunner(Runner):
    """A job that is re-planned as in training, and restarts with a plan for the other nodes after a failure.

    When a node returns, the job restarts from a checkpoint to use it, if that saves more than the threshold.
    """

    policy = "re-planning"
    _rows: list[Floats]  # seconds of work of each rank, for iterations that the advisor has not seen
    _busy: Floats  # likewise, of the current iteration

    def __init__(self, plans: Plans, recovery: Recovery, replanning: Replanning) -> None:
        super().__init__(plans, recovery)
        self._settings = replanning
        self._lost_before: frozenset[int] = frozenset()
        self.begun()

    def begun(self) -> None:
        """Begin with a new advisor, which has no samples yet."""
        self._advisor: Advisor | None = None
        placed = self.placed
        if placed is not None and placed.can_be_cut:
            settings = self._settings
            self._advisor = Advisor(
                placed.plan, placed.job, self.plans.cluster, settings.threshold, settings.interval
            )
        self._order: tuple[int, PlacedPlan] | None = None
        self._look_anew()
        self._skipped = False

    def choose(self, period: Period) -> PlacedPlan | None:
        """Return the planner's plan for the present nodes, if these have changed."""
        self._steady = 0
        lost, before = period.conditions.lost, self._lost_before
        self._lost_before = lost
        if self.placed is not None and lost == before:
            return self.placed
        planned = self.plans.after_loss(lost)
        if planned is None or self.placed is None:
            return planned or self.placed
        present, next_s = (
            self.plans.pace(placed, AS_THE_FILE_SAYS).seconds for placed in (self.placed, planned)
        )
        return planned if present - next_s > self._settings.threshold * present else self.placed

    def train(self, period: Period) -> None:
        """Train an iteration; or until the conditions change, where more samples cannot change the advice."""
        assert self.placed is not None
        busy = self.plans.pace(self.placed, period.conditions).busy_s
        if self._advisor is None or self._steady > KEPT:
            whole = self.run_until(period.end_s, period)
            self._busy = self.part * busy if whole else self._busy + self.part * busy
            return
        self._busy = self._busy + self.end_iteration(period) * busy
        if self.part == 0:
            self._iteration_ended(self._advisor)

    def _iteration_ended(self, advisor: Advisor) -> None:
        row, self._busy = self._busy, np.zeros(1)
        if self._order is not None and self.iteration >= self._order[0]:
            self._swap(advisor, self._order[1])
            return
        if self._skipped:
            self._rows.append(row)
        self._skipped = True
        if self.iteration % self._settings.interval or not self._rows:
            return
        rows, self._rows = self._rows, []
        if self._order is not None:  # measurements before a swap are not used
            return
        advice = advisor.advise(self.iteration, [list(seconds) for seconds in rows], self._settings.swap)
        self._steady += len(rows)
        if advice.plan is not None:
            assert self.placed is not None
            self._order = (
                self.iteration + self._settings.reaction,
                self.plans.add(advice.plan, self.placed.job),
            )
            self._steady = 0

    def _swap(self, advisor: Advisor, placed: PlacedPlan) -> None:
        """Swap plans: continue with tokens and heads cut otherwise between the same units."""
        advisor.swapped(placed.plan)
        self.placed = placed
        self.swaps += 1
        self.stop_for(self._settings.swap)
        self._look_anew()

    def _look_anew(self) -> None:
        """Begin to collect samples, from the second iteration of a plan on."""
        self._order = None
        self._rows, self._busy = [], np.zeros(1)
        self._steady = 0  # samples since conditions or the plan changed
        self._skipped = False


def best_course(plans: Plans, periods: Iterable[Period]) -> Course:
    """Return the course of a job that always has the best plan, without restarts and losses."""
    iterations, pieces = 0.0, list[CoursePiece]()
    for period in periods:
        seconds = plans.best_seconds(period.conditions)
        pace = 0.0 if seconds is None else plans.tokens / seconds
        if seconds is not None:
            iterations += (period.end_s - period.begin_s) / seconds
        add_piece(pieces, CoursePiece(period.begin_s, period.end_s, pace))
    return Course("oracle", iterations, 0.0, 0, 0, tuple(pieces))
