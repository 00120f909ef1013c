"""One rank's knowledge of the other ranks: posted faults, silent ranks, and whether the store answers.

Heartbeats are sent and read in a separate thread, since a request to the store may never return and callers
must not wait for it.

Every rank counts its heartbeats in the store. Two ranks, the first and the last in case one of them is lost,
read all heartbeats and publish the list of silent ranks, which every rank reads. So all heartbeats are read
twice per job, not once per rank. Of several faults only the first is kept, since later faults are its
consequences.
"""

from __future__ import annotations

import json
import os
import queue
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import datetime

import torch.distributed as dist

from megatron_hexi.elastic.store import find_ended, in_round, round_store, store_gate
from megatron_hexi.spelling import first_few

#: Seconds between two heartbeats, and the number of ranks that one store can serve at this rate, with 2,000
#: requests per second.
_BEAT_S = 0.5
_RANKS_AT_FULL_RATE = 512
#: Number of missing heartbeats after which a rank counts as silent.
_MISSED_BEATS = 3

_FAULT, _HEARD, _SILENT, _BEAT, _PLACE, _LEFT = "fault", "heard", "silent", "beat", "place", "left"


@dataclass(frozen=True)
class Fault:
    """A fault: the reason why all ranks end, posted by one rank.

    Args:
        message: error message, one line, with the rank's host and process.
    """

    rank: int
    message: str
    code: int


@dataclass(frozen=True)
class Silence:
    """A silent rank, whose heartbeats have stopped.

    Args:
        place: host and process of the rank.
        since: local time of the rank's last heartbeat, as hours, minutes and seconds.
    """

    rank: int
    place: str
    since: str
    seconds: float


class Heartbeats:
    """One rank's heartbeats, and the faults and silent ranks that it has read from the store.

    Args:
        store: a clone of the job's store, since it is used from another thread.
        round_store: the store of an elastic round, in which agents say which ranks have ended.
    """

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        world_size: int,
        clock: Callable[[], float] = time.monotonic,
        round_store: dist.Store | None = None,
    ) -> None:
        self._store, self._round = store, round_store
        self.rank = rank
        self._clock = clock
        self.host = socket.gethostname()
        #: Seconds between two heartbeats.
        self.beat_s = _BEAT_S * max(1.0, world_size / _RANKS_AT_FULL_RATE)
        self._monitors = sorted({0, world_size - 1})
        self._beats = dict.fromkeys(range(world_size) if rank in self._monitors else (), -1)
        self._heard: dict[int, tuple[float, str]] = {}
        #: The first fault that any rank posted.
        self.fault: Fault | None = None
        #: Number of ranks that have read the fault.
        self.heard = 0
        #: Silent ranks, by number.
        self.silent: dict[int, Silence] = {}
        #: Words on the ranks whose end their agents have told.
        self.ended: list[str] = []

    def begin(self) -> None:
        """Register this rank in the store, with its first heartbeat."""
        self._store.set(f"{_PLACE}/{self.rank}", f"host {self.host} (process {os.getpid()})")
        for key in (_FAULT, *(f"{_SILENT}/{monitor}" for monitor in self._monitors)):
            self._store.compare_set(key, "", "")  # makes an empty one where there is none
        self._store.add(_HEARD, 0)
        for rank in self._beats:
            self._store.add(f"{_BEAT}/{rank}", 0)
        self.beat()

    def beat(self) -> None:
        """Send a heartbeat, and read the fault and the silent ranks from the store."""
        self._store.add(f"{_BEAT}/{self.rank}", 1)
        if self._beats:
            self._publish_silent()
        keys = [_FAULT, _HEARD, *(f"{_SILENT}/{monitor}" for monitor in self._monitors)]
        fault, heard, *lists = self._store.multi_get(keys)
        if fault and self.fault is None:
            self.fault = Fault(**json.loads(fault))
            self.heard = self._store.add(_HEARD, 1)
        else:
            self.heard = int(heard)
        entries = [Silence(**entry) for text in lists if text for entry in json.loads(text)]
        self.silent = {entry.rank: entry for entry in entries if entry.rank != self.rank}
        if self._round is not None:
            self.ended = find_ended(self._round)

    def post(self, fault: Fault) -> None:
        """Post a fault for all ranks, unless the store has one already."""
        self._store.compare_set(_FAULT, "", json.dumps(asdict(fault)))

    def leave(self) -> None:
        """Leave the job, so that the rank is no longer counted as silent."""
        self._store.set(f"{_LEFT}/{self.rank}", "")

    def _publish_silent(self) -> None:
        """Read the heartbeats of all ranks, and publish the list of silent ranks."""
        now, seconds = self._clock(), datetime.now().strftime("%H:%M:%S")
        ranks = list(self._beats)
        beats = self._store.multi_get([f"{_BEAT}/{rank}" for rank in ranks])
        for rank, beat in zip(ranks, map(int, beats), strict=True):
            if beat != self._beats[rank]:
                self._beats[rank] = beat
                # A rank that has not begun yet is not silent: the agreement on the plan waits for it.
                if beat > 0:
                    self._heard[rank] = (now, seconds)
        limit = _MISSED_BEATS * self.beat_s
        missed = [rank for rank, (last, _) in self._heard.items() if now - last > limit]
        silent = [rank for rank in missed if not self._store.check([f"{_LEFT}/{rank}"])]
        listed = [self._silence(rank, now) for rank in silent]
        self._store.set(f"{_SILENT}/{self.rank}", json.dumps([asdict(entry) for entry in listed]))

    def _silence(self, rank: int, now: float) -> Silence:
        last, since = self._heard[rank]
        return Silence(rank, self._store.get(f"{_PLACE}/{rank}").decode(), since, round(now - last, 1))


#: Exit code of a rank that ends because another rank failed, without a mistake of the user.
FAILED = 1
#: Number of heartbeats for which a failing rank looks for a rank that failed earlier; a silent rank is known
#: after about six.
_SEARCH_BEATS = 8
#: Number of heartbeats without an answer after which the store counts as lost.
_STORE_BEATS = 5
#: Heartbeats between two looks during the search for a rank that failed earlier.
_LOOKS = 0.2
#: Seconds between two looks at whether all ranks have read a fault.
_LOOK_S = 0.1


class Liveness:
    """The thread that sends one rank's heartbeats and learns the state of the other ranks."""

    def __init__(self, store: dist.Store, rank: int, world_size: int) -> None:
        round_ = round_store().clone() if in_round() else None
        self._heartbeats = Heartbeats(store.clone(), rank, world_size, round_store=round_)
        self._world_size = world_size
        self._store_silent_s = _STORE_BEATS * self._heartbeats.beat_s
        self._outbox: queue.SimpleQueue[Fault | None] = queue.SimpleQueue()
        self._left = threading.Event()
        self._answered, self._answered_at = time.monotonic(), clock_time()
        self._store_failed = False
        self._thread = threading.Thread(target=self._run, name="hexi-heartbeats", daemon=True)
        #: Seconds after which the loss of a rank is known.
        self.search_s = _SEARCH_BEATS * self._heartbeats.beat_s

    def start(self) -> None:
        """Begin to send and read heartbeats."""
        self._thread.start()

    def leave(self) -> None:
        """Leave the job, so that the rank is no longer counted as silent."""
        self._left.set()
        self._outbox.put(None)
        self._thread.join(timeout=self._store_silent_s)

    @property
    def told(self) -> Fault | None:
        """The fault that another rank posted; ``None`` without one."""
        fault = self._heartbeats.fault
        return fault if fault is not None and fault.rank != self._heartbeats.rank else None

    @property
    def silent(self) -> dict[int, Silence]:
        """Silent ranks, by number of the rank."""
        return self._heartbeats.silent

    @property
    def ended(self) -> list[str]:
        """Words on the ranks whose end their agents have told."""
        return self._heartbeats.ended

    def look(self) -> None:
        """Read the state of the other ranks at once, in the thread of heartbeats."""
        self._outbox.put(None)

    @property
    def fault(self) -> Fault | None:
        """The fault that another rank posted, or else a fault for the known loss of ranks or of the store."""
        if self.told is not None:
            return self.told
        if self.ended:
            message = (
                f"lost {first_few(self.ended, comma='; ')}. Look at the end of its log, and at dmesg there"
            )
            return Fault(self._heartbeats.rank, message, FAILED)
        silent = list(self.silent.values())
        if silent:
            places = first_few([f"rank {entry.rank} on {entry.place}" for entry in silent], comma="; ")
            return self._loss(places, silent[0].since)
        if self._store_failed or time.monotonic() - self._answered > self._store_silent_s:
            if gate := store_gate():
                return self._loss(f"the job's store at --rdzv-endpoint {gate}", self._answered_at)
            keeper = "torchrun" if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" else "rank 0"
            host = os.environ.get("MASTER_ADDR", "its host")
            return self._loss(f"{keeper} on host {host}, which keeps the job's store", self._answered_at)
        return None

    def find_fault(self) -> Fault | None:
        """Wait up to `search_s` seconds for a fault, and return it; ``None`` if there is none."""
        deadline = time.monotonic() + self.search_s
        while (fault := self.fault) is None and time.monotonic() < deadline:
            self.look()
            time.sleep(self._heartbeats.beat_s * _LOOKS)
        return fault

    def own_fault(self, message: str, code: int) -> Fault:
        """Build the `Fault` that blames this rank; `tell` posts it."""
        rank, host = self._heartbeats.rank, self._heartbeats.host
        return Fault(rank, f"rank {rank} on host {host}: {message}", code)

    def tell(self, fault: Fault) -> None:
        """Post a fault, unless there is one already, and return when all ranks have read it."""
        if self.ended:  # agents have told the ranks already
            return
        self._outbox.put(fault)
        # The store may end with this rank, so it stays until they have.
        deadline = time.monotonic() + self.search_s
        while (
            self._heartbeats.heard < self._world_size - len(self.silent)
            and not self._store_failed
            and time.monotonic() < deadline
        ):
            time.sleep(_LOOK_S)

    def _run(self) -> None:
        """Send and read heartbeats until this rank leaves the job or the store is lost."""
        try:
            self._heartbeats.begin()
            while not self._left.is_set():
                self._heartbeats.beat()
                self._answered, self._answered_at = time.monotonic(), clock_time()
                try:
                    fault = self._outbox.get(timeout=self._heartbeats.beat_s)
                except queue.Empty:
                    continue
                if fault is not None:
                    self._heartbeats.post(fault)
            self._heartbeats.leave()
        except RuntimeError:  # torch.distributed's errors; the main thread meets them too, and says more
            self._store_failed = True

    def _loss(self, lost: str, since: str) -> Fault:
        message = (
            f"lost {lost}: no heartbeat since {since}. It was killed, is stopped, or is cut off: look at the "
            "end of its log, at dmesg on its host (out of memory?), and at the network"
        )
        return Fault(self._heartbeats.rank, message, FAILED)


def clock_time() -> str:
    """Return the local time, as hours, minutes and seconds."""
    return datetime.now().strftime("%H:%M:%S")
