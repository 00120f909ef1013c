"""Attention under any plan is the attention of one device: output and all three gradients."""

import functools
import statistics
import threading

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch.utils.checkpoint import checkpoint

from megatron_hexi.errors import HexiError
from megatron_hexi.plan import Mask, Workload, proportional_plan
from megatron_hexi.runtime import exchange
from megatron_hexi.runtime.kernels import MathKernel
from megatron_hexi.runtime.wire import Transfers
from tests.support.plans import RAGGED, SPARSE, TORN, examples, masks, plans, with_rates, workloads
from tests.support.reference import (
    plain_attention,
    plain_low_precision_results,
    plain_results,
    planned_results,
    random_problem,
    rms_error,
)

NAMES = ("output", "grad_query", "grad_key", "grad_value", "grad_sinks")
SEEDS = st.integers(0, 2**24 - 1)


def assert_close(results, expected, tolerance):
    for name, result, truth in zip(NAMES[: len(expected)], results, expected, strict=True):
        say = functools.partial("{}: {}".format, name)
        torch.testing.assert_close(result, truth, atol=tolerance, rtol=tolerance, msg=say)


#: One rank.
ALONE = proportional_plan(Workload(16, 2, 1, 4), [[[1]]])

#: Values may have another size than keys.
ANY = workloads(value_dims=(None, None, 2, 9))


@given(
    plan=plans(ANY),
    batch=st.integers(1, 3),
    scale=st.none() | st.floats(0.05, 2.0),
    kernel=st.sampled_from(["auto", "auto", "math"]),
    seed=SEEDS,
)
@example(plan=TORN, batch=2, scale=None, kernel="auto", seed=0)
@example(plan=RAGGED, batch=2, scale=None, kernel="auto", seed=0)
@example(plan=SPARSE, batch=3, scale=0.3, kernel="auto", seed=0)
@examples(30)
def test_any_plan_gives_the_output_and_the_gradients_of_one_device(plan, batch, scale, kernel, seed):
    problem = random_problem(plan.workload, batch, scale=scale, seed=seed)
    assert_close(planned_results(plan, problem, kernel), plain_results(problem), tolerance=1e-10)


@st.composite
def masked_plans(draw):
    """Any plan, with any mask that its workload allows; half of those with documents deal them anew."""
    plan = draw(plans(ANY))
    mask = draw(masks(plan.workload))
    return (plan if mask.documents is None else draw(with_rates(plan))), mask


@given(
    case=masked_plans(),
    batch=st.integers(1, 2),
    has_sinks=st.booleans(),
    kernel=st.sampled_from(["auto", "auto", "math"]),
    seed=SEEDS,
)
@example(
    case=(RAGGED, Mask(window=7, documents=(20, 1, 0, 20))), batch=2, has_sinks=True, kernel="auto", seed=0
)
@examples(30)
def test_windows_documents_and_sinks_under_any_plan_are_those_of_one_device(
    case, batch, has_sinks, kernel, seed
):
    plan, mask = case
    problem = random_problem(plan.workload, batch, seed=seed, mask=mask, has_sinks=has_sinks)
    assert_close(planned_results(plan, problem, kernel), plain_results(problem), tolerance=1e-10)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_two_runs_are_the_same_bits(dtype):
    """Parts that arrive are added up in the plan's order, not in that of their arrival."""
    problem = random_problem(RAGGED.workload, batch=2, dtype=dtype, has_sinks=True)
    for first, second in zip(*(planned_results(RAGGED, problem) for _ in range(2)), strict=True):
        assert torch.equal(first, second)


@pytest.mark.parametrize("is_constant", [True, False], ids=["of the sum", "of any function"])
def test_a_second_derivative_is_refused(is_constant):
    """Autograd would take our gradients for constants, and leave their part of the second one out."""

    def layer(attention, query, key, value, scale):
        output = attention(query, key, value, scale)
        loss = output.sum() if is_constant else output.square().sum()
        (grad,) = torch.autograd.grad(loss, query, create_graph=True)
        return grad + query

    with pytest.raises(HexiError, match="no second derivative; differentiate without create_graph=True"):
        planned_results(ALONE, random_problem(ALONE.workload, batch=1), layer=layer)


def test_the_scale_is_one_over_the_root_of_the_head_size_unless_given():
    problem = random_problem(TORN.workload, batch=1)

    def without_scale(attention, query, key, value, scale):
        return attention(query, key, value)

    assert_close(planned_results(TORN, problem, layer=without_scale), plain_results(problem), tolerance=1e-10)


#: Enough numbers for an error to be a statistic: a handful may be exact in one way and not in the other.
LARGE = workloads(lengths=[97, 128, 150, 199], head_dims=(16,))


def low_precision_ratios(plan, batch, dtype, seed):
    """Our error over that of the same attention in one block, for output and gradients."""
    problem = random_problem(plan.workload, batch, dtype, seed=seed)
    truth = plain_results(problem.to(torch.float64))
    ours = planned_results(plan, problem)
    plain = plain_low_precision_results(problem)
    return {
        name: rms_error(mine, exact) / rms_error(theirs, exact)
        for name, mine, theirs, exact in zip(NAMES[:4], ours, plain, truth, strict=True)
    }


@given(plan=plans(LARGE), batch=st.integers(1, 2), seed=SEEDS)
@examples(16)
def test_bf16_is_at_most_twice_as_far_from_the_truth_as_in_one_block(plan, batch, seed):
    ratios = low_precision_ratios(plan, batch, torch.bfloat16, seed)
    assert max(ratios.values()) <= 2, ratios


def test_eight_groups_cost_little_precision_since_their_parts_are_added_up_in_fp32():
    plan = proportional_plan(Workload(256, 4, 4, 16, causal=False), [[[1]] * 8])
    tries = [low_precision_ratios(plan, 1, torch.bfloat16, seed) for seed in range(4)]
    means = {name: statistics.mean(ratios[name] for ratios in tries) for name in NAMES[:4]}
    # 1.25 for the query's gradient, and 1.8 if its parts were added up in bf16.
    assert max(means.values()) <= 1.4, means


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@given(plan=plans(LARGE), batch=st.integers(1, 2), seed=SEEDS)
@examples(12)
def test_fp16_and_fp32_are_at_most_twice_as_far_from_the_truth_as_in_one_block(dtype, plan, batch, seed):
    ratios = low_precision_ratios(plan, batch, dtype, seed)
    assert max(ratios.values()) <= 2, ratios


@pytest.mark.parametrize(
    ("groups", "expected"),
    [
        (2, "post 0, 2 heads, wait, 4 heads, post 1, 2 heads, wait"),
        (3, "post 0, 2 heads, post 2, wait, 4 heads, post 1, wait, 4 heads, post 3, 2 heads, wait, wait"),
        (1, "4 heads"),
    ],
)
def test_half_of_the_own_block_hides_the_first_keys_and_half_the_last_gradients(
    monkeypatch, groups, expected
):
    """What each rank does in the backward pass; messages go by their tags, keys even and gradients odd."""
    done: dict[threading.Thread, list[str]] = {}

    def log(owner, name, say):
        original = getattr(owner, name)

        def logged(*args, **kwargs):
            done.setdefault(threading.current_thread(), []).append(say(*args, **kwargs))
            return original(*args, **kwargs)

        monkeypatch.setattr(owner, name, logged)

    def layer(attention, query, key, value, scale):
        output = attention(query, key, value, scale)
        done[threading.current_thread()] = []  # only the backward pass counts
        return output

    log(exchange, "post", lambda receives, sends, group, tag: f"post {tag}")
    log(Transfers, "wait", lambda transfers: "wait")
    log(MathKernel, "backward", lambda kernel, grad, *tensors, **mode: f"{grad.shape[1]} heads")
    plan = proportional_plan(Workload(24, 4, 4, 8, causal=False), [[[1]] * groups])
    planned_results(plan, random_problem(plan.workload, batch=1), "math", layer)
    assert [", ".join(steps) for steps in done.values()] == [expected] * groups


@given(plan=plans(), seed=SEEDS)
@example(plan=TORN, seed=0)
@examples(6)
def test_recomputing_the_activations_changes_nothing(plan, seed):
    problem = random_problem(plan.workload, batch=2, seed=seed)

    def recomputed(attention, query, key, value, scale, reentrant):
        return checkpoint(attention, query, key, value, scale, use_reentrant=reentrant)

    kept = planned_results(plan, problem)
    for reentrant in (False, True):
        again = planned_results(plan, problem, layer=functools.partial(recomputed, reentrant=reentrant))
        for name, result, expected in zip(NAMES[:4], again, kept, strict=True):
            assert torch.equal(result, expected), (name, reentrant)


@given(plan=plans(), seed=SEEDS)
@example(plan=SPARSE, seed=0)
@examples(12)
def test_two_layers_in_sequence_do_not_disturb_each_other(plan, seed):
    problem = random_problem(plan.workload, batch=1, seed=seed)

    def two_layers(attend, query, key, value, *mode, **named):
        return attend(attend(query, key, value, *mode, **named).tanh(), 2 * value, key, *mode, **named)

    planned = planned_results(plan, problem, layer=two_layers)
    plain = plain_results(problem, functools.partial(two_layers, plain_attention))
    assert_close(planned, plain, tolerance=1e-10)
