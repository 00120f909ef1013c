"""Heartbeats: who is silent is published by two ranks for all; the first fault stays."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from megatron_hexi.runtime.liveness import Fault, Heartbeats

RANKS = 4


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


class Job:
    """Heartbeats of all ranks over one store, whose time goes by beats."""

    def __init__(self, ranks=RANKS):
        self.clock = Clock()
        store = dist.HashStore()
        self.ranks = [Heartbeats(store, rank, ranks, self.clock) for rank in range(ranks)]
        for rank in self.ranks:
            rank.begin()

    def beats(self, count, without=()):
        for _ in range(count):
            self.clock.now += self.ranks[0].beat_s
            for number, rank in enumerate(self.ranks):
                if number not in without:
                    rank.beat()

    def silent(self, without=()):
        """Who is silent, as each of the others has heard; the same for all of them."""
        [heard] = {
            tuple(sorted(rank.silent)) for number, rank in enumerate(self.ranks) if number not in without
        }
        return list(heard)


@pytest.fixture
def job():
    return Job()


@pytest.mark.parametrize("gone", [[0], [1], [3], [1, 2], [0, 1, 2]], ids=str)
def test_who_misses_beats_is_silent_to_all_others(gone, job):
    job.beats(5)
    assert job.silent() == []
    job.beats(3, without=gone)
    assert job.silent(without=gone) == []
    job.beats(3, without=gone)
    assert job.silent(without=gone) == gone
    silence = next(rank for number, rank in enumerate(job.ranks) if number not in gone).silent[gone[0]]
    # As of the last list that was published before this rank's own beat.
    assert 5 <= silence.seconds / job.ranks[0].beat_s <= 6
    assert "process" in silence.place
    job.beats(2)
    assert job.silent() == []


def test_a_rank_that_left_or_has_not_come_yet_is_not_silent():
    job = Job()
    late = Heartbeats(job.ranks[0]._store, 1, RANKS, job.clock)
    job.beats(2)
    job.ranks[2].leave()
    job.beats(10, without=[2])
    assert job.silent(without=[2]) == []
    assert late.fault is None


def test_the_first_fault_stays(job):
    first, second = Fault(2, "value 7; give 6", 2), Fault(1, "its consequence", 1)
    job.ranks[2].post(first)
    job.ranks[1].post(second)
    job.beats(1)
    assert [rank.fault for rank in job.ranks] == [first] * RANKS
    job.beats(1)
    assert [rank.heard for rank in job.ranks] == [RANKS] * RANKS


def test_ranks_of_a_large_job_ask_the_store_less_often():
    store = dist.HashStore()
    small, large = (Heartbeats(store, 0, ranks).beat_s for ranks in (512, 4096))
    assert large == 8 * small
