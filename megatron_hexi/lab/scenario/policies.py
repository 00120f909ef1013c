"""What a job may do: keep its plan, follow the cluster by the advisor of training, or have the best plan."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from megatron_hexi.cost.arrays import Floats
from megatron_hexi.lab.scenario.conditions import Stretch
from megatron_hexi.lab.scenario.course import Course, Piece, Runner, add_piece
from megatron_hexi.lab.scenario.model import Recovery, Replanning
from megatron_hexi.lab.scenario.plans import AS_THE_FILE_SAYS, PlacedPlan, Plans
from megatron_hexi.replan.planning.advisor import Advisor
from megatron_hexi.replan.planning.history import KEPT


class StaticRunner(Runner):
    """The plan is kept. Where a node of it is lost, the job waits until all of them are back."""

    policy = "static"

    def choose(self, stretch: Stretch) -> PlacedPlan | None:
        """The given plan, where its nodes are there."""
        given = self.plans.given
        return None if given.nodes & stretch.conditions.lost else given


class ReplanningRunner(Runner):
    """The advisor of training follows the ranks' speeds; a lost node is a restart with a plan for the others.

    A node that is back is taken in, by a restart with a checkpoint, where that saves more than the threshold.

    Args:
        plans: of the job.
        recovery: what a lost node costs.
        replanning: how often the advisor is asked, and what a swap takes.
    """

    policy = "re-planning"
    _rows: list[Floats]  # of iterations that the advisor has not seen: each rank's seconds without waiting
    _busy: Floats  # likewise, of the iteration under way

    def __init__(self, plans: Plans, recovery: Recovery, replanning: Replanning) -> None:
        super().__init__(plans, recovery)
        self._how = replanning
        self._lost_before: frozenset[int] = frozenset()
        self.begun()

    def begun(self) -> None:
        """A job that was started has a new advisor, which knows nothing of its ranks."""
        self._advisor: Advisor | None = None
        placed = self.placed
        if placed is not None and placed.can_be_cut:
            how = self._how
            self._advisor = Advisor(placed.plan, placed.job, self.plans.cluster, how.threshold, how.interval)
        self._order: tuple[int, PlacedPlan] | None = None
        self._look_anew()
        self._skipped = False

    def choose(self, stretch: Stretch) -> PlacedPlan | None:
        """The planner's plan for the nodes that are there, where which these are has changed."""
        self._steady = 0
        lost, before = stretch.conditions.lost, self._lost_before
        self._lost_before = lost
        if self.placed is not None and lost == before:
            return self.placed
        found = self.plans.after_loss(lost)
        if found is None or self.placed is None:
            return found or self.placed
        present, other = (
            self.plans.pace(placed, AS_THE_FILE_SAYS).seconds for placed in (self.placed, found)
        )
        return found if present - other > self._how.threshold * present else self.placed

    def train(self, stretch: Stretch) -> None:
        """An iteration; or all of the time, where more of the same cannot change the advice."""
        assert self.placed is not None
        busy = self.plans.pace(self.placed, stretch.conditions).busy_s
        if self._advisor is None or self._steady > KEPT:
            whole = self.run_until(stretch.end_s, stretch)
            self._busy = self.part * busy if whole else self._busy + self.part * busy
            return
        self._busy = self._busy + self.end_iteration(stretch) * busy
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
        if self.iteration % self._how.interval or not self._rows:
            return
        rows, self._rows = self._rows, []
        if self._order is not None:  # what was measured meanwhile is not looked at
            return
        advice = advisor.advise(self.iteration, [list(one) for one in rows], self._how.swap)
        self._steady += len(rows)
        if advice.plan is not None:
            assert self.placed is not None
            self._order = self.iteration + self._how.reaction, self.plans.add(advice.plan, self.placed.job)
            self._steady = 0

    def _swap(self, advisor: Advisor, placed: PlacedPlan) -> None:
        """The running job goes on with another cut."""
        advisor.swapped(placed.plan)
        self.placed = placed
        self.swaps += 1
        self.stop_for(self._how.swap)
        self._look_anew()

    def _look_anew(self) -> None:
        """Samples of a plan start after its first iteration."""
        self._order = None
        self._rows, self._busy = [], np.zeros(1)
        self._steady = 0  # samples since conditions or the plan changed
        self._skipped = False


def best_course(plans: Plans, stretches: Iterable[Stretch]) -> Course:
    """At every time the best plan for what the cluster is like then: no notice, no restart, nothing lost."""
    done, pieces = 0.0, list[Piece]()
    for stretch in stretches:
        seconds = plans.best_seconds(stretch.conditions)
        pace = 0.0 if seconds is None else plans.tokens / seconds
        if seconds is not None:
            done += (stretch.end_s - stretch.begin_s) / seconds
        add_piece(pieces, Piece(stretch.begin_s, stretch.end_s, pace))
    return Course("oracle", done, 0.0, 0, 0, tuple(pieces))
