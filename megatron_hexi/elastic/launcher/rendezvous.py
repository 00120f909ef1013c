"""PyTorch's rendezvous, in which the agents of a job's nodes meet before each round, with three changes.

Ranks are told of nodes that wait, for which PyTorch would end them at once. An agent that has ended is not
waited for, and one that is there is, however busy its machine. And while nodes meet they look for each other
more often than once a second.
"""

from __future__ import annotations

import contextlib
import pickle
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo
from torch.distributed.elastic.rendezvous import dynamic_rendezvous as torchs
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend

from megatron_hexi.elastic.launcher.presence import ended_agents
from megatron_hexi.elastic.store import BROKEN, TRAINING, WANTED

#: Seconds between two looks while nodes meet: as often as one store can answer all of them.
_LEAST_LOOK_S, _LOOKS_PER_S = 0.1, 320
_LONG_AGO = datetime.min.replace(tzinfo=UTC)
_LAST_CALL = timedelta(seconds=1)


class RendezvousState(C10dRendezvousBackend):
    """The state of the rendezvous as an agent is to see it.

    Agents that have ended count as silent for long. A round does not begin while nodes that were waiting for
    it have yet to join.

    Args:
        store: the part of the store that keeps the state.
        job: name of the job.
        ended: the store with the agents that have ended.
    """

    def __init__(self, store: Any, job: str, ended: dist.Store) -> None:
        super().__init__(store, job)
        self._ended = ended

    def get_state(self) -> tuple[bytes, Any] | None:
        """See `RendezvousBackend.get_state`."""
        found = super().get_state()
        return found and (self._seen(found[0]), found[1])

    def set_state(self, state: bytes, token: Any = None) -> tuple[bytes, Any, bool] | None:
        """See `RendezvousBackend.set_state`."""
        found = super().set_state(state, token)
        return found and (self._seen(found[0]), *found[1:])

    def _seen(self, bits: bytes) -> bytes:
        state = pickle.loads(bits)  # signed with the job's secret
        processes = {(agent.address, agent.process) for agent in ended_agents(self._ended)}
        gone = {node for node in state.last_heartbeats if (node.addr, node.pid) in processes}
        state.last_heartbeats |= dict.fromkeys(gone, _LONG_AGO)
        if state.deadline is not None and state.wait_list - gone:
            state.deadline = datetime.now(UTC) + _LAST_CALL
        return pickle.dumps(state)


class PatientRendezvous(RendezvousHandler):
    """A rendezvous that tells ranks of waiting nodes, for which PyTorch's agent would end the ranks at once.

    Args:
        inner: PyTorch's rendezvous.
        nodes: the most nodes that meet.
    """

    def __init__(self, inner: RendezvousHandler, nodes: int) -> None:
        self._inner, self._look_s = inner, min(1.0, max(_LEAST_LOOK_S, nodes / _LOOKS_PER_S))
        #: The store that the present round's ranks share with their agents; ``None``: no ranks run.
        self.round: dist.Store | None = None
        #: When this agent went to meet the others, and when they had met, seconds since the epoch.
        self.met_from = self.met_at = 0.0

    def next_rendezvous(self) -> RendezvousInfo:
        """See `RendezvousHandler.next_rendezvous`."""
        self.round, self.met_from = None, time.time()
        with _looking(self._inner, self._look_s):
            found = self._inner.next_rendezvous()
        self.met_at = time.time()
        return found

    def num_nodes_waiting(self) -> int:
        """Return the number of waiting nodes; 0 while ranks train.

        Training ranks are told of waiting nodes in the round's store, and end after a checkpoint.
        """
        waiting = self._inner.num_nodes_waiting()
        trains = waiting > 0 and self.round is not None and self.round.check([TRAINING])
        if trains and self.round is not None and not self.round.check([BROKEN]):
            self.round.set(WANTED, str(waiting))
            return 0
        return waiting

    def get_backend(self) -> str:
        """See `RendezvousHandler.get_backend`."""
        return self._inner.get_backend()

    @property
    def use_agent_store(self) -> bool:
        """See `RendezvousHandler.use_agent_store`."""
        return self._inner.use_agent_store

    def is_closed(self) -> bool:
        """See `RendezvousHandler.is_closed`."""
        return self._inner.is_closed()

    def set_closed(self) -> None:
        """See `RendezvousHandler.set_closed`."""
        self._inner.set_closed()

    def get_run_id(self) -> str:
        """See `RendezvousHandler.get_run_id`."""
        return self._inner.get_run_id()

    def shutdown(self) -> bool:
        """See `RendezvousHandler.shutdown`."""
        return self._inner.shutdown()


@contextlib.contextmanager
def _looking(inner: Any, look_s: float) -> Iterator[None]:
    """Context in which PyTorch's rendezvous waits so long between two looks at its state, not a second."""
    holder, delay = inner._state_holder, torchs._delay  # type: ignore[attr-defined]
    kept_s, holder._cache_duration = holder._cache_duration, 0

    def look(seconds: float | tuple[float, float]) -> None:
        time.sleep(look_s)

    setattr(torchs, "_delay", look)  # noqa: B010
    try:
        yield
    finally:
        setattr(torchs, "_delay", delay)  # noqa: B010
        holder._cache_duration = kept_s
