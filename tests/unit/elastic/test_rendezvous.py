"""Agents meet for a round, and start their ranks again when they should."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import pytest
import torch.distributed as dist
from torch.distributed.elastic.rendezvous import RendezvousClosedError, RendezvousTimeoutError

from megatron_hexi.elastic.launcher import life, rendezvous
from megatron_hexi.elastic.launcher.life import give_sign, mark_gone
from megatron_hexi.elastic.launcher.rendezvous import Rendezvous
from megatron_hexi.elastic.store import (
    TRAINING,
    WANTED,
    add_spare,
    change_present,
    find_ended,
    read_present,
    set_name,
)
from tests.unit.elastic.test_spares import until

#: What no test waits for.
LONG_S = 100.0


class Job:
    """Agents, each in a thread, that give signs of life until they are silenced."""

    def __init__(self, least: int = 1, most: int = 3, wait_s: float = LONG_S) -> None:
        self.store = dist.HashStore()
        self.job = dist.PrefixStore("job", self.store)
        self._terms, self.agents = (least, most, wait_s), dict[str, Rendezvous]()
        self.alive, self.met = set[str](), dict[str, tuple[int, int] | type]()
        threading.Thread(target=self._show_life, daemon=True).start()

    def come(self, *names: str) -> None:
        """Let agents come for the next round."""
        for name in names:
            if name not in self.agents:
                new_name = partial(next, iter((name, f"{name} again")))
                self.agents[name] = Rendezvous(new_name, "localhost", self.store, self.job, *self._terms)
            self.alive.add(name)
            self.met.pop(name, None)
            threading.Thread(target=self._meet, args=(name,), daemon=True).start()
            until(partial(self._has_come, name))

    def _has_come(self, name: str) -> bool:
        return name in self.met or self.agents[name]._agent in read_present(self.job).here

    def meet(self, *names: str) -> None:
        """Let agents come, and wait until they have met."""
        self.come(*names)
        until(lambda: all(name in self.met for name in names))

    def order(self) -> Sequence[str]:
        """The agents of the present round, as each of them has been told."""
        nodes = read_present(self.job).nodes
        assert all(self.met[name] == (number, len(nodes)) for number, name in enumerate(nodes))
        return nodes

    def _meet(self, name: str) -> None:
        try:
            info = self.agents[name].next_rendezvous()
            self.met[name] = info.rank, info.world_size
        except (RendezvousClosedError, RendezvousTimeoutError) as problem:
            self.met[name] = type(problem)

    def _show_life(self) -> None:
        while True:
            for name in sorted(self.alive):
                give_sign(self.store, name)
            time.sleep(0.05)


@pytest.fixture(autouse=True)
def hasty(monkeypatch):
    monkeypatch.setattr(life, "SIGN_S", 0.5)
    monkeypatch.setattr(rendezvous, "_LAST_CALL_S", LONG_S)


def test_nodes_of_a_round_that_are_all_back_begin_the_next_at_once_in_the_same_order():
    job = Job(most=4)
    job.come("a", "b", "c")
    assert not job.met  # a fourth may come
    job.meet("d")
    until(lambda: len(job.met) == 4)
    assert job.order() == ("a", "b", "c", "d")
    first = read_present(job.job).round
    job.come("d", "c", "b")
    assert not {*job.met} & {"b", "c", "d"}  # a still runs
    job.meet("a")
    until(lambda: len(job.met) == 4)
    assert job.order() == ("a", "b", "c", "d")
    assert read_present(job.job).round != first


@pytest.mark.parametrize("dies", [True, False])
def test_a_node_that_has_ended_or_is_silent_is_left_out(dies):
    job = Job()
    job.meet(*"abc")
    job.alive.remove("b")
    if dies:
        mark_gone(job.store, "b")
    job.meet("c", "a")
    assert job.order() == ("a", "c")
    job.come("d")
    assert read_present(job.job).here == ("d",)
    job.meet("c", "a")
    until(lambda: "d" in job.met)
    assert job.order() == ("a", "c", "d")


def test_a_spare_that_comes_takes_the_place_of_a_lost_node_in_the_next_round():
    job = Job()
    job.meet(*"abc")
    add_spare(job.job, "s", 1)
    mark_gone(job.store, "a")
    job.come("b", "c")
    assert job.met.keys() == {"a"}
    job.meet("s")
    until(lambda: len(job.met) == 4)
    assert job.order() == ("b", "c", "s")


def test_fewer_nodes_begin_after_the_last_call(monkeypatch):
    monkeypatch.setattr(rendezvous, "_LAST_CALL_S", 0.5)
    job = Job(least=2)
    job.come("a")
    time.sleep(1)
    begun = time.monotonic()
    job.meet("b")
    assert time.monotonic() - begun > 0.4
    assert job.order() == ("a", "b")


def test_a_node_whose_connection_broke_comes_under_another_name():
    job = Job()
    job.meet(*"abc")
    mark_gone(job.store, "a")
    assert job.agents["a"].num_nodes_waiting() == 1
    job.meet("b", "c")
    assert job.order() == ("b", "c")
    job.alive.add("a again")
    job.come("a")
    assert read_present(job.job).here == ("a again",)


def test_a_node_that_was_stopped_while_it_waited_comes_again():
    job = Job()
    job.meet(*"abc")
    job.come("a")
    mark_gone(job.store, "a")  # as if it was silent for long
    job.meet("b", "c")
    assert job.order() == ("b", "c")
    until(lambda: read_present(job.job).here == ("a",))


def test_nodes_beyond_the_most_wait_and_end_with_the_job():
    job = Job(most=2)
    job.meet("a", "b")
    job.come("c", "d")
    job.meet("b", "a")
    assert job.order() == ("a", "b")
    assert read_present(job.job).here == ("c", "d")
    job.agents["a"].set_closed()
    until(lambda: job.met.get("c") == job.met.get("d") == RendezvousClosedError)


def test_too_few_nodes_end_after_their_time():
    job = Job(least=2, wait_s=0.3)
    job.come("a")
    until(lambda: job.met.get("a") == RendezvousTimeoutError)
    assert read_present(job.job).here == ()


def test_one_that_was_stopped_as_it_began_a_round_does_not_replace_a_later_one():
    job = Job()
    job.meet(*"abc")
    seen = read_present(job.job)
    job.meet(*"abc")
    now = read_present(job.job)
    job.agents["a"]._begin_round(seen, ["a"])
    assert read_present(job.job) == now


@pytest.fixture
def trained():
    """A job of three, of which two have a part and train."""
    job = Job()
    job.meet(*"abc")
    mark_gone(job.store, "c")
    job.meet("a", "b")
    for number, name in enumerate("ab"):
        job.agents[name].begin_ranks(number, [number])
        set_name(job.agents[name].round, number, 1 - number)  # the plan's order is another
    return job


def test_ranks_that_train_are_told_of_nodes_that_wait_and_others_start_again(trained):
    here = trained.agents["a"]
    assert here.num_nodes_waiting() == 0
    trained.come("d")
    assert here.num_nodes_waiting() == 1
    here.round.set(TRAINING, "")
    assert here.num_nodes_waiting() == 0
    assert here.round.get(WANTED) == b"a node that has come"
    trained.come("e")
    assert here.num_nodes_waiting() == 0
    assert here.round.get(WANTED) == b"a node that has come"  # there is no room for more


def test_a_silent_node_counts_while_ranks_start(trained, monkeypatch):
    monkeypatch.setattr(life, "SIGN_S", 0.05)
    here = trained.agents["a"]
    trained.alive.remove("b")
    until(lambda: here.num_nodes_waiting() == 1)
    here.round.set(TRAINING, "")  # those that train see it by themselves
    assert here.num_nodes_waiting() == 0


def test_a_rank_that_has_ended_is_told_to_agents_and_ranks_at_once(trained):
    here, there = trained.agents["a"], trained.agents["b"]
    for agent in (here, there):
        agent.round.set(TRAINING, "")
        assert agent.num_nodes_waiting() == 0
    there.tell_ended([1], "was ended by SIGKILL")
    here.tell_ended([0], "ended as a consequence")
    assert here.num_nodes_waiting() == there.num_nodes_waiting() == 1
    [words] = find_ended(here.round)
    assert re.fullmatch(r"rank 0 on host .* \(process \d+\), which was ended by SIGKILL", words)


def test_the_ranks_of_a_node_that_has_ended_are_told(trained):
    here = trained.agents["a"]
    here.round.set(TRAINING, "")
    mark_gone(trained.store, "b")
    assert here.num_nodes_waiting() == 1
    [words] = find_ended(here.round)
    assert re.fullmatch("rank 0 on host .*, which has ended with its node, or the agent there", words)


def test_ranks_of_a_job_that_has_ended_are_left_alone(trained):
    here = trained.agents["a"]
    trained.agents["b"].set_closed()
    mark_gone(trained.store, "b")
    assert here.num_nodes_waiting() == 0


def test_ranks_are_started_again_where_others_have_come_or_gone_on(trained, capsys):
    here = trained.agents["a"]
    here.round.set(TRAINING, "")
    trained.come("b")
    assert here.num_nodes_waiting() == 1
    change_present(trained.job, lambda present: replace(present, round="another"))
    assert here.num_nodes_waiting() == 1
    assert "this round is over" in capsys.readouterr().err
