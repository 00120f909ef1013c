"""A scenario played under each policy."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from megatron_hexi.cluster import Cluster
from megatron_hexi.cost import Job
from megatron_hexi.lab.scenario.conditions import Stretch, find_stretches
from megatron_hexi.lab.scenario.course import Course, Runner
from megatron_hexi.lab.scenario.events import Event
from megatron_hexi.lab.scenario.model import Scenario
from megatron_hexi.lab.scenario.plans import AS_THE_FILE_SAYS, Plans
from megatron_hexi.lab.scenario.policies import ReplanningRunner, StaticRunner, best_course
from megatron_hexi.plan import Plan
from megatron_hexi.planner import Request

#: Told how many stretches of how many are played.
Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Played:
    """A scenario, and what each policy came to.

    Args:
        lasts_s: seconds.
        events: that happened.
        tokens: of an iteration.
        undisturbed_s: seconds of an iteration of the given plan without any event.
        courses: of the policies: static, re-planning, oracle.
    """

    lasts_s: float
    events: tuple[Event, ...]
    tokens: int
    undisturbed_s: float
    courses: tuple[Course, ...]

    def goodput(self, course: Course) -> float:
        """Tokens/s that are kept, over all of the time."""
        return course.iterations * self.tokens / self.lasts_s

    @property
    def undisturbed_tokens_per_s(self) -> float:
        """Of the given plan without any event."""
        return self.tokens / self.undisturbed_s


def play_scenario(
    scenario: Scenario,
    events: Sequence[Event],
    plan: Plan,
    job: Job,
    request: Request,
    cluster: Cluster,
    progress: Progress | None = None,
) -> Played:
    """Play a scenario under each policy: static, re-planning, oracle.

    Between two events everything is steady, and iterations take what the cost model says of the plan in
    force.

    Args:
        scenario: what happens, and what it costs.
        events: of it, in the order in which they begin.
        plan: that the job begins with.
        job: of the plan.
        request: what other plans are asked for.
        cluster: as its file says.
        progress: told how far it is.

    Raises:
        HexiError: the plan is not for this cluster or job.
    """
    plans = Plans(plan, job, request, cluster)
    stretches = find_stretches(events, scenario.lasts)
    total, played = 3 * len(stretches), 0

    def watched() -> Iterator[Stretch]:
        nonlocal played
        for stretch in stretches:
            yield stretch
            played += 1
            if progress is not None:
                progress(played, total)

    courses = []
    runners: tuple[Runner, ...] = (
        StaticRunner(plans, scenario.recovery),
        ReplanningRunner(plans, scenario.recovery, scenario.replanning),
    )
    for runner in runners:
        for stretch in watched():
            runner.go_through(stretch)
        courses.append(runner.finished())
    courses.append(best_course(plans, watched()))  # last: it may take any plan that others had
    undisturbed = plans.pace(plans.given, AS_THE_FILE_SAYS).seconds
    return Played(scenario.lasts, tuple(events), plans.tokens, undisturbed, tuple(courses))
