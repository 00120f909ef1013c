"""`--hexi-metrics-interval`: how many events a measured iteration has, what is chosen and what refused."""

from __future__ import annotations

from argparse import Namespace
from dataclasses import replace

import pytest
import torch
from hypothesis import given

from megatron_hexi.errors import HexiError
from megatron_hexi.megatron import progress
from megatron_hexi.megatron.metrics_interval import (
    LOOKED_AT,
    attention_events,
    default_interval,
    is_measured,
    least_step_seconds,
    set_metrics_interval,
)
from megatron_hexi.plan import Exchange, Mask, Workload, proportional_plan
from megatron_hexi.replan.planning.advisor import WINDOW
from megatron_hexi.runtime.waiting import WAITS, StepMeter, StepTimes, waiting
from tests.distributed.test_nccl_rules import jobs
from tests.support import training
from tests.support.plans import examples

PLAN = proportional_plan(Workload(131072, 32, 32, 128, layers=32), [[[1.0] * 4] * 4], window=1)


def arguments(**given_ones):
    return Namespace(
        **{
            "hexi_metrics_interval": None,
            "hexi_replan_interval": None,
            "num_layers": 32,
            "pipeline_model_parallel_size": 1,
            "global_batch_size": 16,
            "micro_batch_size": 1,
            "recompute_granularity": None,
            "recompute_modules": None,
            "hidden_size": 4096,
            "world_size": 16,
            "sft": False,
        }
        | given_ones
    )


class CountedEvent:
    """CUDA's event as far as it is counted here."""

    recorded = 0

    def __init__(self, enable_timing=False):
        assert enable_timing

    def record(self):
        CountedEvent.recorded += 1

    def query(self):
        return True

    def elapsed_time(self, _other):
        return 1.0


def counted(job):
    """Events of each rank of a job in one measured iteration, its begin and end left out."""
    found = []
    original = training._Rank.post

    def post(rank):
        before = CountedEvent.recorded
        with StepMeter().step():
            calls = original(rank)
        found.append(CountedEvent.recorded - before - 2)
        return calls

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "Event", CountedEvent)
        patch.setattr(training._Rank, "post", post)
        job.post()
    return found


def arguments_of(job):
    return arguments(
        num_layers=len(job.masks) * job.stages,
        pipeline_model_parallel_size=job.stages,
        global_batch_size=max(job.micro_batches) * len(job.plan.replicas),
        recompute_granularity=None if job.recompute == "no" else "full",
        recompute_modules=None,
    )


@given(job=jobs())
@examples(5)
def test_no_rank_records_more_events_than_are_counted_from_the_program(job):
    assert max(counted(job)) <= attention_events(arguments_of(job), job.plan)


@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("exchange", [Exchange(1), Exchange(2), Exchange(1, 2)])
@pytest.mark.parametrize("recompute", ["no", "layer"])
def test_of_a_full_plan_the_count_is_exact(groups, exchange, recompute):
    workload = Workload(16 * groups, 8, 8, 2)
    plan = proportional_plan(workload, [[[1.0, 1.0]] * groups])
    plan = replace(plan, exchange=exchange)
    mask = Mask(causal=True)
    job = training.Job(plan, (mask, mask), 1, 1, (3,), recompute, False, torch.float32)
    expected = attention_events(arguments_of(job), plan)
    assert set(counted(job)) == {expected}


def test_the_default_keeps_events_below_a_thousandth():
    args = arguments()
    # 4 groups, the first step in 4 parts: two ways in and two out, 6 keys; backward 6 gradients too.
    assert PLAN.exchange.parts == 4
    assert attention_events(args, PLAN) == 2 * (10 + 16) * 32 * 16 == 26624
    chosen = default_interval(args, PLAN)
    assert chosen > 1
    assert attention_events(args, PLAN) * 3e-6 / chosen <= 1e-3 * least_step_seconds(args, PLAN)
    # Attention alone: 16 x 32 layers x 3.5 x 4 x 128 x 32 heads x 131072^2 / 2.
    attention = 16 * 32 * 3.5 * 4 * 128 * 32 * 131072**2 / 2
    assert least_step_seconds(args, PLAN) > attention / 16 / 2.5e15
    longer = proportional_plan(Workload(2**20, 32, 32, 128, layers=32), [[[1.0] * 4] * 4])
    assert default_interval(args, longer) == 1


def test_a_batch_that_is_not_given_is_a_micro_batch_a_replica():
    for args in (arguments(global_batch_size=None), arguments(global_batch_size=None, micro_batch_size=None)):
        assert attention_events(args, PLAN) == 26624 / 16
        assert default_interval(args, PLAN) == default_interval(arguments(), PLAN)


def test_what_is_chosen():
    def chosen(plan=PLAN, on_gpu=True, **given_ones):
        args = arguments(**given_ones)
        set_metrics_interval(args, plan, on_gpu)
        return args.hexi_metrics_interval

    assert chosen() == default_interval(arguments(), PLAN)
    assert chosen(on_gpu=False) == 1
    assert chosen(hexi_metrics_interval=7) == 7
    assert chosen(hexi_replan_interval=10) <= 10 // LOOKED_AT
    assert chosen(hexi_replan_interval=2) == 1
    assert chosen(hexi_replan_interval=10, hexi_metrics_interval=2) == 2
    small = proportional_plan(Workload(64, 4, 4, 8, layers=2), [[[1.0], [1.0]]])
    assert chosen(plan=small, hidden_size=32, num_layers=2) == 100
    assert [number for number in range(1, 8) if is_measured(number, 3)] == [3, 6]


@pytest.mark.parametrize(
    ("given_ones", "message"),
    [
        ({"hexi_metrics_interval": 0}, "--hexi-metrics-interval 0: .*give 1 or more"),
        (
            {"hexi_metrics_interval": 4, "hexi_replan_interval": 10},
            "measures 2 .* which needs 5; give --hexi-metrics-interval 2, or --hexi-replan-interval 20",
        ),
        ({"hexi_metrics_interval": 2, "hexi_replan_interval": 3}, "needs 3; give .*interval 1"),
    ],
)
def test_what_is_refused(given_ones, message):
    with pytest.raises(HexiError, match=message):
        set_metrics_interval(arguments(**given_ones), PLAN, on_gpu=True)


def test_re_planning_looks_at_a_window():
    """The two halves do not know each other, but this must be one number."""
    assert LOOKED_AT == WINDOW


def test_a_step_without_measured_waits_records_two_events(monkeypatch):
    monkeypatch.setattr(torch.cuda, "Event", CountedEvent)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    meter = StepMeter()
    before = CountedEvent.recorded
    with meter.step(waits=False), waiting("attention"):
        pass
    assert CountedEvent.recorded == before + 2
    assert meter.take() == [StepTimes(1e-3, {})]


def test_shares_are_those_of_measured_steps_or_of_the_last_one(monkeypatch):
    monkeypatch.setattr(progress, "_last_measured", [])
    nothing = dict.fromkeys(WAITS, 0.0)
    measured = StepTimes(2.0, nothing | {"attention": 0.5})
    assert progress._waiting_shares([StepTimes(9.0, {}), measured]) == [0.25, 0, 0, 0]
    assert progress._waiting_shares([StepTimes(4.0, {})]) == [0.25, 0, 0, 0]
    later = StepTimes(2.0, nothing | {"pipeline": 1.0})
    assert progress._waiting_shares([later, measured]) == [0.125, 0, 0.25, 0]
    monkeypatch.setattr(progress, "_last_measured", [])
    assert progress._waiting_shares([StepTimes(4.0, {})]) == [0, 0, 0, 0]
