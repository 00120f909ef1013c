"""The rendezvous tells who is there by what changes, not by clocks: those of nodes may differ and be set."""

from __future__ import annotations

import pickle
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import RendezvousBackend

from megatron_hexi.elastic.launcher import rendezvous
from megatron_hexi.elastic.launcher.life import MISSED, SIGN_S, Silences
from megatron_hexi.elastic.launcher.rendezvous import ClocklessBackend

LAST_CALL_S = 1.0


class Shared(RendezvousBackend):
    """A backend in memory, as PyTorch's over a store."""

    def __init__(self) -> None:
        self.state: bytes | None = None
        self.writes = 0

    @property
    def name(self) -> str:
        return "shared"

    def get_state(self) -> tuple[bytes, Any] | None:
        return None if self.state is None else (self.state, self.writes)

    def set_state(self, state: bytes, token: Any = None) -> tuple[bytes, Any, bool] | None:
        if (token or 0) == self.writes:
            self.state, self.writes = state, self.writes + 1
        assert self.state is not None
        return self.state, self.writes, self.state == state


def stored(shared: Shared) -> Any:
    """The state in the store, behind its signature."""
    assert shared.state is not None
    return pickle.loads(shared.state[32:])


class Node:
    """A node with a wall clock of its own, which PyTorch's rendezvous reads and writes."""

    def __init__(self, shared: Shared, name: str, ahead_s: float) -> None:
        self.name, self.ahead_s, self.run_s = name, ahead_s, 0.0
        self.backend = ClocklessBackend(shared, "job", b"secret", LAST_CALL_S)
        self.backend._silences = Silences(lambda: self.run_s)
        self.token: Any = None
        self.state = SimpleNamespace(last_heartbeats={}, deadline=None)

    def now(self, *_: Any) -> datetime:
        return datetime.fromtimestamp(1e9 + self.run_s + self.ahead_s, UTC)

    def read(self) -> SimpleNamespace:
        found = self.backend.get_state()
        if found is not None:
            self.state, self.token = pickle.loads(found[0]), found[1]
        return self.state

    def write(self) -> bool:
        found = self.backend.set_state(pickle.dumps(self.state), self.token)
        assert found is not None
        self.state, self.token = pickle.loads(found[0]), found[1]
        return found[2]

    def beat(self) -> None:
        self.read()
        self.state.last_heartbeats[self.name] = self.now()
        assert self.write()

    def dead(self) -> set[str]:
        """The nodes that PyTorch drops, as `_sanitize` there does."""
        limit = self.now() - timedelta(seconds=SIGN_S * MISSED)
        return {name for name, at in self.read().last_heartbeats.items() if at < limit}


@pytest.fixture
def nodes(monkeypatch):
    current: list[Node] = []
    monkeypatch.setattr(rendezvous, "datetime", SimpleNamespace(now=lambda _: current[0].now()))
    shared = Shared()

    def act(node: Node, does: str) -> Any:
        current[:] = [node]
        return getattr(node, does)()

    return SimpleNamespace(make=lambda name, ahead_s=0.0: Node(shared, name, ahead_s), act=act, shared=shared)


@pytest.mark.parametrize("ahead", [-8.0, 6.0, 3600.0])
@pytest.mark.parametrize("steps", [False, True])
def test_a_node_is_dropped_when_it_falls_silent_whatever_clocks_say(nodes, ahead, steps):
    here, there = nodes.make("here"), nodes.make("there", 0.0 if steps else ahead)
    for second in range(40):
        here.run_s = there.run_s = float(second)
        if steps and second == 10:
            there.ahead_s = ahead
        nodes.act(here, "beat")
        if second < 20:
            nodes.act(there, "beat")
            assert nodes.act(there, "dead") == set()
        # A sign of second 19 is 4 s old in second 23.
        assert nodes.act(here, "dead") == ({"there"} if second > 23 else set()), second


def test_who_was_stopped_himself_drops_nobody(nodes):
    here, there = nodes.make("here"), nodes.make("there")
    for node in (here, there):
        nodes.act(node, "beat")
    nodes.act(here, "read")
    here.run_s = 30.0  # stopped, or waited for the store with everybody else
    assert nodes.act(here, "dead") == set()
    for second in range(31, 34):
        here.run_s = float(second)
        assert nodes.act(here, "dead") == (set() if second < 33 else {"here", "there"})


def test_the_last_call_ends_for_each_when_he_has_heard_it_for_so_long(nodes):
    here, there = nodes.make("here"), nodes.make("there", 3600.0)
    here.state.deadline = here.now() + timedelta(seconds=LAST_CALL_S)
    nodes.act(here, "write")
    for second, over in ((0.0, False), (0.9, False), (1.1, True)):
        here.run_s = there.run_s = second
        for node in (here, there):
            assert (nodes.act(node, "read").deadline < node.now()) == over
    there.state.deadline = None
    assert nodes.act(there, "write")
    assert nodes.act(here, "read").deadline is None


def test_what_others_have_written_is_written_back_as_it_was(nodes):
    here, there = nodes.make("here"), nodes.make("there", 3600.0)
    nodes.act(here, "beat")
    mark = stored(nodes.shared).last_heartbeats["here"]
    there.run_s = 2.0
    nodes.act(there, "beat")
    marks = stored(nodes.shared).last_heartbeats
    assert marks["here"] == mark != marks["there"]
    # One that wrote meanwhile is not overwritten.
    nodes.act(here, "read")
    here.run_s = there.run_s = 3.0
    nodes.act(there, "beat")
    here.state.last_heartbeats["here"] = here.now()
    assert not nodes.act(here, "write")


@given(st.lists(st.tuples(st.floats(0, 60), st.booleans()), min_size=1, max_size=30))
def test_silence_is_the_time_since_the_last_change_less_what_was_not_listened_to(events):
    now, count, since = 0.0, 0, None
    silence = Silences(lambda: now)
    for passed, changes in events:
        now += passed
        count += changes
        heard = min(passed, 2 * SIGN_S)
        since = 0.0 if since is None or changes else since + heard
        assert silence.look({"key": count})["key"] == pytest.approx(since)
    assert silence.look({}) == {}
    assert silence.look({"key": count}) == {"key": 0.0}
