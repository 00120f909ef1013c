"""fp16 under a plan is fp16 on one rank: the same loss scale and skipped steps, losses as good."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from statistics import fmean

import pytest

from megatron_hexi.plan import Plan, proportional_plan
from tests.megatron.forked import Forks
from tests.megatron.launch import TrainingLog
from tests.megatron.test_uneven_training import MODEL, WORKLOAD
from tests.support.stage_layouts import FOUR_LAYERS, LAYOUTS, stage_layout

#: Two steps are skipped at first, and one more when the scale has grown after two that were not.
ITERATIONS = 7
SCALING = ("--fp16", "--initial-loss-scale", str(2**18), "--loss-scale-window", "2", "--hysteresis", "1")
PER_TOKEN = ("--calculate-per-token-loss",)


def plan_of(layout: str, folder: Path) -> Plan:
    """A plan with stages, or one whose only stage the job repeats."""
    if layout in LAYOUTS:
        return stage_layout(layout, folder)
    return proportional_plan(replace(WORKLOAD, layers=4), [[[2.0, 1.0], [1.0]]])


@pytest.fixture(scope="module")
def train(forks: Forks, references, tmp_path_factory):
    """Trains from the common weights: under a layout, or on one rank."""
    weights, _ = references(FOUR_LAYERS, iterations=4)

    def train(layout: str | None, *words: str, entry: str = "megatron_hexi.pretrain_gpt") -> TrainingLog:
        folder = tmp_path_factory.mktemp("fp16")
        plan = plan_of(layout, folder) if layout else None
        args = [*MODEL, *FOUR_LAYERS, "--train-iters", str(ITERATIONS), "--log-interval", "1"]
        args += ["--sequence-parallel"] if layout == "units" else []
        return forks.train(
            folder,
            ranks=plan.ranks if plan else 1,
            args=[*args, "--load", weights, "--finetune", *words],
            plan=plan,
            entry=entry,
        )

    return train


@pytest.fixture(scope="module")
def one_rank(train):
    """fp16 on one rank, and the same in fp32 with the same steps skipped."""
    found = train(None, *SCALING)
    skipped = [str(number) for number, is_skipped in enumerate(found.skipped) if is_skipped]
    return found, train(None, "--skipping", ",".join(skipped), entry="tests.megatron.skipping")


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(layout, marks=[] if layout == "offload" else [pytest.mark.slow])
        for layout in (*LAYOUTS, "domain-of-two-groups")
    ],
)
def test_scale_steps_and_losses_are_those_of_one_rank(layout, train, one_rank):
    stock, exact = one_rank
    assert stock.skipped.count(True) >= 3
    assert max(stock.loss_scales[2:]) > min(stock.loss_scales)
    log = train(layout, *SCALING)
    assert log.loss_scales == stock.loss_scales
    assert log.skipped == stock.skipped == exact.skipped

    def error(run: TrainingLog) -> float:
        return fmean(abs(a - b) for a, b in zip(run.losses, exact.losses, strict=True))

    print(f"{layout}: losses off by {error(log):.1e}, of stock fp16 by {error(stock):.1e}")
    assert error(log) < 2 * error(stock)


@pytest.mark.slow
def test_a_sum_over_tokens_that_the_user_asks_for_is_scaled_as_one(train):
    """As in Megatron, whose scale is smaller then by the tokens of a batch."""
    scaling = ("--fp16", "--initial-loss-scale", "512", "--loss-scale-window", "3", "--hysteresis", "1")
    stock, log = train(None, *scaling, *PER_TOKEN), train("depths", *scaling, *PER_TOKEN)
    assert log.skipped == stock.skipped
    assert log.loss_scales == stock.loss_scales
    assert 0 < stock.skipped.count(True) < ITERATIONS


def test_an_infinite_gradient_of_one_rank_skips_the_step_of_all(train):
    log = train(
        "dealt",
        *("--fp16", "--initial-loss-scale", "1024", "--hysteresis", "1", "--train-iters", "2"),
        *("--planted", "one-ranks-gradient-infinite"),
        entry="tests.megatron.planted",
    )
    assert log.skipped == [True, True]
    assert log.loss_scales == [512, 256]
