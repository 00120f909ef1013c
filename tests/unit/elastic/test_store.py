"""Ranks write only while the store names their round; what a stopped node does late changes nothing."""

from __future__ import annotations

import functools
import os
import sys

import pytest
import torch.distributed as dist

from megatron_hexi.elastic.store import (
    JOB_VARIABLE,
    ROUND_VARIABLE,
    STORE_VARIABLE,
    Fence,
    begin_present,
    find_present,
    read_present,
)
from megatron_hexi.elastic.training import fencing
from megatron_hexi.elastic.training.fencing import FENCE_PATCHES


def test_a_round_is_closed_by_the_next():
    job = dist.HashStore()
    assert find_present(job) == ""
    begin_present(job, "first", 2, "")
    first = Fence(job, "first")
    assert first.why_closed() is None
    begin_present(job, "second", 1, find_present(job))
    assert read_present(find_present(job)) == ("second", 1)
    assert "this round is over" in (first.why_closed() or "")
    assert Fence(job, "second").why_closed() is None


def test_a_leader_that_was_stopped_before_it_began_its_round_does_not_replace_a_later_one():
    job = dist.HashStore()
    begin_present(job, "first", 2, "")
    seen = find_present(job)
    begin_present(job, "second", 1, seen)
    begin_present(job, "late", 1, seen)
    assert read_present(find_present(job)) == ("second", 1)
    assert Fence(job, "late").why_closed()


@pytest.mark.parametrize("patch", FENCE_PATCHES, ids=lambda patch: patch.target)
def test_a_rank_of_a_round_that_is_over_writes_nothing_and_says_why(monkeypatch, capsys, patch):
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    job = dist.PrefixStore("hexi.job", store)
    written: list[str] = []
    begin_present(job, "own", 2, "")
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
    begin_present(job, "later", 1, find_present(job))
    with pytest.raises(SystemExit) as ended:
        write("afterwards", "folder")
    assert (ended.value.code, written) == (75, ["while present"])
    assert "hexi: elastic: rank 3: this round is over" in capsys.readouterr().err
    monkeypatch.delenv(ROUND_VARIABLE)
    write("in a job that is not elastic", "folder")
    assert len(written) == 2
