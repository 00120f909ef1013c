"""Time, bytes and memory of layers with a state, and of layers of one part."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

from megatron_hexi.cost import CostModel, ceiling_tokens_per_s, estimate, model_flops
from megatron_hexi.cost.compute import device_speeds
from megatron_hexi.cost.mixing import mixing_of
from megatron_hexi.cost.scan import scan_times, state_shares
from megatron_hexi.cost.unit_rates import unit_rates
from megatron_hexi.errors import HexiError, PlanError
from megatron_hexi.kinds import DeltaNet, Mamba, ShortConv
from megatron_hexi.lab.simulator import simulate
from megatron_hexi.models import Job
from megatron_hexi.plan import proportional_plan
from megatron_hexi.plan.heads import kv_range
from megatron_hexi.plan.layout import apportion
from megatron_hexi.planner.baselines.flags import FlagLayout, Floor
from megatron_hexi.planner.fleet.units import find_units
from megatron_hexi.planner.layouts.layout import A2AGroup, Layout
from megatron_hexi.planner.layouts.trial import Judge
from megatron_hexi.platform import cpu_scans
from tests.support.costs import TINY, cluster, plan_arrays, tiny_job
from tests.support.plans import examples

MAMBA, DELTA = Mamba(10, 64, 2, 32), DeltaNet(8, 64, 4, 48)
#: Layers of one part each, and layers of which three in four have a state in place of attention.
HYBRID = replace(TINY, layers=6, state=MAMBA, pattern="M-M*-M")
MIXED = replace(TINY, layers=4, state=replace(DELTA, layers=(True, True, True, False)))
CONVOLUTION = replace(TINY, layers=6, short_conv=ShortConv(3), pattern="C-C-*-")
MODELS = st.sampled_from([HYBRID, MIXED, CONVOLUTION])
MODES = st.sampled_from(["none", "selective", "full"])
FAST = 1e6  # GB/s: a network that takes no time


def shares(count):
    return st.lists(st.integers(1, 9), min_size=count, max_size=count)


def whole_group(job, weights):
    """One replica of one group, tokens and heads in proportion."""
    return proportional_plan(job.workload(), [[[float(weight) for weight in weights]]])


def counted(run):
    with FlopCounterMode(display=False) as counter:
        run()
    return counter.get_total_flops()


@pytest.mark.parametrize("state", [MAMBA, DELTA])
def test_flops_are_those_of_the_products_of_a_chunked_scan(state, monkeypatch):
    chunk, heads, key, size = state.chunk, state.heads, state.key_dim, state.head_dim
    monkeypatch.setattr(cpu_scans, "CHUNK", chunk)
    keys, values = torch.zeros(1, chunk, heads, key), torch.zeros(1, chunk, heads, size)
    steps, decays = torch.ones(1, chunk, heads), -torch.ones(heads)
    if state.kind == "mamba":
        found = counted(lambda: cpu_scans.state_space_scan(values, steps, decays, keys, keys))
        # Whole blocks, and keys by queries for each head; kernels leave out what lies above the diagonal.
        expected = state.head_work(2).flops[0] + chunk * size + 2 * state.group_work(2).flops[0]
    else:
        found = counted(lambda: cpu_scans.delta_rule_scan(keys, keys, values, steps * decays, steps))
        # It solves once, by substitution; kernels multiply keys and values by the inverse.
        expected = state.head_work(2).flops[0] - 2 * chunk * (key + size)
    assert found == chunk * heads * expected


@pytest.mark.parametrize("state", [MAMBA, DELTA])
def test_the_backward_pass_has_twice_the_products_and_what_is_made_again(state):
    chunk, key, size = state.chunk, state.key_dim, state.head_dim
    forward, backward = state.head_work(2).flops
    if state.kind == "mamba":  # states again, and pairs once more for the gradient of decays
        assert backward == 2 * forward + 2 * key * size + chunk * size
        assert state.group_work(2).flops[1] == 3 * state.group_work(2).flops[0]
    else:  # solved and states again, and the gradient of the inverse
        again = 2 * chunk * (key + size) + 4 * key * size
        assert backward == 2 * forward + again + 2 * chunk * key + 4 * chunk**2


@given(shares(4), st.sampled_from([MAMBA, DELTA]), st.sampled_from([1, 2]))
@examples(20)
def test_units_scan_the_heads_that_training_gives_them(weights, state, width):
    job = tiny_job(model=replace(TINY, state=state), tensor_parallel=width)
    plan = whole_group(job, weights)
    heads, groups = state_shares(plan_arrays(plan), job)
    attention = [m.heads[1] - m.heads[0] for m in plan.replicas[0].domain.members]
    assert heads.tolist() == list(apportion(state.heads // width, attention))
    ends = list(itertools.accumulate(heads.tolist(), initial=0))
    read = [kv_range(own, state.heads // state.groups) for own in itertools.pairwise(ends)]
    assert groups.tolist() == [stop - start for start, stop in read]


@given(shares(3), st.sampled_from([MAMBA, DELTA]))
@examples(20)
def test_messages_are_the_columns_that_members_read(weights, state):
    job = tiny_job(model=replace(TINY, state=state), micro_batch_size=2, global_batch_size=2)
    plan = whole_group(job, weights)
    arrays = plan_arrays(plan)
    heads, groups = state_shares(arrays, job)
    there: dict[str, Any] = {}
    back: dict[str, Any] = {}
    for move in mixing_of(arrays, job).all_to_alls():
        (there if move.inward == (move.way == "forward") else back)[move.way] = move.size
    for (holder, taker), columns, outputs in zip(
        np.transpose(arrays.all_to_all_pairs), there["forward"], back["forward"], strict=True
    ):
        rows = 2 * 2 * arrays.tokens[holder]
        # Gate and input, keys and queries, and a step (Mamba), or a decay and a rate.
        more = 1 if state.kind == "mamba" else 2
        assert columns == rows * (
            heads[taker] * (2 * state.head_dim + more) + groups[taker] * 2 * state.key_dim
        )
        assert outputs == rows * heads[taker] * state.head_dim


def test_a_domain_of_several_groups_is_refused_by_name():
    job = tiny_job(model=HYBRID)
    plan = proportional_plan(job.workload(), [[[1.0, 2.0], [1.0]]])
    said = (
        r"model tiny has layers whose state .* replicas\[0\] has a domain of 2 groups; put its members into"
    )
    with pytest.raises(PlanError, match=said):
        estimate(plan, job, cluster([("a", "PLAIN", 3)]))


def test_tensor_parallel_ranks_divide_heads_and_groups():
    with pytest.raises(HexiError, match="give a number that divides the groups of these heads of tiny, 2"):
        Job(replace(TINY, state=replace(MAMBA, heads=16)), 4096, tensor_parallel=4)


@given(MODELS, shares(3), MODES, st.sampled_from([1, 2]))
@examples(10)
def test_the_simulator_takes_as_long_where_the_network_takes_no_time(model, weights, mode, micro_batches):
    job = tiny_job(model=model, global_batch_size=micro_batches, recompute=mode, overlap_gradients=False)
    plan = whole_group(job, weights)
    known = cluster([("a", "PLAIN", 1), ("b", "DOUBLE", 1), ("c", "DOUBLE", 1)], FAST)
    assert simulate(plan, job, known).iteration_s == pytest.approx(
        estimate(plan, job, known).iteration_s, rel=0.02
    )


@given(MODELS, shares(2), MODES)
@examples(10)
def test_the_simulator_takes_as_long_between_two_units(model, weights, mode):
    job = tiny_job(model=model, recompute=mode, overlap_gradients=False)
    plan, known = whole_group(job, weights), cluster([("a", "PLAIN", 1), ("b", "DOUBLE", 1)])
    assert simulate(plan, job, known).iteration_s == pytest.approx(
        estimate(plan, job, known).iteration_s, rel=0.02
    )


def test_a_scan_goes_by_tokens_and_heads():
    job = tiny_job(model=replace(TINY, state=MAMBA))
    speeds = device_speeds(cluster([("a", "PLAIN", 1)]).ranks[0].device, job)
    once, twice = (scan_times(speeds, job, np.array([tokens])) for tokens in (1000.0, 2000.0))
    np.testing.assert_allclose(2 * np.array(once), np.array(twice))
    # 100 TFLOP/s, and bytes at 900 GB/s.
    work = MAMBA.head_work(2)
    expected = 1000 * (work.flops[0] / 100e12 + work.bytes[0] / 900e9)
    assert once[0].forward[0] == pytest.approx(expected)


def test_a_hybrid_of_attention_and_mlp_costs_what_layers_of_both_cost():
    """Parts one by one are the parts together, but for what waits for nothing between them."""
    apart = tiny_job(model=replace(TINY, layers=4, pattern="*-*-"), recompute="none")
    known = cluster([("a", "PLAIN", 1), ("b", "PLAIN", 1)], FAST)
    plan = whole_group(apart, [1, 1])
    together = tiny_job(model=TINY)
    one, other = estimate(plan, apart, known), estimate(whole_group(together, [1, 1]), together, known)
    assert apart.model.total_params == together.model.total_params
    for phase in ("token", "attention", "all_to_all", "logits", "optimizer"):
        assert getattr(one.phases, phase) == pytest.approx(getattr(other.phases, phase), rel=1e-9)
    for first, second in zip(one.ranks, other.ranks, strict=True):
        assert first.memory.weights == second.memory.weights
        assert first.memory.activations == pytest.approx(second.memory.activations)
        assert first.memory.attention == pytest.approx(second.memory.attention)


def test_model_flops_of_scans_are_megatrons():
    plain = replace(TINY, layers=1)
    for state, scan in (
        (MAMBA, 7 * 640 * 32),
        (DELTA, 2 * (4 * (512 + 2 * 4 * 48) + 8 * 64 * 48 * 4)),
    ):
        model = replace(plain, state=state)
        matrices = model.matrix_params() + 512 * 1024
        assert model_flops(model, 4096) == 3 * (2 * matrices + scan)


@given(MODELS, shares(2), MODES, st.integers(1, 3))
@examples(20)
def test_no_plan_is_faster_than_bounds_say(model, weights, mode, micro_batches):
    job = tiny_job(model=model, recompute=mode, global_batch_size=micro_batches)
    known = cluster([("a", "PLAIN", 1), ("b", "DOUBLE", 1)])
    fleet = find_units(job, known)
    heads = apportion(4, weights)
    assume(all(heads))
    tokens = apportion(job.seq_length, weights)
    layouts = (Layout((A2AGroup((0, 1), tuple(tokens), tuple(heads)),), micro_batches),)
    trial, floor = Judge(fleet).try_out(fleet, layouts, 1), Floor([FlagLayout(fleet, layouts)])
    assert 0 < floor.seconds(fleet.job)[0] <= trial.iteration_s * (1 + 1e-9)
    assert floor.fullness(fleet.job)[0] <= trial.timing.fullness * (1 + 1e-9)
    ceiling = ceiling_tokens_per_s(job, [rank.device for rank in known.ranks])
    assert micro_batches * job.seq_length / ceiling <= trial.iteration_s * (1 + 1e-9)


def test_shares_that_change_from_batch_to_batch_are_refused():
    job = tiny_job(model=MIXED, micro_batch_size=1)
    known = cluster([("a", "PLAIN", 2)])
    with pytest.raises(
        PlanError, match="has Mamba layers or delta nets, whose heads cannot move between batches"
    ):
        unit_rates(whole_group(job, [1, 1]), job, known)


def test_estimates_count_the_weights_of_all_kinds():
    job = tiny_job(model=HYBRID)
    known = cluster([("a", "PLAIN", 1)])
    found = CostModel(job, known).estimate(whole_group(job, [1]))
    assert found.ranks[0].memory.weights == 2 * HYBRID.total_params
