"""Multi-token prediction with experts, as in DeepSeek-V3: weights, seconds, simulator and planner."""

import dataclasses
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_hexi.cost import CostModel, estimate
from megatron_hexi.cost.held_weights import HeldWeights
from megatron_hexi.cost.throughput import model_flops
from megatron_hexi.kinds import Latent
from megatron_hexi.lab.simulator import simulate
from megatron_hexi.mesh import Mesh, cell_size
from megatron_hexi.models import read_model
from megatron_hexi.plan import Domain, Plan, Replica, validate_plan
from megatron_hexi.planner import Request, find_plan
from tests.support.costs import cluster, tiny_job
from tests.support.expert_plans import expert_plan
from tests.support.plans import examples
from tests.unit.cost.test_experts import EXPERTS, FAST, MIXED, one_stage, workload

#: The last layer has experts, and so has a block of multi-token prediction.
FURTHER = dataclasses.replace(MIXED, mtp_layers=2)
LATENT = Latent(kv_rank=64, rotary_dim=16, value_dim=64, query_rank=96)
#: Of `one_stage` on three ranks.
TOKENS, HELD = (2000, 1000, 1096), ((0, 5), (5, 8), (8, 8))


def longer(model):
    """The model with layers in place of its multi-token prediction."""
    more = model.mtp_layers
    experts = dataclasses.replace(model.experts, layers=(*model.experts.layers, *[True] * more))
    return dataclasses.replace(model, layers=model.layers + more, experts=experts, mtp_layers=0)


def drawn_plan(model, seed, ranks):
    shape = dataclasses.replace(workload(model), tensor_parallel=0)
    return expert_plan(random.Random(seed), shape, 4, ranks, EXPERTS)


def staged(model, recompute):
    """Two ranks with the first layer, which is dense, and three with the others and all experts."""
    first = one_stage(model, (1500, 2596), ((0, 4), (4, 8))).replicas[0].stages[0]
    last = one_stage(model, TOKENS, HELD).replicas[0].stages[0]
    groups = tuple(
        dataclasses.replace(group, members=(dataclasses.replace(one, ranks=(one.lead + 2,)),))
        for group in last.domains[0].groups
        for one in group.members
    )
    stages = (
        dataclasses.replace(first, layers=(0, 1), recompute=recompute),
        dataclasses.replace(last, domains=(Domain(groups),), layers=(1, 3), recompute=recompute),
    )
    plan = Plan(workload(model), (Replica(stages, 4),))
    validate_plan(plan)
    return plan


@given(st.integers(0, 10**6), st.integers(2, 8), st.integers(1, 3), st.booleans())
@examples(30)
def test_each_weight_has_one_owner(seed, ranks, predictions, is_latent):
    model = dataclasses.replace(MIXED, mtp_layers=predictions)
    if is_latent:
        model = dataclasses.replace(model, kv_heads=model.heads, latent=LATENT)
    plan = drawn_plan(model, seed, ranks)
    weights = HeldWeights(tiny_job(model=model), Mesh(plan, 4, True))
    owned = {"experts": 0.0, "other": 0.0}
    for bucket, _ in weights.buckets():
        for slab in bucket.slabs:
            kind = "experts" if slab.key.startswith("experts") else "other"
            owned[kind] += cell_size(slab.cell) * weights.density[slab.key, weights.width[slab.owner]]
    routed = (2 + predictions) * EXPERTS * model.expert_params()
    assert owned["experts"] == pytest.approx(routed)
    if max(weights.width) == 1:  # wider units hold copies of norms, counted with what is cut
        assert owned["other"] == pytest.approx(model.total_params + model.mtp_params - routed)


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_a_block_takes_as_long_as_a_layer_with_experts(recompute):
    nodes = cluster([("a", "PLAIN", 2), ("b", "DOUBLE", 1)], 10)

    def timed(model):
        plan = one_stage(model, TOKENS, HELD)
        stages = tuple(dataclasses.replace(stage, recompute=recompute) for stage in plan.replicas[0].stages)
        plan = dataclasses.replace(plan, replicas=(dataclasses.replace(plan.replicas[0], stages=stages),))
        timing = CostModel(tiny_job(model=model), nodes).timing(plan)
        return timing.stages[0], timing.memory[0]

    (found, memory), (more, its_memory) = timed(FURTHER), timed(longer(FURTHER))
    assert [float(np.max(count)) for count in found.counts] == [1, 4]
    assert [float(np.max(count)) for count in found.counts] == [float(np.max(n)) for n in more.counts]
    seconds, as_layers = (one.replicas[0].total - one.replicas[0].logits for one in (found, more))
    assert seconds == pytest.approx(as_layers)
    assert found.replicas[0].logits > 2 * more.replicas[0].logits
    # Beside the layers: a projection and three norms each; the last rank holds no experts.
    beside = 2 * FURTHER.prediction_params()
    assert memory["weights"] - its_memory["weights"] == pytest.approx(2 * beside)
    assert memory["attention"] == pytest.approx(its_memory["attention"])


@pytest.mark.parametrize("predictions", [1, 2])
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_the_simulator_takes_as_long_as_the_cost_model(recompute, predictions):
    model = dataclasses.replace(MIXED, mtp_layers=predictions)
    plan, job = staged(model, recompute), tiny_job(model=model, global_batch_size=4)
    nodes = cluster([("a", "PLAIN", 2), ("b", "DOUBLE", 3)], FAST)
    found, cost = simulate(plan, job, nodes), estimate(plan, job, nodes)
    assert found.iteration_s == pytest.approx(cost.iteration_s, rel=0.01)
    for rank, known in zip(found.ranks, cost.ranks, strict=True):
        assert rank.busy_s == pytest.approx(known.compute_s)


@pytest.mark.parametrize("name", ["deepseek-v3", "glm-4.5"])
def test_flops_have_the_active_experts_of_a_block(name):
    model = read_model(name)
    plain = dataclasses.replace(model, mtp_layers=0)
    last = model.kinds[model.kind_of_layers[-1]]
    assert last.experts is not None
    matrices = last.matrix_params() + last.experts.active * last.expert_params()
    matrices += 2 * model.hidden_size**2 + model.hidden_size * model.vocab_size
    attention = 6 * model.heads * (model.head_dim + model.value_dim) * 4096 / 2
    assert model.mtp_layers == 1
    assert model_flops(model, 4096) - model_flops(plain, 4096) == pytest.approx(6 * matrices + attention)


@pytest.mark.parametrize("fixed", [pytest.param({}, marks=pytest.mark.slow), {"pipeline_parallel": 2}])
def test_a_plan_is_never_slower_than_megatrons_flags_nor_faster_than_the_bound(fixed):
    nodes = cluster([("a", "PLAIN", 2), ("b", "DOUBLE", 2)])
    assert MIXED.experts is not None
    experts = dataclasses.replace(MIXED.experts, layers=(False, True, True, True))
    model = dataclasses.replace(FURTHER, layers=4, experts=experts)
    job = tiny_job(model=model, global_batch_size=8, **fixed)
    found = find_plan(Request(job, frozenset(fixed)), nodes, with_baselines=True)
    times = [one.trial.iteration_s for one in found.baselines if one.trial is not None]
    assert times
    assert found.cost.iteration_s <= min(times) * 1.002
    assert found.bound.iteration_s <= found.cost.iteration_s
    assert not found.plan.is_repeated
    plain = dataclasses.replace(job, model=dataclasses.replace(model, mtp_layers=0))
    assert find_plan(Request(plain, frozenset(fixed)), nodes).cost.iteration_s < found.cost.iteration_s
