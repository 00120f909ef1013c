"""Simulation of a scenario under each policy."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from megatron_hexi.cluster import Cluster
from megatron_hexi.lab.scenario.candidate_plans import AS_THE_FILE_SAYS, Plans
from megatron_hexi.lab.scenario.conditions import Period, find_periods
from megatron_hexi.lab.scenario.course import Course, Runner
from megatron_hexi.lab.scenario.events import Event
from megatron_hexi.lab.scenario.policies import ReplanningRunner, StaticRunner, best_course
from megatron_hexi.lab.scenario.scenario_model import Scenario
from megatron_hexi.models import Job
from megatron_hexi.plan import Plan
from megatron_hexi.planner import Request

#: Callback: receives the number of periods done and their total.
Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class PlayedScenario:
    """A scenario, and the result of each policy.

    Args:
        lasts_s: seconds of the scenario.
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

    Args:
        events: its events, in the order in which they begin.
        plan: the job's first plan.

    Raises:
        HexiError: the plan is not for this cluster or job.
    """
    plans = Plans(plan, job, request, cluster)
    periods = find_periods(events, scenario.lasts)
    total, played = 3 * len(periods), 0

    def watched() -> Iterator[Period]:
        nonlocal played
        for period in periods:
            yield period
            played += 1
            if progress is not None:
                progress(played, total)

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
