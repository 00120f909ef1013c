"""Among plans that take about as long, the simplest is chosen and the fastest named beside it."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_hexi.cost import estimate
from megatron_hexi.models import Job, read_model
from megatron_hexi.plan import Replica, proportional_plan
from megatron_hexi.planner import Request, find_plan, planner
from megatron_hexi.planner.features import means_of
from megatron_hexi.planner.joint import Candidate
from megatron_hexi.planner.simplest import choose
from megatron_hexi.report.planned import choice_lines, layout_line, planned_dict
from tests.support.costs import cluster, tiny_job
from tests.support.fleets import read_text

#: On which the fastest plan uses ministages, and the best one without takes about half a per cent longer.
MIXED = """\
name: mixed
nodes:
- {name: h100, gpu: H100-SXM-80GB, gpus: 2}
- {name: a100, gpu: A100-SXM-80GB, gpus: 2}
network: {bandwidth_gb_s: 25}
"""
REQUEST = Request(Job(read_model("gpt-3b"), 131072, global_batch_size=16))
FOUR = cluster([("a", "PLAIN", 4)])
JOB = tiny_job()


def equal_plan(**changes):
    """A plan with equal shares for four GPUs, whose stage is changed."""
    plan = proportional_plan(JOB.workload(), [[[1, 1, 1, 1]]])
    (stage,) = plan.stages
    return replace(plan, replicas=(Replica((replace(stage, **changes),)),))


TWICE = proportional_plan(JOB.workload(), [[[1, 1]], [[1, 1]]])
STAGED = {"layers": (0, JOB.model.layers)}


@pytest.mark.parametrize(
    ("plan", "means"),
    [
        (equal_plan(), ()),
        (equal_plan(**STAGED), ("stages with layers of their own",)),
        (
            equal_plan(**STAGED, ministages=2, offload=("parameters",)),
            ("host memory", "ministages", "stages with layers of their own"),
        ),
        (proportional_plan(JOB.workload(), [[[2, 2, 1, 1]]]), ("unequal shares of sequences",)),
        (
            replace(
                TWICE,
                replicas=tuple(replace(one, micro_batches=n) for n, one in enumerate(TWICE.replicas, 1)),
            ),
            ("unequal replicas",),
        ),
        (
            replace(proportional_plan(JOB.workload(), [[[1, 1, 1]]]), gpus=(0, 1, 2)),
            ("unequal shares of sequences", "1 GPU left out"),
        ),
        (replace(proportional_plan(JOB.workload(), [[[1]]]), gpus=(2,)), ("3 GPUs left out",)),
    ],
)
def test_means_in_words(plan, means):
    assert means_of(plan, FOUR) == means


def candidate(seconds, plan):
    """A plan that takes so many seconds."""
    timing: Any = SimpleNamespace(phases=SimpleNamespace(total=seconds))
    return Candidate(plan, JOB, timing)


PLAIN, UNEQUAL = equal_plan(), proportional_plan(JOB.workload(), [[[2, 2, 1, 1]]])
HOSTED = equal_plan(**STAGED, ministages=2, offload=("parameters",))


@pytest.mark.parametrize(
    ("within", "chosen", "fastest", "simplest"),
    [
        (0.0, 100.0, None, None),
        (0.01, 100.9, 100.0, 104.0),
        (0.05, 104.0, 100.0, None),
    ],
)
def test_the_fewest_means_within_a_part_of_the_time(within, chosen, fastest, simplest):
    best = candidate(100.0, HOSTED)
    others = [
        candidate(s, p) for s, p in ((100.9, UNEQUAL), (100.95, UNEQUAL), (104.0, PLAIN), (106.0, PLAIN))
    ]
    choice = choose(best, others, FOUR, within)
    beside = [one and one.candidate.iteration_s for one in (choice.fastest, choice.simplest)]
    assert (choice.chosen.iteration_s, *beside) == (chosen, fastest, simplest)


def test_a_plan_with_as_many_means_is_no_reason_to_be_slower():
    best, other = candidate(100.0, UNEQUAL), candidate(100.5, equal_plan(**STAGED))
    choice = choose(best, [other], FOUR, 0.01)
    assert (choice.chosen, choice.fastest, choice.simplest) == (best, None, None)


def test_a_planned_job_is_simpler_and_at_most_that_much_slower():
    known = read_text(MIXED)
    fastest, simple = (find_plan(REQUEST, known, simpler_within=part) for part in (0.0, 0.01))
    assert fastest.choice is not None
    assert fastest.choice.fastest is None
    ratio = simple.cost.iteration_s / fastest.cost.iteration_s
    assert 1 < ratio <= 1.01
    assert len(means_of(simple.plan, known)) < len(means_of(fastest.plan, known))
    assert simple.choice is not None
    assert simple.choice.fastest is not None
    named = simple.choice.fastest.candidate
    assert named.iteration_s == fastest.cost.iteration_s
    assert estimate(named.plan, named.job, known).iteration_s == pytest.approx(fastest.cost.iteration_s)
    assert simple.plan.estimate is not None
    assert simple.plan.estimate.iteration_s == simple.cost.iteration_s
    (means, line) = choice_lines(simple)
    assert means == f"beyond Megatron's flags on all GPUs: {', '.join(means_of(simple.plan, known))}"
    assert line.startswith(f"faster: {layout_line(fastest.plan, fastest.job)}, with ")
    assert line.endswith(f"takes {1 - 1 / ratio:.1%} less time (--fastest)")
    assert all(rival.iteration_s >= simple.cost.iteration_s for rival in simple.rivals)
    told = planned_dict(simple, known)
    assert (told["simplest"], told["means"]) == (None, list(means_of(simple.plan, known)))
    assert told["fastest"]["iteration_s"] == fastest.cost.iteration_s
    assert told["fastest"]["means"] == list(means_of(fastest.plan, known))


@pytest.mark.parametrize("slow", ["DOUBLE", "PLAIN"])
def test_megatrons_flags_are_timed_again_for_gpus_of_one_kind(monkeypatch, slow):
    """The search alone leaves out layouts that cannot be the fastest."""
    known = cluster([("a", "DOUBLE", 3), ("b", slow, 3)], 50)
    request, limits = Request(tiny_job(seq_length=2**16)), []
    found = vars(planner)["find_faster"]

    def noted(request, cluster, faster_than, **more):
        limits.append(faster_than)
        return found(request, cluster, faster_than, **more)

    monkeypatch.setattr(planner, "find_faster", noted)
    fastest = find_plan(request, known)
    assert fastest.choice is not None
    assert fastest.choice.means
    searched = len(limits)
    planned = find_plan(request, known, simpler_within=0.05)
    assert planned.cost.iteration_s <= 1.05 * fastest.cost.iteration_s
    again = [1.05 * fastest.cost.iteration_s] if slow == "DOUBLE" else []
    assert limits[2 * searched :] == pytest.approx(again)
