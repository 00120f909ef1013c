"""The rendezvous of a job's agents: PyTorch's, without clocks, and with other reasons to start ranks."""

from __future__ import annotations

import hashlib
import hmac
import pickle
import time
import uuid
from collections.abc import Hashable
from datetime import UTC, datetime, timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed.elastic.rendezvous import RendezvousInfo, RendezvousStateError
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import (
    DynamicRendezvousHandler,
    RendezvousBackend,
)

from megatron_hexi.elastic import say
from megatron_hexi.elastic.launcher.life import SIGN_S, RoundLife, Silences
from megatron_hexi.elastic.store import BROKEN, TRAINING, WANTED, Fence

_DEADLINE = "deadline"
_DIGEST_BYTES = hashlib.sha256().digest_size


class PatientRendezvous(DynamicRendezvousHandler):
    """Tells ranks of waiting nodes, for which PyTorch's agent would end the ranks at once."""

    #: The store that the present round's ranks share with their agents; ``None``: no ranks run.
    round: dist.Store | None = None
    #: The life of the present round's nodes, its fence, and whether as many as can take part are in it.
    life: RoundLife | None = None
    fence: Fence | None = None
    is_full = False
    _asked_at = 0.0

    def next_rendezvous(self) -> RendezvousInfo:
        """See `RendezvousHandler.next_rendezvous`."""
        self.round = None
        return super().next_rendezvous()

    def num_nodes_waiting(self) -> int:
        """Return the number of nodes for which the ranks are to be started again now.

        It is 0 while ranks train: these are told of waiting nodes in the round's store and end after a
        checkpoint, and notice lost nodes by themselves. Ranks that are still starting would wait for a lost
        node, so it counts. Ranks of a round that is over are started again with this node, which waits.
        """
        waiting: int = super().num_nodes_waiting()
        if self.round is None or self.life is None or self.fence is None or self.round.check([BROKEN]):
            return waiting
        if time.monotonic() > self._asked_at + SIGN_S:
            self._asked_at = time.monotonic()
            if closed := self.fence.why_closed():
                say(f"{closed}. This node's ranks end; it waits to be taken in")
                return 1
        trains = self.round.check([TRAINING])
        lost = self.life.count_lost() if waiting or not trains else 0
        # PyTorch counts those nodes, too, for which a round that is full had no room.
        waiting = min(waiting, lost) if self.is_full else waiting
        if not trains:
            return max(waiting, lost)
        if waiting:
            self.round.set(WANTED, str(waiting))
        return 0


class ClocklessBackend(RendezvousBackend):
    """Keeps the state of PyTorch's rendezvous without times, which clocks of nodes would read differently.

    PyTorch writes times by its node's clock: each node's last sign of life, and the end of the last call for
    further nodes. It compares them with the clock of the node that reads them, so nodes whose clocks differ
    or are set drop each other. Here a random mark is stored in place of each time, and a node that reads it
    reckons from the moment at which it first saw this mark (`Silences`).

    The state is a pickle, so it is signed: only what a holder of the job's secret wrote is unpickled.
    """

    def __init__(self, inner: RendezvousBackend, job: str, secret: bytes, last_call_s: float) -> None:
        self._inner, self._secret = inner, secret
        self._about = f"megatron-hexi rendezvous\0{job}\0".encode()
        self._last_call = timedelta(seconds=last_call_s)
        self._silences = Silences()
        self._read: dict[Hashable, tuple[datetime, str]] = {}

    @property
    def name(self) -> str:
        """See `RendezvousBackend.name`."""
        return str(self._inner.name)

    def get_state(self) -> tuple[bytes, Any] | None:
        """See `RendezvousBackend.get_state`."""
        found = self._inner.get_state()
        return found and (self._with_times(found[0]), found[1])

    def set_state(self, state: bytes, token: Any = None) -> tuple[bytes, Any, bool] | None:
        """See `RendezvousBackend.set_state`."""
        found = self._inner.set_state(self._with_marks(state), token)
        return found and (self._with_times(found[0]), found[1], found[2])

    def _with_times(self, signed: bytes) -> bytes:
        """Return a state of the store as PyTorch reads it, with times by this node's clock.

        Raises:
            RendezvousStateError: it was not signed by a holder of the secret.
        """
        digest, pickled = signed[:_DIGEST_BYTES], signed[_DIGEST_BYTES:]
        if not hmac.compare_digest(digest, self._sign(pickled)):
            raise RendezvousStateError("somebody without the job's secret wrote the rendezvous in its store")
        state, now = pickle.loads(pickled), datetime.now(UTC)
        marks: dict[Hashable, str] = dict(state.last_heartbeats)
        if state.deadline is not None:
            marks[_DEADLINE] = state.deadline
        silent = self._silences.look(marks)
        times = {key: now - timedelta(seconds=seconds) for key, seconds in silent.items()}
        if state.deadline is not None:
            times[_DEADLINE] += self._last_call
            state.deadline = times[_DEADLINE]
        self._read = {key: (times[key], mark) for key, mark in marks.items()}
        state.last_heartbeats = {node: times[node] for node in state.last_heartbeats}
        return pickle.dumps(state)

    def _with_marks(self, pickled: bytes) -> bytes:
        """Return a state of PyTorch's as the store keeps it, signed: times that are new get new marks."""
        state = pickle.loads(pickled)
        state.last_heartbeats = {node: self._mark(node, at) for node, at in state.last_heartbeats.items()}
        if state.deadline is not None:
            state.deadline = self._mark(_DEADLINE, state.deadline)
        marked = pickle.dumps(state)
        return self._sign(marked) + marked

    def _sign(self, pickled: bytes) -> bytes:
        return hmac.digest(self._secret, self._about + pickled, "sha256")

    def _mark(self, key: Hashable, at: datetime) -> str:
        read, mark = self._read.get(key, (None, ""))
        return mark if at == read else uuid.uuid4().hex
