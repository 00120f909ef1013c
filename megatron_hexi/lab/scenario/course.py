"""The course of a job under each policy: iterations done, lost and repeated while the cluster changes."""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from megatron_hexi.cluster import Cluster
from megatron_hexi.cost.arrays import Floats
from megatron_hexi.lab.scenario.candidate_plans import AS_THE_FILE_SAYS, PlacedPlan, Plans
from megatron_hexi.lab.scenario.events import Event, Period, find_periods
from megatron_hexi.lab.scenario.scenario_model import Recovery, Replanning, Scenario
from megatron_hexi.models import Job
from megatron_hexi.plan import Plan
from megatron_hexi.planner import Request
from megatron_hexi.replan.planning.advisor import KEPT, Advisor


@dataclass(frozen=True)
class CoursePiece:
    """A time of constant tokens/s, in seconds since the start; 0 tokens/s: nothing is trained."""

    begin_s: float
    end_s: float
    tokens_per_s: float


@dataclass(frozen=True)
class Course:
    """The result of a policy.

    Args:
        iterations: iterations done and kept at the end, with the part of the current one.
        lost_iterations: iterations since the last checkpoint that were lost with a node.
    """

    policy: str
    iterations: float
    lost_iterations: float
    restarts: int
    swaps: int
    pieces: tuple[CoursePiece, ...]

    @property
    def stopped_s(self) -> float:
        """Seconds without training: no plan for the remaining nodes, restarts, swaps."""
        return sum(piece.end_s - piece.begin_s for piece in self.pieces if not piece.tokens_per_s)


class Runner(ABC):
    """A job under a policy, with whole iterations and the part of the current one."""

    policy: str

    def __init__(self, plans: Plans, recovery: Recovery) -> None:
        self.plans, self._recovery = plans, recovery
        self.placed: PlacedPlan | None = plans.given
        self.clock_s = 0.0
        self.iteration, self.part = 0, 0.0
        self._saved = 0
        self._ready_s = 0.0  # when the job trains again
        self._lost = 0.0
        self.restarts = self.swaps = 0
        self._pieces: list[CoursePiece] = []

    @abstractmethod
    def choose(self, period: Period) -> PlacedPlan | None:
        """Return the plan to go on with when conditions change; another than the present means a restart."""

    def train(self, period: Period) -> None:
        """Train until the next decision; at most until the conditions change."""
        self.run_until(period.end_s, period)

    def begun(self) -> None:  # noqa: B027 - most have nothing to note
        """React to a start of the job with another plan; nothing unless a subclass overrides it."""

    def go_through(self, period: Period) -> None:
        """Run through a period."""
        if self.placed is not None and self.placed.nodes & period.conditions.lost:
            self._lose()
        chosen = self.choose(period)
        if chosen is not None and chosen is not self.placed:
            if self.placed is not None:  # stopped with a checkpoint, after an iteration
                self._lost += self.part
                self._saved, self.part = self.iteration, 0.0
            self.placed = chosen
            self.restarts += 1
            self._ready_s = period.begin_s + self._recovery.restart
            self.begun()
        while self.clock_s < period.end_s:
            ready = min(self._ready_s, period.end_s) if self.placed is not None else period.end_s
            if self.clock_s < ready:
                self._pass(ready, 0.0)
            else:
                self.train(period)

    def run_until(self, end_s: float, period: Period) -> int:
        """Train until a time under the present plan, and return the number of iterations that ended."""
        assert self.placed is not None
        seconds = self.plans.pace(self.placed, period.conditions).seconds
        iterations = self.part + (end_s - self.clock_s) / seconds
        whole = int(iterations)
        self.iteration += whole
        self.part = iterations - whole
        self._pass(end_s, self.plans.tokens / seconds)
        return whole

    def end_iteration(self, period: Period) -> float:
        """Train until the current iteration or the period ends; return the part of an iteration trained."""
        assert self.placed is not None
        seconds = self.plans.pace(self.placed, period.conditions).seconds
        remaining = 1 - self.part
        end = self.clock_s + remaining * seconds
        if end > period.end_s:
            before = self.part
            whole = self.run_until(period.end_s, period)
            return whole + self.part - before
        self.iteration, self.part = self.iteration + 1, 0.0
        self._pass(end, self.plans.tokens / seconds)
        return remaining

    def finished(self) -> Course:
        """Return the result."""
        iterations = self.iteration + self.part
        return Course(self.policy, iterations, self._lost, self.restarts, self.swaps, tuple(self._pieces))

    def _lose(self) -> None:
        """Lose nodes of the job, with its iterations since the last checkpoint."""
        every = self._recovery.checkpoint_every
        self._saved = max(self._saved, self.iteration // every * every)
        self._lost += self.iteration + self.part - self._saved
        self.iteration, self.part = self._saved, 0.0
        self.placed = None

    def _pass(self, until_s: float, tokens_per_s: float) -> None:
        add_piece(self._pieces, CoursePiece(self.clock_s, until_s, tokens_per_s))
        self.clock_s = until_s


def add_piece(pieces: list[CoursePiece], piece: CoursePiece) -> None:
    """Append a piece; pieces of equal tokens/s are joined."""
    if pieces and pieces[-1].tokens_per_s == piece.tokens_per_s:
        piece = replace(piece, begin_s=pieces.pop().begin_s)
    pieces.append(piece)


#: Callback: receives the number of periods done and their total.
Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class PlayedScenario:
    """A scenario, and the result of each policy.

    Args:
        undisturbed_s: seconds of an iteration of the given plan without events.
    """

    lasts_s: float
    events: tuple[Event, ...]
    tokens: int
    undisturbed_s: float
    courses: tuple[Course, ...]

    def goodput(self, course: Course) -> float:
        """Return tokens/s of kept iterations, over all of the time."""
        return course.iterations * self.tokens / self.lasts_s

    @property
    def undisturbed_tokens_per_s(self) -> float:
        """Tokens/s of the given plan without events."""
        return self.tokens / self.undisturbed_s


def play_scenario(
    scenario: Scenario,
    events: Sequence[Event],
    plan: Plan,
    job: Job,
    request: Request,
    cluster: Cluster,
    progress: Progress | None = None,
) -> PlayedScenario:
    """Simulate a scenario under each policy: static, re-planning, oracle.

    Between two events conditions are constant, and iterations take the cost model's time for the current
    plan.

    Raises:
        HexiError: the plan is not for this cluster or job.
    """
    plans = Plans(plan, job, request, cluster)
    periods = find_periods(events, scenario.lasts)
    played = itertools.count(1)

    def watched() -> Iterator[Period]:
        for period in periods:
            yield period
            if progress is not None:
                progress(next(played), 3 * len(periods))

    courses = []
    runners: tuple[Runner, ...] = (
        StaticRunner(plans, scenario.recovery),
        ReplanningRunner(plans, scenario.recovery, scenario.replanning),
    )
    for runner in runners:
        for period in watched():
            runner.go_through(period)
        courses.append(runner.finished())
    courses.append(best_course(plans, watched()))  # last: it may use any plan of the others
    undisturbed = plans.pace(plans.given, AS_THE_FILE_SAYS).seconds
    return PlayedScenario(scenario.lasts, tuple(events), plans.tokens, undisturbed, tuple(courses))


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
        self._ready_s = self.clock_s + self._settings.swap
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
