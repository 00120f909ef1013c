"""What saves memory: layouts that fit where none did, none slower, all of them valid and as judged."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.proof import joint_bound
from megatron_hexi.cost import CostModel
from megatron_hexi.errors import NothingFitsError
from megatron_hexi.plan import read_plan, validate_plan, write_plan
from megatron_hexi.planner import Request, find_plan
from megatron_hexi.planner import planner as planner_module
from megatron_hexi.planner.joint import Candidate, JointSearches
from megatron_hexi.planner.saved_plans import SavedPlans
from megatron_hexi.planner.savings import Savings, least_seconds, spell_savings
from tests.support.costs import TINY, cluster, tiny_job

DEEP = replace(TINY, layers=8, hidden_size=4096, ffn_hidden_size=16384)
NETWORK = 25


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
    plans, saved = [], SavedPlans.best

    def told(self, plan, found):
        plans.append(plan)
        return saved(self, plan, found)

    monkeypatch.setattr(SavedPlans, "best", told)
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
    if planned.cost.iteration_s < plan.iteration_s:
        assert any(options(planned.plan).values())
        assert planned.notes[0].startswith(spell_savings(planned.plan))


def test_no_variant_is_faster_than_the_least_time_says(monkeypatch):
    told, changed = [], Savings._with_option

    def with_option(self, base, ministages, option):
        candidate = changed(self, base, ministages, option)
        told.append((least_seconds(base, ministages), candidate.iteration_s))
        return candidate

    monkeypatch.setattr(Savings, "_with_option", with_option)
    monkeypatch.setattr("megatron_hexi.planner.savings.least_seconds", lambda base, ministages: 0.0)
    find_plan(request_for(), machines(24))
    assert any(least > 0.8 * seconds for least, seconds in told)
    assert all(least <= seconds for least, seconds in told)


def test_where_there_is_room_nothing_is_saved_and_little_tried():
    known, request = machines(80), request_for(seq_length=32768)
    found = JointSearches(lambda *_: None).plans(request, known, 1.0)
    plan = min(found, key=lambda one: one.order)
    savings = Savings(request, known)
    assert savings.best(plan) is plan
    assert savings.trials <= 5


def test_state_goes_where_there_is_room():
    big, small = (f"H100-SXM-80GB, memory_gb: {memory}" for memory in (40, 20))
    known = cluster([("big", big, 1), ("small", small, 1)], NETWORK)
    request = request_for(pipeline_parallel=1, data_parallel=1)
    request = replace(request, fixed=frozenset({"pipeline_parallel", "data_parallel"}))
    start = find_plan(request, known.with_memory_margin(-1))
    base = Candidate(start.plan, start.job, CostModel(start.job, known).timing(start.plan))
    savings = Savings(request, known)
    written = savings._written_out(base)
    assert written is not None
    shared = savings._with_state(written)
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
