"""Ranks write only while the store names their round; what a stopped node does late changes nothing."""

from __future__ import annotations

import functools
import os
import sys
import threading
from dataclasses import replace

import pytest
import torch.distributed as dist

from megatron_hexi.elastic.store import (
    JOB_VARIABLE,
    ROUND_VARIABLE,
    STORE_VARIABLE,
    Fence,
    PresentRound,
    change_present,
    count_changes,
    read_present,
)
from megatron_hexi.elastic.training import fencing
from megatron_hexi.elastic.training.fencing import FENCE_PATCHES


def begin(job: dist.Store, name: str) -> None:
    change_present(job, lambda _: PresentRound(name, ("a", "b")))


def test_a_round_is_closed_by_the_next():
    job = dist.HashStore()
    assert read_present(job) == PresentRound()
    begin(job, "first")
    first = Fence(job, "first")
    assert first.why_closed() is None
    begin(job, "second")
    assert read_present(job) == PresentRound("second", ("a", "b"))
    assert "this round is over" in (first.why_closed() or "")
    assert Fence(job, "second").why_closed() is None


def test_changes_of_many_agents_are_all_made():
    job = dist.HashStore()

    def come(number: int) -> None:
        for _ in range(20):
            change_present(job, lambda present: replace(present, here=(*present.here, str(number))))

    agents = [threading.Thread(target=come, args=(number,)) for number in range(5)]
    for agent in agents:
        agent.start()
    for agent in agents:
        agent.join()
    assert sorted(read_present(job).here) == sorted(str(number) for number in range(5) for _ in range(20))
    assert count_changes(job) == 100
    change_present(job, lambda present: present)
    assert count_changes(job) == 100


@pytest.mark.parametrize("patch", FENCE_PATCHES, ids=lambda patch: patch.target)
def test_a_rank_of_a_round_that_is_over_writes_nothing_and_says_why(monkeypatch, capsys, patch):
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    job = dist.PrefixStore("hexi.job", store)
    written: list[str] = []
    begin(job, "own")
    for name, value in (
        (STORE_VARIABLE, f"127.0.0.1:{store.port}"),
        (JOB_VARIABLE, "job"),
        (ROUND_VARIABLE, "own"),
        ("RANK", "3"),
    ):
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(os, "_exit", sys.exit)
    monkeypatch.setattr(fencing, "_fence", functools.cache(fencing._fence.__wrapped__))
    write = patch.build(lambda what, _: written.append(what))
    write("while present", "folder")
    begin(job, "later")
    with pytest.raises(SystemExit) as ended:
        write("afterwards", "folder")
    assert (ended.value.code, written) == (75, ["while present"])
    assert "hexi: elastic: rank 3: this round is over" in capsys.readouterr().err
    monkeypatch.delenv(ROUND_VARIABLE)
    write("in a job that is not elastic", "folder")
    assert len(written) == 2
