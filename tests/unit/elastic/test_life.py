"""Signs of life: agents are lost by missing changes and closed connections, whatever clocks of nodes say."""

from __future__ import annotations

import math

import pytest
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from megatron_hexi.elastic.launcher.job_store import keep_store, open_line
from megatron_hexi.elastic.launcher.life import MISSED, SIGN_S, Life, give_sign, mark_gone
from megatron_hexi.lab.testbed.job import free_port
from tests.unit.elastic.test_spares import until


class Watched:
    """Two agents, the clock of the one that watches them, and what it makes of their signs."""

    def __init__(self) -> None:
        self.store, self.now = dist.HashStore(), 0.0
        self.life = Life(self.store, lambda: self.now)

    def pass_second(self, *alive: str) -> set[str]:
        self.now += 1
        for name in alive:
            give_sign(self.store, name)
        return self.life.lost(("here", "there"))


@pytest.fixture
def watched():
    return Watched()


def test_a_node_is_lost_when_it_has_missed_signs(watched):
    assert all(watched.pass_second("here", "there") == set() for _ in range(20))
    lost = [watched.pass_second("here") for _ in range(6)]
    assert lost == [set()] * MISSED + [{"there"}] * 2
    assert watched.pass_second("here", "there") == set()


def test_a_node_is_lost_at_once_when_its_connection_ends(watched):
    watched.pass_second("here", "there")
    mark_gone(watched.store, "there")
    assert watched.life.lost(("here", "there")) == {"there"}
    assert watched.life.silences(("here", "there"))["there"] == math.inf
    give_sign(watched.store, "there")  # a last one, on its way
    assert watched.pass_second("here") == {"there"}


def test_who_was_stopped_himself_drops_nobody(watched):
    watched.pass_second("here", "there")
    watched.now += 30  # stopped, or waited for the store with everybody else
    assert all(watched.pass_second() == set() for _ in range(3))
    assert watched.pass_second() == {"here", "there"}


def test_the_gate_tells_that_an_agent_has_ended():
    port, agent = free_port(), "ab" * 16
    store = keep_store("localhost", port, b"a secret")
    line = open_line(("localhost", port), b"a secret", agent)
    life = Life(store)
    give_sign(store, agent)
    assert life.lost([agent]) == set()
    line.close()
    until(lambda: life.lost([agent]) == {agent})


@given(st.lists(st.tuples(st.floats(1, 60), st.booleans()), min_size=1, max_size=30))
def test_silence_is_the_time_since_the_last_change_less_what_was_not_listened_to(events):
    now, since, store = 0.0, 0.0, dist.HashStore()
    give_sign(store, "one")
    life = Life(store, lambda: now)
    life.silences(["one"])
    for passed, changes in events:
        now += passed
        if changes:
            give_sign(store, "one")
        since = 0.0 if changes else since + min(passed, 2 * SIGN_S)
        assert life.silences(["one"])["one"] == pytest.approx(since)
    assert life.silences([]) == {}
    assert life.silences(["one"]) == {"one": 0.0}
