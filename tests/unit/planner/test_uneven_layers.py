"""Megatron's uneven pipelines as a baseline: what its flags can say, and nothing besides."""

from dataclasses import replace

import pytest

from megatron_hexi.cost import CostModel
from megatron_hexi.models import Job, read_model
from megatron_hexi.plan import validate_plan
from megatron_hexi.planner import Request, find_plan
from megatron_hexi.planner.baselines.race import best_uneven, spell_uneven
from tests.support.fleets import read_text

MIXED = """\
name: mixed
nodes:
- {name: h100, gpu: H100-SXM-80GB, gpus: 2}
- {name: l40s, gpu: L40S-48GB, gpus: 2}
network: {bandwidth_gb_s: 5}
"""
JOB = Job(read_model("gpt-3b"), 16384, global_batch_size=8)


def layers_of(plan):
    return [[stage.layers[1] - stage.layers[0] for stage in replica.stages] for replica in plan.replicas]


@pytest.fixture(
    scope="module",
    params=[
        {},
        {"pipeline_parallel": 3},
        *(pytest.param(one, marks=pytest.mark.slow) for one in ({"recompute": "full"}, {"data_parallel": 2})),
    ],
)
def found(request):
    known = read_text(MIXED)
    wanted = Request(replace(JOB, **request.param), frozenset(request.param))
    best, trials = best_uneven(wanted, known)
    assert best is not None
    assert trials > 1
    return known, wanted, best


def test_all_stages_have_the_same_flags(found):
    _, wanted, best = found
    stages = best.plan.stages
    assert len({len(stage.members) for stage in stages}) == 1
    assert len({len(member.ranks) for stage in stages for member in stage.members}) == 1
    assert len({stage.recompute for stage in stages}) == 1
    assert all(layers == layers_of(best.plan)[0] for layers in layers_of(best.plan))
    assert len({replica.micro_batches for replica in best.plan.replicas}) == 1
    for stage in stages:
        heads = {member.heads[1] - member.heads[0] for member in stage.members}
        tokens = {member.tokens for member in stage.members}
        assert len(heads) == 1
        assert max(tokens) - min(tokens) <= 1
    for name in wanted.fixed:
        values = {
            "pipeline_parallel": {len(replica.stages) for replica in best.plan.replicas},
            "recompute": {stage.recompute for stage in stages},
            "data_parallel": {len(best.plan.replicas)},
        }[name]
        assert values == {getattr(wanted.job, name)}


def test_it_is_a_valid_plan_that_fits_and_the_planner_s_is_no_slower(found):
    known, wanted, best = found
    validate_plan(best.plan)
    cost = CostModel(best.job, known).estimate(best.plan)
    assert cost.fits
    assert cost.iteration_s == pytest.approx(best.iteration_s)
    assert find_plan(wanted, known).cost.iteration_s <= best.iteration_s * (1 + 1e-9)


def test_layers_are_dealt_as_well_as_any_neighbouring_numbers():
    known = read_text(MIXED)
    best, _ = best_uneven(Request(replace(JOB, pipeline_parallel=2), frozenset({"pipeline_parallel"})), known)
    assert best is not None
    (layers,) = layers_of(best.plan)
    assert layers[0] != layers[1]
    model, (replica,) = CostModel(best.job, known), best.plan.replicas
    for shift in (-2, -1, 1, 2):
        first = layers[0] + shift
        stages = (
            replace(replica.stages[0], layers=(0, first)),
            replace(replica.stages[1], layers=(first, JOB.model.layers)),
        )
        other = model.timing(replace(best.plan, replicas=(replace(replica, stages=stages),)))
        assert not other.fits or other.phases.total >= best.iteration_s * (1 - 0.02)
    assert spell_uneven(best) == f"TP {best.job.tensor_parallel}, PP 2: {layers[0]}/{layers[1]} layers"


def test_one_stage_has_none():
    best, trials = best_uneven(Request(JOB, frozenset({"pipeline_parallel"})), read_text(MIXED))
    assert (best, trials) == (None, 0)
