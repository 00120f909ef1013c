"""Plans for models with layers that have a state, or have one part only."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megatron_hexi.cost import Job, estimate, read_model
from megatron_hexi.cost.layer_kinds import State
from megatron_hexi.errors import HexiError
from megatron_hexi.options.refusals import find_refused
from megatron_hexi.plan import validate_plan
from megatron_hexi.planner import CHOSEN, Request, find_plan
from megatron_hexi.planner.baselines import find_baselines
from megatron_hexi.planner.trainable import trained_request
from megatron_hexi.report.layer_names import kind_names
from tests.support.costs import TINY, cluster, tiny_job

MAMBA, DELTA = State("mamba", 12, 64, 2, 32), State("delta", 8, 64, 4, 48)
MODELS = {
    "hybrid": replace(TINY, layers=6, pattern="*-*-*-"),
    "mamba": replace(TINY, layers=6, state=MAMBA, pattern="M-M*-M"),
    "delta": replace(TINY, layers=4, state=replace(DELTA, layers=(True, True, True, False))),
}
KNOWN = cluster([("a", "PLAIN", 2), ("b", "DOUBLE", 2)])


@pytest.fixture
def trained(monkeypatch):
    """Training takes delta nets in every plan, whatever it takes today."""

    def refused(args, kind):
        option = find_refused(args, kind)
        return None if option and option.option == "--experimental-attention-variant" else option

    monkeypatch.setattr("megatron_hexi.planner.trainable.find_refused", refused)


@pytest.mark.parametrize("kind", MODELS)
def test_a_plan_is_one_that_trains_and_no_slower_than_megatrons_flags(kind, trained):
    job = tiny_job(model=MODELS[kind], global_batch_size=4)
    planned = find_plan(Request(job), KNOWN, with_baselines=True)
    plan = planned.plan
    validate_plan(plan)
    if job.model.state is not None:
        assert all(len(stage.domain.groups) == 1 for stage in plan.stages)
    if job.model.pattern:
        assert plan.is_repeated
        assert planned.job.pipeline_parallel == 1
    seconds = estimate(plan, planned.job, KNOWN).iteration_s
    assert planned.bound.iteration_s <= seconds * (1 + 1e-9)
    timed = {one.name: one.trial.iteration_s for one in planned.baselines if one.trial is not None}
    assert {"ulysses", "usp", "proportion"} <= timed.keys()
    assert all(seconds <= other * (1 + 1e-9) for other in timed.values())


@pytest.mark.parametrize("kind", ["mamba", "delta"])
def test_baselines_have_one_group_or_say_why_there_is_none(kind, trained):
    request = trained_request(Request(tiny_job(model=MODELS[kind]), frozenset({"data_parallel"})))
    found = {one.name: one for one in find_baselines(request, KNOWN)[0]}
    if MODELS[kind].pattern:  # one stage of all ranks, of which a ring makes a group each
        assert "a state passes between no groups" in found["ring"].why_not
    for name in ("ring", "ulysses", "usp", "te-a2a+p2p", "proportion"):
        trial = found[name].trial
        if trial is not None:
            domains = [replica.domain for replica in trial.plan.replicas]
            assert all(len(domain.groups) == 1 for domain in domains)
    assert found["ulysses"].trial is not None


def test_a_hybrid_is_planned_in_one_stage_only():
    job = tiny_job(model=MODELS["mamba"], pipeline_parallel=2)
    said = "--pipeline-model-parallel-size 2: model tiny: --hybrid-layer-pattern does not work with stages"
    with pytest.raises(HexiError, match=said):
        find_plan(Request(job, frozenset({"pipeline_parallel"})), KNOWN)
    request = trained_request(Request(tiny_job(model=MODELS["mamba"])))
    assert request.fixed == {"pipeline_parallel"}
    assert set(request.rules.refused) >= {"unequal_stages", "ministages", "offload"}


def test_other_models_are_planned_as_before():
    request = Request(tiny_job())
    assert trained_request(request) is request


def test_experts_of_a_hybrid_are_refused_by_the_reason_of_training():
    model = replace(read_model("mixtral-8x7b"), pattern="*E" * 16)
    with pytest.raises(HexiError, match="model mixtral-8x7b: --hybrid-layer-pattern does not work with"):
        find_plan(Request(Job(model, 4096)), KNOWN)


def test_kinds_of_layers_have_names():
    assert kind_names(read_model("nemotron-h-8b")) == ("Mamba", "dense MLP", "full attention")
    assert kind_names(MODELS["delta"]) == ("gated delta net", "full attention")
    assert kind_names(MODELS["hybrid"]) == ("full attention", "dense MLP")
    experts = replace(read_model("qwen3-next-80b-a3b"), name="")
    assert kind_names(experts) == (
        "gated delta net and 512 experts",
        "full attention and 512 experts",
    )


LARGE = cluster(
    [
        ("h100-0", "H100-SXM-80GB", 8),
        ("h100-1", "H100-SXM-80GB", 8),
        ("a100-0", "A100-SXM-80GB", 8),
        ("a100-1", "A100-SXM-80GB", 8),
    ],
    bandwidth=25,
    latency=10,
)


def test_nemotron_h_is_planned_at_128k_with_its_sizes_fixed():
    job = Job(
        read_model("nemotron-h-8b"),
        131072,
        global_batch_size=32,
        tensor_parallel=2,
        data_parallel=4,
        recompute="full",
    )
    planned = find_plan(Request(job, frozenset(CHOSEN)), LARGE)
    work = {
        (replica.micro_batches, member.tokens, member.heads[1] - member.heads[0])
        for replica in planned.plan.replicas
        for member in replica.domain.members
    }
    assert len(planned.plan.replicas) == 4
    assert len(work) > 1  # GPUs of two speeds
    assert planned.bound.iteration_s <= planned.cost.iteration_s


@pytest.mark.slow
@pytest.mark.parametrize("name", ["nemotron-h-8b", "nemotron-h-56b", "qwen3-next-80b-a3b"])
def test_published_models_are_planned_at_128k(name, trained):
    planned = find_plan(Request(Job(read_model(name), 131072, global_batch_size=32)), LARGE)
    validate_plan(planned.plan)
    assert planned.cost.fits
    assert planned.bound.iteration_s <= planned.cost.iteration_s
