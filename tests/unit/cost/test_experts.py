"""Routed experts in the cost model: who holds which weights, rows by hand, messages and waits by hand."""

import dataclasses
import math
import random

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from megatron_hexi.cost import CostModel, estimate
from megatron_hexi.cost import experts as experts_module
from megatron_hexi.cost.compute import device_speeds
from megatron_hexi.cost.held_weights import HeldWeights
from megatron_hexi.errors import HexiError, PlanError
from megatron_hexi.kinds import Experts
from megatron_hexi.mesh import Mesh, cell_size
from megatron_hexi.mesh.experts import job_experts
from megatron_hexi.plan import (
    Domain,
    Exchange,
    Group,
    Member,
    Plan,
    Replica,
    Stage,
    proportional_plan,
    validate_plan,
)
from megatron_hexi.plan.layout import causal_segments
from tests.support.costs import TINY, cluster, rate_alone, tiny_job
from tests.support.expert_plans import expert_plan

FAST = 1e6  # GB/s: a network that takes no time
EXPERTS = 8
#: The first of three layers is dense.
MIXED = dataclasses.replace(
    TINY,
    layers=3,
    heads=4,
    norm_biases=False,
    tied_embeddings=False,
    experts=Experts(EXPERTS, 2, 256, shared_ffn_hidden_size=512, layers=(False, True, True)),
)
SPARSE = dataclasses.replace(MIXED, layers=2, experts=Experts(EXPERTS, 2, 256))


def workload(model, seq_length=4096):
    job = tiny_job(model=model, seq_length=seq_length)
    return dataclasses.replace(job.workload(), experts=model.experts.count)


def one_stage(model, tokens, held, layers=None):
    """Ranks that are alone in their groups, with so many tokens and these experts, as one stage."""
    segments = causal_segments(tokens)
    heads = (0, model.heads)
    groups = tuple(
        Group(own, (Member((rank,), count, heads, experts=(range_,)),))
        for rank, (own, count, range_) in enumerate(zip(segments, tokens, held, strict=True))
    )
    stage = Stage((Domain(groups),), layers=layers or (0, model.layers), exchange=Exchange(1, 1))
    return Plan(workload(model, sum(tokens)), (Replica((stage,)),))


@given(st.integers(0, 10**6), st.integers(2, 8))
@example(3322, 4)  # two units share a tensor-parallel size and a range, one of them cuts its experts
def test_each_rank_holds_the_weights_of_its_experts_and_each_weight_has_one_owner(seed, ranks):
    drawn = random.Random(seed)
    experts = Experts(EXPERTS, 2, 240, layers=(False, True, True))
    model = dataclasses.replace(MIXED, experts=experts)
    shape = dataclasses.replace(workload(model), tensor_parallel=0)
    plan = expert_plan(drawn, shape, 4, ranks, EXPERTS)
    weights = HeldWeights(tiny_job(model=model), Mesh(plan, 4, True))
    held, owned = np.zeros(ranks), 0.0
    for bucket, _ in weights.buckets():
        routed = [piece for piece in bucket.pieces if piece.key.startswith("experts")]
        for piece in routed:
            held[list(bucket.holders)] += piece.size * weights.density[piece.key, weights.width[0]]
        owned += sum(
            cell_size(slab.cell) * weights.density[slab.key, weights.width[slab.owner]]
            for slab in bucket.slabs
            if slab.key.startswith("experts")
        )
    one = model.kinds[1].expert_params()
    assert owned == pytest.approx(2 * EXPERTS * one)  # two layers have them
    of_rank = job_experts(plan, EXPERTS)
    for unit in Mesh(plan, 4, True).units:
        sparse = sum(
            layer > 0 for layer in range(3) if unit.layers and unit.layers[0] <= layer < unit.layers[1]
        )
        for rank in unit.ranks:
            own = of_rank[rank][1]
            assert held[rank] == pytest.approx(sparse * own.count * one / own.parts)


@given(st.integers(0, 10**6), st.integers(2, 8))
def test_all_rows_that_are_sent_are_computed(seed, ranks):
    drawn = random.Random(seed)
    shape = dataclasses.replace(workload(MIXED), tensor_parallel=0)
    plan = expert_plan(drawn, shape, 4, ranks, EXPERTS)
    job = tiny_job(
        model=MIXED,
        expert_imbalance=0,
        micro_batch_size=4,
        global_batch_size=4 * len(plan.replicas) * 4,
        data_parallel=len(plan.replicas),
    )
    plan = dataclasses.replace(
        plan, replicas=tuple(dataclasses.replace(one, micro_batches=None) for one in plan.replicas)
    )
    known = cluster([("a", "PLAIN", ranks)], FAST)
    timing = CostModel(job, known).timing(plan)
    rows, expected = dict[int, float](), dict[int, float]()
    for section, held in zip(timing.sections, timing.experts, strict=True):
        assert held is not None
        each = 2 * held.domain_rows[:, None] * held.count / EXPERTS / held.parts[:, None]
        sent = 2 * section.job.micro_batch_size * section.arrays.tokens
        for domain, computed, own in zip(held.domain.tolist(), each.sum(axis=1), sent, strict=True):
            rows[domain] = rows.get(domain, 0.0) + float(computed)
            expected[domain] = expected.get(domain, 0.0) + float(own)
    assert rows == pytest.approx(expected)


def test_experts_take_as_long_as_their_rows_and_all_wait_for_the_slowest():
    """Two GPUs, one twice as fast, 5 and 3 experts; a network that takes no time; no imbalance of loads."""
    known = cluster([("a", "DOUBLE", 1), ("b", "PLAIN", 1)], FAST)
    plan = one_stage(SPARSE, (2048, 2048), ((0, 5), (5, 8)))
    validate_plan(plan)
    job = tiny_job(model=SPARSE, expert_imbalance=0)
    timing = CostModel(job, known).timing(plan)
    layer = timing.stages[0].layer
    for count, rate, unit in ((5, 200e12, 0), (3, 100e12, 1)):
        rows = 2 * 4096 * count / EXPERTS
        products = 2 * rows * 2 * 512 * 256 / (experts_module.GROUPED_SHARE * rate_alone(rate))
        moved = rows * 2 * (9.5 * 512 + 2 * 256) / 0.9e12
        columns = rows * 2 * (512 + 256) / 0.9e12  # in, and out
        assert layer.forward.experts[unit] == pytest.approx(products + columns + moved)
        # Gradients of weights read both the columns in and those out.
        back = products + max(products, 2 * columns) + columns + 8 * count * 2 * 512 * 256 / 0.9e12
        back += rows * 2 * (9.5 * 512 + (3 + 2) * 256) / 0.9e12
        assert layer.backward.experts[unit] == pytest.approx(back)
    own, wait = layer.forward.experts, layer.forward.expert_wait
    assert own + wait == pytest.approx(np.full(2, own.max()))
    assert layer.forward.expert_exchange == pytest.approx(np.zeros(2), abs=1e-8)


def test_experts_of_few_rows_take_as_long_as_reading_their_weights():
    known = cluster([("a", "PLAIN", 1)], FAST)
    plan = one_stage(SPARSE, (16,), ((0, EXPERTS),))
    timing = CostModel(tiny_job(model=SPARSE, seq_length=16), known).timing(plan)
    read = EXPERTS * 2 * 512 * 256 * 2 / 0.9e12
    moved = 2 * 16 * 2 * (9.5 * 512 + 2 * 256 + 2 * (512 + 256)) / 0.9e12  # columns in and out among it
    assert timing.stages[0].layer.forward.experts[0] == pytest.approx(read + moved)


def test_few_kernels_wait_for_the_hosts_calls():
    plan = one_stage(SPARSE, (16,), ((0, EXPERTS),))
    job = tiny_job(model=SPARSE, seq_length=16)
    found = [
        CostModel(replaced, cluster([("a", gpu, 1)], FAST)).timing(plan).stages[0].layer
        for gpu, replaced in (
            ("H100-SXM-80GB", job),
            ("H100-SXM-80GB", dataclasses.replace(job, precision="fp8")),
        )
    ]
    # 70 and 55 calls for all experts; of each expert two and four launches, a third of a call each, in fp8 8
    # and 14.
    for layer, each in zip(found, ((2, 4), (8, 14)), strict=True):
        for one, calls, own, launches in zip(
            (layer.forward, layer.backward), (70, 55), (30, 35), each, strict=True
        ):
            assert one.experts[0] == pytest.approx(15e-6 * (calls + EXPERTS * launches / 3))
            assert one.token[0] + one.attention[0] == pytest.approx(15e-6 * own)


def test_tokens_travel_to_experts_and_back_over_the_links_they_take():
    """Two nodes of one GPU each, 1 GB/s: of 3072 and 1024 tokens go 3/8 and 5/8 to the other, twice each."""
    known = cluster([("a", "PLAIN", 1), ("b", "PLAIN", 1)], 1)
    plan = one_stage(SPARSE, (3072, 1024), ((0, 5), (5, 8)))
    layer = CostModel(tiny_job(model=SPARSE), known).timing(plan).stages[0].layer
    bytes_there = 2 * 512 * 2 * np.array([3072 * 3 / 8, 1024 * 5 / 8])
    expected = 2 * bytes_there.max() / 1e9
    assert layer.forward.expert_exchange == pytest.approx(np.full(2, expected))
    assert layer.backward.expert_exchange == pytest.approx(np.full(2, expected))


def test_expert_domains_of_one_rank_send_nothing():
    known = cluster([("a", "PLAIN", 1), ("b", "PLAIN", 1)], 1)
    apart = one_stage(SPARSE, (3072, 1024), ((0, EXPERTS), (0, EXPERTS)))
    layer = CostModel(tiny_job(model=SPARSE), known).timing(apart).stages[0].layer
    assert not layer.forward.expert_exchange.any()
    assert layer.forward.experts[0] > layer.forward.experts[1]  # each computes its own tokens
    assert not layer.forward.expert_wait.any()


def test_memory_has_the_experts_that_a_rank_holds_and_the_rows_that_come_to_it():
    known = cluster([("a", "PLAIN", 1), ("b", "PLAIN", 1)], FAST)
    even, uneven = (one_stage(SPARSE, (2048, 2048), held) for held in (((0, 4), (4, 8)), ((0, 6), (6, 8))))
    job = tiny_job(model=SPARSE)
    first, second = (estimate(plan, job, known).ranks[0].memory for plan in (even, uneven))
    more = 2 * 2 * SPARSE.expert_params()  # two experts in each of two layers
    assert second.weights - first.weights == pytest.approx(2 * more)
    assert second.gradients - first.gradients == pytest.approx(4 * more)
    assert second.optimizer - first.optimizer == pytest.approx(12 * more, rel=1e-3)
    job = tiny_job(model=SPARSE, expert_imbalance=0)
    first, second = (estimate(plan, job, known).ranks[0].memory for plan in (even, uneven))
    rows = 2 * 4096 * 2 / EXPERTS
    assert second.activations - first.activations == pytest.approx(2 * rows * 2 * (512 + 2 * 256))


def test_a_plan_for_other_experts_is_refused():
    known = cluster([("a", "PLAIN", 1)], FAST)
    plan = one_stage(SPARSE, (4096,), ((0, EXPERTS),))
    fewer = dataclasses.replace(SPARSE, experts=Experts(4, 2, 256))
    with pytest.raises(PlanError, match=r"the plan is for 8, but the job has 4 \(model tiny\)"):
        estimate(plan, tiny_job(model=fewer), known)
    repeated = proportional_plan(tiny_job(model=SPARSE).workload(), [[[1.0]]])
    with pytest.raises(PlanError, match="does not say where the 8 experts"):
        estimate(repeated, tiny_job(model=SPARSE), known)


@given(st.integers(1, EXPERTS - 1), st.floats(0, 2), st.integers(8, 4096))
def test_the_busiest_rank_has_more_rows_by_the_imbalance(count, imbalance, tokens):
    """The mean, and two deviations of the mean of so many experts; never more rows than there are."""
    known = cluster([("a", "PLAIN", 1), ("b", "PLAIN", 1)], FAST)
    plan = one_stage(SPARSE, (tokens, tokens), ((0, count), (count, EXPERTS)))
    job = tiny_job(model=SPARSE, seq_length=2 * tokens, expert_imbalance=imbalance)
    (held,) = CostModel(job, known).timing(plan).experts
    assert held is not None
    for unit, experts in enumerate((count, EXPERTS - count)):
        mean = 2 * 2 * tokens / EXPERTS
        busiest = experts * (mean + 2 * imbalance * mean / math.sqrt(experts))
        assert held.rows(job)[unit] == pytest.approx(min(busiest, 2 * 2 * tokens))


@pytest.mark.parametrize("imbalance", [-0.1, math.nan, math.inf, 33])
def test_an_imbalance_that_cannot_be_is_refused(imbalance):
    with pytest.raises(HexiError, match=r"--expert-imbalance .*: give a number from 0 to 32"):
        tiny_job(model=SPARSE, expert_imbalance=imbalance)


def test_adapters_of_experts_take_as_long_on_several_units_as_on_each():
    job = tiny_job(model=SPARSE, lora_rank=16)
    speeds = device_speeds(cluster([("a", "PLAIN", 1)]).ranks[0].device, job)
    count, rows = np.array([2, 6]), np.array([500.0, 3000.0])
    both = experts_module.routed_times(speeds, job, count, np.array([1, 2]), rows)
    for unit in (0, 1):
        alone = experts_module.routed_times(
            speeds, job, count[unit : unit + 1], np.array([1 + unit]), rows[unit : unit + 1]
        )
        assert [float(seconds[unit]) for seconds in both] == [float(seconds[0]) for seconds in alone]
