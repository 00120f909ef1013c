"""Plans for models with layers that have a state, or have one part only."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megatron_hexi.cluster import PlannerRules
from megatron_hexi.cost import estimate
from megatron_hexi.errors import HexiError
from megatron_hexi.kinds import DeltaNet, Experts, Mamba, ShortConv
from megatron_hexi.models import Job, read_model
from megatron_hexi.plan import validate_plan
from megatron_hexi.plan.units import rank_gpus
from megatron_hexi.planner import CHOSEN, Request, find_plan
from megatron_hexi.planner.baselines import find_baselines
from megatron_hexi.report.tables import kind_names
from tests.support.costs import TINY, cluster, tiny_job

MAMBA, DELTA = Mamba(12, 64, 2, 32), DeltaNet(8, 64, 4, 48)
MODELS = {
    "hybrid": replace(TINY, layers=6, pattern="*-*-*-"),
    "mamba": replace(TINY, layers=6, state=MAMBA, pattern="M-M*-M"),
    "delta": replace(TINY, layers=8, state=replace(DELTA, layers=(True, True, True, False) * 2)),
}
CONVOLUTION = replace(TINY, layers=6, short_conv=ShortConv(3), pattern="C-C-*-")
SPARSE = replace(TINY, layers=9, pattern="*E*-*E*E-", experts=Experts(4, 2, 2048))
KNOWN = cluster([("a", "PLAIN", 2), ("b", "DOUBLE", 2)])


@pytest.mark.parametrize("kind", [*MODELS, "convolution"])
def test_a_plan_is_one_that_trains_and_no_slower_than_megatrons_flags(kind):
    job = tiny_job(model=MODELS.get(kind, CONVOLUTION), global_batch_size=4)
    planned = find_plan(Request(job), KNOWN, with_baselines=True)
    plan = planned.plan
    validate_plan(plan)
    if job.model.state is not None:
        assert all(len(stage.domain.groups) == 1 for stage in plan.stages)
    seconds = estimate(plan, planned.job, KNOWN).iteration_s
    assert planned.bound.iteration_s <= seconds * (1 + 1e-9)
    timed = {one.name: one.trial.iteration_s for one in planned.baselines if one.trial is not None}
    assert {"ulysses", "usp", "proportion"} <= timed.keys()
    assert all(seconds <= other * (1 + 1e-9) for other in timed.values())


@pytest.mark.parametrize("kind", ["mamba", "delta"])
def test_baselines_have_one_group_or_say_why_there_is_none(kind):
    one_stage = frozenset({"data_parallel", "tensor_parallel", "pipeline_parallel"})
    found = {
        one.name: one for one in find_baselines(Request(tiny_job(model=MODELS[kind]), one_stage), KNOWN)[0]
    }
    assert "a state passes between no groups" in found["ring"].why_not  # which makes a group of each rank
    for name in ("ring", "ulysses", "usp", "te-a2a+p2p", "proportion"):
        trial = found[name].trial
        if trial is not None:
            domains = [replica.domain for replica in trial.plan.replicas]
            assert all(len(domain.groups) == 1 for domain in domains)
    assert found["ulysses"].trial is not None


@pytest.mark.parametrize("model", [*MODELS.values(), SPARSE], ids=[*MODELS, "sparse"])
def test_layers_are_cut_into_stages_by_the_speeds_of_gpus(model):
    pair = cluster([("a", "PLAIN", 1), ("b", "DOUBLE", 1)])
    job = tiny_job(model=model, global_batch_size=8, pipeline_parallel=2)
    fixed = frozenset({"data_parallel", "pipeline_parallel", "tensor_parallel", "micro_batch_size"})
    whole = PlannerRules(ministages=False)  # interleaved, stages may share the layers otherwise
    plan = find_plan(Request(job, fixed, context_parallel=1, rules=whole), pair).plan
    validate_plan(plan)
    (replica,) = plan.replicas
    layers = [stop - start for start, stop in (stage.layers or (0, 0) for stage in replica.stages)]
    names = [
        pair.ranks[rank_gpus(plan, 2)[stage.domain.members[0].lead]].device.name for stage in replica.stages
    ]
    assert sorted(names) == ["DOUBLE", "PLAIN"]
    assert layers[names.index("DOUBLE")] > layers[names.index("PLAIN")]


def test_chunks_are_not_planned_with_a_pattern():
    job = tiny_job(model=MODELS["mamba"], global_batch_size=4)
    assert Request(job).chunk_counts(replace(job, pipeline_parallel=2)) == [1]
    with pytest.raises(HexiError, match="a pattern's layers are not cut into chunks"):
        Request(job, virtual_stages=3)


def test_layers_are_refused_by_the_reason_of_training():
    model = replace(MODELS["delta"], mtp_layers=1)
    with pytest.raises(HexiError, match="model tiny: --mtp-num-layers does not work with --hexi-plan"):
        find_plan(Request(tiny_job(model=model)), KNOWN)


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
def test_published_models_are_planned_at_128k(name):
    planned = find_plan(Request(Job(read_model(name), 131072, global_batch_size=32)), LARGE)
    validate_plan(planned.plan)
    assert planned.cost.fits
    assert planned.bound.iteration_s <= planned.cost.iteration_s
