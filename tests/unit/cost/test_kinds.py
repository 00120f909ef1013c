"""Layers of several kinds cost what each kind costs, wherever they stand."""

import dataclasses
import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_hexi.cost import CostModel, estimate
from megatron_hexi.cost.memory import part_params
from megatron_hexi.cost.unit_rates import unit_rates
from megatron_hexi.kinds import Window
from megatron_hexi.plan import Exchange, Plan, Replica, Stage, proportional_plan
from tests.support.costs import TINY, cluster, tiny_job
from tests.support.plans import examples

NODES = [("a", "PLAIN", 2), ("b", "DOUBLE", 2)]


def model(layers, **changes):
    return dataclasses.replace(TINY, layers=layers, kv_heads=2, **changes)


def with_window(size, layers):
    return model(len(layers), window=Window(size, tuple(layers)))


def one_stage(job, weights=((1.0, 2.0), (2.0, 1.0))):
    return proportional_plan(job.workload(), [weights])


def staged(job, cuts, recompute=None):
    """One replica, a stage for each two ranks, with the layers between cuts."""
    stages = []
    for number, layers in enumerate(itertools.pairwise(cuts)):
        domain = proportional_plan(job.workload(), [[[1.0], [2.0]]]).replicas[0].domain
        groups = tuple(
            dataclasses.replace(
                group,
                members=tuple(
                    dataclasses.replace(member, ranks=tuple(rank + 2 * number for rank in member.ranks))
                    for member in group.members
                ),
            )
            for group in domain.groups
        )
        domain = dataclasses.replace(domain, groups=groups)
        stages.append(Stage((domain,), layers=layers, recompute=recompute or "none", exchange=Exchange(1, 1)))
    return Plan(job.workload(), (Replica(tuple(stages), job.global_batch_size),))


LAYERS = st.lists(st.booleans(), min_size=3, max_size=8).filter(any)
MODES = st.sampled_from(["none", "selective", "full"])


@given(LAYERS, MODES, st.booleans())
@examples(20)
def test_a_window_that_hides_nothing_costs_nothing(layers, recompute, in_stages):
    plain = tiny_job(model=model(len(layers)), recompute=recompute, global_batch_size=4)
    kinds = dataclasses.replace(plain, model=with_window(4096, layers))
    nodes = cluster(NODES, latency=5)
    plan = staged(plain, (0, 1, len(layers)), recompute) if in_stages else one_stage(plain)
    job = dataclasses.replace(plain, recompute="none") if in_stages else plain
    both = [estimate(plan, dataclasses.replace(job, model=one.model), nodes) for one in (plain, kinds)]
    # State of stages is owned by whole rows of a kind's weights.
    near = 1e-6 if in_stages else 1e-9
    assert both[1].iteration_s == pytest.approx(both[0].iteration_s, rel=near)
    assert both[1].memory_gib == pytest.approx(both[0].memory_gib, rel=near)
    assert both[1].tokens_per_s == pytest.approx(both[0].tokens_per_s, rel=near)


def seconds(layers, size, recompute="none", weights=((1.0, 2.0), (2.0, 1.0))):
    """Seconds of one micro-batch through a stage: everything but gradients, weights and the optimizer."""
    shape = model(len(layers)) if not any(layers) else with_window(size, layers)
    job = tiny_job(model=shape, recompute=recompute)
    timing = CostModel(job, cluster(NODES, latency=5)).timing(one_stage(job, weights))
    return timing.stages[0].replicas[0].total


@given(LAYERS, MODES, st.sampled_from([64, 500, 3000]))
@examples(15)
def test_a_stage_takes_the_sum_of_its_layers(layers, recompute, size):
    count, windowed = len(layers), sum(layers)
    full, narrow = seconds([False] * count, size, recompute), seconds([True] * count, size, recompute)
    rest = seconds([False] * 2 * count, size, recompute) - 2 * full  # the loss, counted once
    each = [(whole + rest) / count for whole in (full, narrow)]
    expected = (count - windowed) * each[0] + windowed * each[1] - rest
    assert seconds(layers, size, recompute) == pytest.approx(expected, rel=1e-9)
    if windowed < count:
        assert narrow < full


@given(LAYERS, st.data())
@examples(20)
def test_stages_have_the_layers_that_stand_there(layers, data):
    job = tiny_job(model=with_window(100, layers), global_batch_size=2)
    cut = data.draw(st.integers(1, len(layers) - 1))
    cost = CostModel(job, cluster(NODES))
    timing = cost.timing(staged(job, (0, cut, len(layers))))
    kinds = list(dict.fromkeys(layers))
    for section, stage, own in zip(timing.sections, timing.stages, (layers[:cut], layers[cut:]), strict=True):
        held = [int(np.max(count)) for count in stage.counts]
        assert held == [own.count(kind) for kind in kinds]
        params = np.max(part_params(job, section.parts))
        assert params >= len(own) * job.model.kinds[0].layer_params()
    whole = sum(np.max(part_params(job, section.parts)) for section in timing.sections)
    tied = job.model.vocab_params()
    assert whole == job.model.total_params + tied


@given(LAYERS, MODES)
@examples(10)
def test_order_within_a_stage_does_not_matter(layers, recompute):
    forward, backward = (seconds(order, 300, recompute) for order in (layers, layers[::-1]))
    assert forward == pytest.approx(backward, rel=1e-12)


def test_heavier_layers_make_the_stage_that_has_them_slower():
    nodes, costs = cluster(NODES), []
    for layers in ([True] * 4 + [False] * 4, [False] * 4 + [True] * 4):
        job = tiny_job(model=with_window(64, layers), global_batch_size=2)
        timing = CostModel(job, nodes).timing(staged(job, (0, 4, 8)))
        costs.append([stage.replicas[0].total for stage in timing.stages])
    # The first stage is on slow GPUs.
    assert costs[0][0] < costs[1][0]
    assert costs[0][1] > costs[1][1]


@pytest.mark.parametrize("layers", [[True] * 4, [True, False, True, True]])
def test_documents_are_dealt_by_the_mean_of_all_layers(layers):
    nodes, weights = cluster(NODES), [[[1.0, 1.0], [1.0, 1.0]]]
    rates = []
    for shape in (model(4), with_window(16, layers), with_window(16, [True] * 4)):
        job = tiny_job(model=shape)
        rates.append(unit_rates(proportional_plan(job.workload(), weights), job, nodes))
    full, mixed, narrow = ((one.row_s[0], one.pair_s[0]) for one in rates)
    windowed = sum(layers) / 4
    # A pair in a window of 16 keys counts next to nothing beside one of the whole context.
    assert mixed[1] == pytest.approx(
        (1 - windowed) * full[1] + windowed * narrow[1], rel=0.01, abs=1e-4 * full[1]
    )
    assert mixed[0] == pytest.approx((1 - windowed) * full[0] + windowed * narrow[0], rel=0.01)
    assert all(0 < one.pair_s[0] <= full[1] for one in rates)
