"""A round of an elastic job goes on with the sample after the last one that its state has seen."""

from __future__ import annotations

from argparse import Namespace

import pytest
import torch.distributed as dist

from megatron_hexi.elastic.training import goodput
from megatron_hexi.errors import HexiError

BATCH = 8


@pytest.fixture
def begin(monkeypatch):
    """Begin a round of the same job, after a state of some iterations and samples."""
    job = dist.HashStore()
    job.set("begun", "0")
    monkeypatch.setattr(goodput, "whole_store", lambda: job)
    monkeypatch.setattr(goodput, "round_store", lambda: dist.HashStore())

    def begin(iteration, samples, rank=0):
        args = Namespace(rank=rank, world_size=3, save_interval=2, consumed_train_samples=samples)
        return args, goodput.RoundSteps(args, iteration)

    return begin


def test_a_round_says_its_first_sample_and_refuses_another(begin, capsys):
    args, steps = begin(0, 0)
    for iteration in range(7):
        args.consumed_train_samples = BATCH * iteration
        steps.before_step(iteration)
    assert "begins with sample" not in capsys.readouterr().err
    begin(4, 4 * BATCH)
    assert "iteration 5 begins with sample 32 of the one order of all plans" in capsys.readouterr().err
    for wrong in (4 * BATCH + 1, 0):
        with pytest.raises(
            HexiError, match=f"iteration 4: .* has seen {wrong} samples, .* had seen 32 up to"
        ):
            begin(4, wrong)
    begin(4, 0, rank=1)  # rank 0 speaks for all


def test_the_ranks_that_write_ask_the_fence_before_megatron_logs(begin, monkeypatch):
    monkeypatch.setattr(goodput, "job_time", lambda: 0.0)
    for rank, asks in enumerate(
        (True, False, True)
    ):  # rank 0 writes counts and the record, the last one logs
        asked: list[bool] = []
        monkeypatch.setattr(goodput, "ask_fence", lambda to=asked: to.append(True))
        _, steps = begin(0, 0, rank)
        steps.after_step(1, 0.1)
        assert bool(asked) == asks
