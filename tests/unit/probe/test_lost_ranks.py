"""A rank of a probe that dies or stops: the others name it, and end."""

from __future__ import annotations

import signal
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_hexi.probe import world
from megatron_hexi.probe.world import LostRankError, World, end_when_lost
from megatron_hexi.runtime.liveness import Fault
from tests.support.shell import is_one_error_line

FAULT = Fault(0, "lost rank 1 on host h (process 7): no heartbeat since 12:00:00. Look at its log", 1)


class Ended(BaseException):
    """The process ends."""


@pytest.fixture
def hasty(monkeypatch):
    """Seconds pass by themselves; what the process ends with."""
    now = [0.0]

    def sleep(seconds):
        now[0] += seconds

    def end(code):
        raise Ended(code, now[0])

    monkeypatch.setattr(world, "time", SimpleNamespace(monotonic=lambda: now[0], sleep=sleep))
    monkeypatch.setattr("os._exit", end)
    return now


def test_a_silent_rank_ends_the_others_within_a_minute_and_a_slow_one_does_not(hasty, capsys):
    class Others:
        @property
        def fault(self):
            return FAULT if 10 < hasty[0] < 60 or hasty[0] > 100 else None

    others: Any = Others()
    with pytest.raises(Ended) as ended:
        end_when_lost(others)
    code, at = ended.value.args
    assert code == 2
    assert 160 <= at <= 162
    said = capsys.readouterr().err
    assert is_one_error_line(said)
    assert said.startswith("hexi: error: lost rank 1 on host h")
    assert "run the same command again: what was measured is kept" in said


@pytest.mark.parametrize(("fault", "said"), [(FAULT, "lost rank 1 on host h"), (None, "(Connection closed)")])
def test_a_collective_that_fails_names_the_rank(monkeypatch, fault, said):
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    others: Any = SimpleNamespace(find_fault=lambda: fault)
    ranks = World(0, 2, None, others)
    with pytest.raises(LostRankError) as caught, ranks.lost_ranks():
        raise RuntimeError("[/pytorch/gloo/pair.cc:5] Connection closed. Or not")
    assert said in str(caught.value)
