"""What counts as waiting in a training step: nested waits once, waits outside a step not at all."""

import time

import pytest
import torch

from megatron_hexi.platform.cpu_cuda import CUDA_PATCHES
from megatron_hexi.runtime.waiting import StepMeter, waiting


@pytest.fixture
def clock(monkeypatch):
    """The CPU's answers for CUDA's events."""
    answers = {patch.target: patch.build(None) for patch in CUDA_PATCHES}
    for name in ("Event", "synchronize"):
        monkeypatch.setattr(torch.cuda, name, answers[f"torch.cuda:{name}"])


def test_each_kind_is_added_up_and_a_wait_inside_a_wait_counts_once(clock):
    meter = StepMeter()
    with meter.step():
        for _ in range(2):
            with waiting("attention"):
                time.sleep(0.02)
        with waiting("gradients"):
            with waiting("attention"):
                time.sleep(0.03)
            time.sleep(0.03)
        time.sleep(0.05)
    (step,) = meter.take()
    assert step.waited["attention"] >= 0.04
    assert step.waited["gradients"] >= 0.06
    assert step.waited["pipeline"] == 0
    assert step.seconds - sum(step.waited.values()) >= 0.05
    # Had the wait inside counted too, there would be no room for the 0.05 s of work.
    assert sum(step.waited.values()) + 0.05 <= step.seconds


def test_nothing_is_counted_outside_a_step(clock):
    meter = StepMeter()
    with waiting("attention"):
        pass
    with meter.step():
        pass
    with waiting("attention"):
        time.sleep(0.01)
    (step,) = meter.take()
    assert set(step.waited.values()) == {0.0}
    assert meter.take() == []


def test_a_step_that_fails_is_not_counted_and_ends(clock):
    meter = StepMeter()
    with pytest.raises(ValueError, match="broken"), meter.step():
        raise ValueError("broken")
    with waiting("attention"):
        time.sleep(0.01)
    with meter.step():
        pass
    (step,) = meter.take()
    assert step.waited["attention"] == 0


def test_steps_come_in_order(clock):
    meter = StepMeter()
    for length in (0.0, 0.05, 0.0):
        with meter.step():
            time.sleep(length)
    seconds = [step.seconds for step in meter.take()]
    assert len(seconds) == 3
    assert seconds[1] >= 0.05


@pytest.mark.gpu
def test_on_a_gpu_the_stream_is_measured_and_the_host_goes_on():
    torch.cuda.synchronize()
    meter, begin = StepMeter(), time.perf_counter()
    with meter.step():
        torch.cuda._sleep(200_000_000)  # cycles: about 0.1 s
        with waiting("attention"):
            torch.cuda._sleep(600_000_000)
    posted = time.perf_counter() - begin
    (step,) = meter.take()
    assert posted < step.seconds / 2
    assert step.waited["attention"] / step.seconds == pytest.approx(0.75, abs=0.1)
