"""Agents of an elastic job meet: who has ended is not waited for, and who is too many waits for the end."""

from __future__ import annotations

import json
import os
import pickle
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace

import pytest
import torch.distributed as dist
from torch.distributed.elastic.rendezvous import RendezvousParameters
from torch.distributed.elastic.rendezvous import dynamic_rendezvous as torchs

from megatron_hexi.elastic.launcher import agent
from megatron_hexi.elastic.launcher.agent import AgentSettings, run_agent
from megatron_hexi.elastic.launcher.job_store import SignedStore, keep_store
from megatron_hexi.elastic.launcher.losses import RoundLosses
from megatron_hexi.elastic.launcher.presence import AgentName, ended_agents, hold_line
from megatron_hexi.elastic.launcher.rendezvous import PatientRendezvous, RendezvousState
from megatron_hexi.elastic.store import DECIDED, watch_store
from megatron_hexi.lab.testbed.ports import free_port
from megatron_hexi.runtime.heartbeats import Heartbeats

SECRET = b"known to the job's nodes alone"
N0, N1 = AgentName("n0", "localhost", 1), AgentName("n1", "localhost", 2)


@pytest.fixture(autouse=True)
def stores(monkeypatch):
    """As an agent has it: each round's store is the job's."""
    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")


@pytest.fixture
def port():
    return free_port()


@pytest.fixture
def store(port):
    return keep_store("localhost", port, SECRET)


def wait(until: Callable[[], object], seconds: float = 20) -> float:
    begun = time.monotonic()
    while not until():
        assert time.monotonic() - begun < seconds
        time.sleep(0.01)
    return time.monotonic() - begun


def test_an_agent_whose_connection_ends_has_ended_until_one_of_its_name_comes(store, port):
    lines = [hold_line(("localhost", port), SECRET, name) for name in (N0, N1)]
    lines[1].close()
    wait(lambda: ended_agents(store) == {N1})
    again = hold_line(("localhost", port), SECRET, N1)
    wait(lambda: not ended_agents(store))
    again.close()
    lines[0].close()
    wait(lambda: ended_agents(store) == {N0, N1})
    with pytest.raises(ConnectionError):
        hold_line(("localhost", port), b"known to a stranger's nodes", N0)


def meeting(store: dist.TCPStore, address: str, least: int) -> PatientRendezvous:
    """A rendezvous of up to two nodes that gives a silent one up after minutes, by a client of its own."""
    store = dist.TCPStore("127.0.0.1", store.port, wait_for_workers=False, timeout=timedelta(seconds=20))
    parameters = RendezvousParameters(
        "c10d",
        "localhost:1",
        "job",
        least,
        2,
        local_addr=address,
        last_call_timeout=1,
        keep_alive_interval=1,
        keep_alive_max_attempt=100,
        join_timeout=60,
    )
    state = RendezvousState(SignedStore(store, SECRET), "job", store)
    return PatientRendezvous(torchs.create_handler(store, state, parameters), 2)


def inner(rendezvous: PatientRendezvous) -> Any:
    """PyTorch's rendezvous, whose private state a test looks at."""
    return rendezvous._inner


def test_an_agent_that_has_ended_is_not_waited_for(store, port):
    """Though nobody would give it up for silence within the time of this test."""
    one, other = meeting(store, "one", 1), inner(meeting(store, "other", 2))  # the change is a process's
    line = hold_line(("localhost", port), SECRET, AgentName("n1", "other", os.getpid()))
    joins = threading.Thread(target=other.next_rendezvous)
    joins.start()
    wait(lambda: other._state_holder.state.participants)
    assert one.next_rendezvous().world_size == 2
    joins.join()
    other._stop_heartbeats()
    line.close()
    wait(lambda: ended_agents(store))
    begun = time.monotonic()
    assert one.next_rendezvous().world_size == 1
    assert time.monotonic() - begun < 50
    assert vars(torchs)["_delay"].__module__ == "torch.distributed.elastic.rendezvous.utils"
    one.shutdown()


@pytest.mark.parametrize("has_ended", [False, True])
def test_a_round_waits_for_those_that_waited_for_it(store, port, has_ended):
    backend = RendezvousState(SignedStore(store, SECRET), "job", store)
    line = hold_line(("localhost", port), SECRET, N1)
    if has_ended:
        line.close()
        wait(lambda: ended_agents(store))
    waiting, past = torchs._NodeDesc(N1.address, N1.process, 0), datetime.now(UTC) - timedelta(seconds=5)
    state = torchs._RendezvousState()
    state.deadline, state.wait_list, state.last_heartbeats = past, {waiting}, {waiting: past}
    for found in (backend.set_state(pickle.dumps(state)), backend.get_state()):
        assert found is not None
        seen = pickle.loads(found[0])
        assert (seen.deadline > datetime.now(UTC)) != has_ended
        assert (seen.last_heartbeats[waiting] == past) != has_ended


def test_ranks_learn_at_once_which_of_them_have_ended(store, port):
    """Numbered by the plan, which has another order than the ranks were started in, and leaves one out."""
    round_ = dist.PrefixStore("round", store)
    line = hold_line(("localhost", port), SECRET, N1)
    losses = RoundLosses(store, round_, N0, 0, 2, range(2))
    RoundLosses(store, round_, N1, 1, 2, range(2, 4))
    line.close()
    wait(lambda: ended_agents(store))
    losses.look()  # before the round has a plan
    round_.set(DECIDED, json.dumps({"ranks": [3, 0, 1]}))
    ranks = [Heartbeats(watch_store(round_), rank, 3) for rank in range(3)]
    for rank in ranks:
        rank.begin()
    assert not ranks[1].silent
    time.sleep(0.3)
    losses.look()
    ranks[1].beat()
    assert list(ranks[1].silent) == [0]


def test_of_an_agent_s_own_ranks_those_that_were_killed_are_told(store):
    round_ = dist.PrefixStore("round", store)
    losses = RoundLosses(store, round_, N0, 0, 1, range(2, 4))
    round_.set(DECIDED, json.dumps({"ranks": [2, 3]}))
    ranks = [Heartbeats(watch_store(round_), rank, 2) for rank in range(2)]
    for rank in ranks:
        rank.begin()
    losses.tell_own([])
    ranks[0].beat()
    assert not ranks[0].silent
    losses.tell_own([1])
    ranks[0].beat()
    assert list(ranks[0].silent) == [1]


def test_a_node_beyond_the_most_ends_well_with_the_job(store, port, monkeypatch, capsys):
    for name in (WORDS_VARIABLE, "HEXI_AGENT"):
        monkeypatch.setenv(name, "")
    full = [inner(meeting(store, address, 2)) for address in ("one", "other")]
    joins = threading.Thread(target=full[0].next_rendezvous)
    joins.start()
    full[1].next_rendezvous()
    joins.join()
    settings = replace(
        AgentSettings(**dict.fromkeys(AgentSettings.__dataclass_fields__, cast(Any, None))),
        least=1,
        most=2,
        ranks=1,
        host="localhost",
        port=port,
        secret=SECRET,
        job="job",
        node="n2",
        address="localhost",
        max_losses=1,
        lost_after_s=20.0,
        wait_s=60.0,
        start_method="spawn",
        entry="",
        words=(),
    )
    store.set("hexi.job/rounds", "1")  # nobody waits for all nodes to come
    found = SimpleNamespace(code=None)
    third = threading.Thread(target=lambda: setattr(found, "code", run_agent(settings)))
    third.start()
    wait(lambda: full[0].num_nodes_waiting() == 0 and full[0]._state_holder.state.redundancy_list)
    for one in full:
        one.shutdown()
    third.join(20)
    assert found.code == 0
    assert "the job has ended" in capsys.readouterr().err
