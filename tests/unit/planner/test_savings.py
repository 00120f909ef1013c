"""What saves memory: layouts that fit where none did, none slower, all of them valid and as judged."""

from __future__ import annotations

import itertools
from dataclasses import replace
from functools import partial

import pytest

from benchmarks.proof import joint_bound
from benchmarks.simulation.cells import load_cluster, suite
from benchmarks.simulation.units import as_asked
from megatron_hexi.cost import CostModel
from megatron_hexi.errors import NothingFitsError
from megatron_hexi.plan import read_plan, validate_plan, write_plan
from megatron_hexi.planner import Request, find_plan
from megatron_hexi.planner import planner as planner_module
from megatron_hexi.planner.improve import Improvement
from megatron_hexi.planner.joint import Candidate, JointSearches
from megatron_hexi.planner.moves import Climb, MemoryMoves
from megatron_hexi.planner.moves.edit import with_members, with_options
from megatron_hexi.planner.notes import spell_savings
from tests.support.costs import TINY, cluster, tiny_job

DEEP = replace(TINY, layers=8, hidden_size=4096, ffn_hidden_size=16384)
NETWORK = 25
#: Cells of the suite with their sizes, and seconds that the best of other starts exceed.
SHORT_OF_MEMORY = (
    ("flops/flops-2-mixed/gpt-70b/256K/dp1", 4, 2, 166.0),
    ("simulation/sim-32/gpt-70b/128K/auto", 8, 1, 123.0),
    ("simulation/sim-64/gpt-70b/1M/auto", 8, 1, 3770.0),
)


def machines(memory_gb, *, host_gib=100, gpus=("H100-SXM-80GB", "A100-SXM-80GB"), size=2):
    """Nodes of some kinds of GPU with so much memory."""
    host = f"host: {{usable_gib: {host_gib}}}"
    return cluster(
        [(f"n{n}", f"{gpu}, memory_gb: {memory_gb}, {host}", size) for n, gpu in enumerate(gpus)], NETWORK
    )


def request_for(**terms):
    """A job of short sequences, all of it the planner's to choose."""
    return Request(tiny_job(model=DEEP, **({"seq_length": 4096, "global_batch_size": 8} | terms)))


def options(plan):
    """All that saves memory in a plan."""
    stages = plan.stages
    return {
        "ministages": any(stage.ministages for stage in stages),
        "offload": any(stage.offload for stage in stages),
        "state": len({member.state for member in plan.members}) > 1,
        "samples": any(len(stage.domains) > 1 for stage in stages),
    }


@pytest.fixture
def before(monkeypatch):
    """The plans that were found before anything was saved."""
    plans, improved = [], Improvement.best

    def told(self, request, plan, *others):
        plans.append(plan)
        return improved(self, request, plan, *others)

    monkeypatch.setattr(Improvement, "best", told)
    return plans


def check(planned, known, folder):
    """Valid as written and read, within memory by the cost model, no faster than the bound."""
    write_plan(planned.plan, folder / "plan.yaml")
    plan = read_plan(folder / "plan.yaml")
    validate_plan(plan)
    cost = CostModel(planned.job, known).estimate(plan)
    assert cost.fits
    assert cost.iteration_s == pytest.approx(planned.cost.iteration_s)
    assert joint_bound(Request(planned.job), known).iteration_s <= cost.iteration_s


@pytest.mark.parametrize("memory", [5, pytest.param(6, marks=pytest.mark.slow)])
def test_what_fits_on_no_layout_fits_with_ministages_or_host_memory(memory, tmp_path):
    known, request = machines(memory), request_for()
    planned = find_plan(request, known)
    check(planned, known, tmp_path)
    assert options(planned.plan)["ministages"] or options(planned.plan)["offload"]
    (note, *_) = planned.notes
    assert note == f"{spell_savings(planned.plan)}: without that no layout was found that fits"
    assert JointSearches(lambda *_: None).plans(request, known, 1.0) == []


@pytest.mark.slow
def test_without_room_on_the_host_nothing_is_offloaded(monkeypatch):
    monkeypatch.setattr(planner_module, "nothing_fits", lambda *_: NothingFitsError("nothing fits", {}))
    with pytest.raises(NothingFitsError):
        find_plan(request_for(), machines(5, host_gib=0.1))


@pytest.mark.parametrize("memory", [10, *(pytest.param(one, marks=pytest.mark.slow) for one in (8, 80))])
def test_no_plan_becomes_slower(memory, before, tmp_path):
    known = machines(memory)
    planned = find_plan(request_for(seq_length=8192), known)
    check(planned, known, tmp_path)
    (plan,) = before
    assert planned.cost.iteration_s <= plan.iteration_s
    if any(options(planned.plan).values()):  # else no more than fewer layers are computed again
        assert planned.notes[0].startswith(spell_savings(planned.plan))


def plans_for(request, known):
    """Plans of the joint search, the best first."""
    return sorted(JointSearches(lambda *_: None).plans(request, known, 1.0), key=lambda one: one.order)


@pytest.mark.parametrize("memory", [24, 10])
def test_no_variant_is_faster_than_the_least_time_says(memory):
    known, request = machines(memory), request_for()
    told = []
    for plan in plans_for(request, known):
        for move in MemoryMoves(request, known)(plan):
            for options in itertools.chain.from_iterable(map(rungs, move.ladders)):
                seconds = CostModel(move.job, known).timing(with_options(move.plan, options)).phases.total
                told.append(move.least[1] / seconds)
    assert max(told) <= 1
    assert any(part > 0.8 for part in told)


def rungs(ladder):
    """Yield the options of all stages, each with its first, its second and so on."""
    for number in range(max(map(len, ladder.values()), default=0)):
        yield {place: options[min(number, len(options) - 1)] for place, options in ladder.items()}


def climb_of(request, known):
    """A climb by moves of memory."""
    return Climb([MemoryMoves(request, known)], partial(CostModel, cluster=known))


def test_where_there_is_room_nothing_is_saved_and_little_tried():
    known, request = machines(80), request_for(seq_length=32768)
    plan = plans_for(request, known)[0]
    climb = climb_of(request, known)
    assert climb.best(plan, 100) is plan
    assert climb.trials <= 5


def test_a_climb_ends_with_its_timings_and_is_never_worse():
    known, request = machines(8), request_for(seq_length=8192)
    plan = plans_for(request, known)[-1]
    reached = []
    for most in (0, 1, 4, 100):
        climb = climb_of(request, known)
        reached.append(climb.best(plan, most).order)
        assert climb.trials < most + 9  # a move that has begun is settled
    assert reached[0] == plan.order
    assert reached == sorted(reached, reverse=True)
    assert reached[-1] < reached[0]


def test_state_goes_where_there_is_room():
    big, small = (f"H100-SXM-80GB, memory_gb: {memory}" for memory in (40, 20))
    known = cluster([("big", big, 1), ("small", small, 1)], NETWORK)
    request = request_for(pipeline_parallel=1, data_parallel=1)
    request = replace(request, fixed=frozenset({"pipeline_parallel", "data_parallel"}))
    start = find_plan(request, known.with_memory_margin(-1))
    base = Candidate(start.plan, start.job, CostModel(start.job, known).timing(start.plan))
    (move,) = (one for one in MemoryMoves(request, known)(base) if one.plan.members[0].state > 1)
    even = with_members(move.plan, lambda member: replace(member, state=1))
    model = CostModel(move.job, known)
    written, shared = (Candidate(plan, move.job, model.timing(plan)) for plan in (even, move.plan))
    assert shared.plan.members[0].state > shared.plan.members[1].state
    assert shared.timing.fullness < written.timing.fullness
    # Shares move state; they make none.
    state = [sum(terms["optimizer"].sum() for terms in one.timing.memory) for one in (written, shared)]
    assert state[0] == pytest.approx(state[1], rel=0.01)


def test_short_sequences_are_dealt_by_samples():
    nodes = [(name, gpu, 1) for name, gpu in (("a", "H100-SXM-80GB"), ("b", "L40S-48GB"))]
    known = cluster(nodes, NETWORK)
    request = request_for(seq_length=1024, global_batch_size=48, pipeline_parallel=1, data_parallel=1)
    request = replace(request, fixed=frozenset({"pipeline_parallel", "data_parallel"}))
    planned = find_plan(request, known)
    assert options(planned.plan)["samples"]
    (stage,) = planned.plan.replicas[0].stages
    fast, slow = (domain.samples or 0 for domain in stage.domains)
    assert fast > slow
    assert fast + slow == planned.job.micro_batch_size == planned.plan.job.micro_batch_size


@pytest.mark.parametrize(("cell", "tensor_parallel", "pipeline_parallel", "most_s"), SHORT_OF_MEMORY)
def test_plans_that_only_saving_memory_makes_fast_are_found(cell, tensor_parallel, pipeline_parallel, most_s):
    """Stages of one kind in interleaved ministages, replicas with state on the host, a single replica."""
    (asked,) = (one for one in suite() if one.name == cell)
    job = replace(asked.job, tensor_parallel=tensor_parallel, pipeline_parallel=pipeline_parallel)
    planned = find_plan(as_asked(job, asked.data_parallel), load_cluster(asked.cluster))
    assert planned.cost.iteration_s < most_s
