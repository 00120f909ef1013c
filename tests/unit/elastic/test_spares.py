"""A spare takes part when a node of the present round is missing, and no earlier."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch.distributed as dist
from torch.distributed.elastic.rendezvous import RendezvousClosedError, RendezvousTimeoutError

from megatron_hexi.elastic.launcher import life
from megatron_hexi.elastic.launcher.life import Life, give_sign, wait_as_spare
from megatron_hexi.elastic.store import PresentRound, add_spare, change_present, find_spares

MOST = 3


@pytest.fixture(autouse=True)
def hasty(monkeypatch):
    monkeypatch.setattr(life, "_LOOK_S", 0.01)
    monkeypatch.setattr(life, "SIGN_S", 0.1)


class Waiting:
    """A job of nodes and of spares, which wait in threads."""

    def __init__(self) -> None:
        self.store, self.came, self.alive = dist.HashStore(), 0, set[str]()
        self.job = dist.PrefixStore("job", self.store)
        threading.Thread(target=self._show_life, daemon=True).start()

    def begin(self, name: str, nodes: int) -> None:
        """Begin a round."""
        self.alive = {f"{name}-{number}" for number in range(nodes)}
        for agent in self.alive:
            give_sign(self.store, agent)
        change_present(self.job, lambda _: PresentRound(name, tuple(self.alive)))

    def end(self) -> None:
        """End the job."""
        change_present(self.job, lambda present: replace(present, is_closed=True))

    def lose(self, count: int) -> None:
        """Lose nodes of the round."""
        for key in sorted(self.alive)[:count]:
            self.alive.remove(key)

    def wait(self) -> None:
        """Wait as a spare."""
        wait_as_spare(Life(self.store), self.job, MOST, 0.3)
        self.came += 1

    def start(self, count: int = 1) -> None:
        """Let spares wait in the background."""
        for _ in range(count):
            threading.Thread(target=self.wait, daemon=True).start()

    def _show_life(self) -> None:
        while True:
            for agent in sorted(self.alive):
                give_sign(self.store, agent)
            time.sleep(0.02)


def until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_it_waits_while_all_are_there_and_comes_for_one_that_is_lost():
    waiting = Waiting()
    waiting.begin("first", MOST)
    waiting.start()
    time.sleep(1)
    waiting.begin("second", MOST)  # after the failure of a rank
    time.sleep(1)
    assert not waiting.came
    waiting.lose(1)
    until(lambda: waiting.came == 1)


def test_it_comes_to_a_round_of_fewer():
    waiting = Waiting()
    waiting.begin("first", MOST - 1)
    waiting.wait()
    assert waiting.came == 1


def test_no_more_come_than_are_missing():
    waiting = Waiting()
    waiting.begin("first", MOST)
    waiting.start(4)
    time.sleep(0.2)
    waiting.lose(2)
    until(lambda: waiting.came == 2)
    time.sleep(1)
    assert waiting.came == 2
    waiting.begin("second", MOST)
    time.sleep(1)
    assert waiting.came == 2


def test_it_comes_where_nobody_is_left():
    waiting = Waiting()
    waiting.begin("first", MOST)
    waiting.lose(MOST)
    begun = time.monotonic()
    waiting.wait()
    assert time.monotonic() - begun > 0.3


def test_it_ends_with_the_job_and_where_none_begins():
    waiting = Waiting()
    with pytest.raises(RendezvousTimeoutError):
        waiting.wait()
    waiting.begin("first", MOST)
    waiting.end()
    with pytest.raises(RendezvousClosedError):
        waiting.wait()


def test_spares_are_found_by_name():
    job = dist.HashStore()
    assert find_spares(job) == {}
    for node, ranks in (("a", 8), ("b", 4), ("a", 8)):
        add_spare(job, node, ranks)
    assert find_spares(job) == {"a": 8, "b": 4}
