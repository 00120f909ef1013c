"""What one rank knows of the others: who has told a fault, who has fallen silent, whether the store answers.

Heartbeats are sent and read in a thread of their own: a request to the store may never return, and who waits
for what is known here must not wait for that.
"""

from __future__ import annotations

import os
import queue
import threading
import time
from datetime import datetime

import torch.distributed as dist

from megatron_hexi.runtime.heartbeats import Fault, Heartbeats, Silence

#: Exit code of a rank that ends because something happened to another that is no mistake of the user's.
FAILED = 1
#: How many heartbeats a rank that fails looks for another that failed before it. Silence shows after about
#: six.
_SEARCH_BEATS = 8
#: Without an answer for so many heartbeats, the store counts as gone.
_STORE_BEATS = 5
#: Seconds between two looks while one searches.
_LOOK_S = 0.1
#: A message names so many silent ranks.
_NAMED = 8


class Liveness:
    """One rank's knowledge of the others.

    Args:
        store: the job's store.
        rank: this rank's number in the job.
        world_size: ranks of the job.
    """

    def __init__(self, store: dist.Store, rank: int, world_size: int) -> None:
        self._heartbeats = Heartbeats(store.clone(), rank, world_size)
        self._world_size = world_size
        self._store_silent_s = _STORE_BEATS * self._heartbeats.beat_s
        self._outbox: queue.SimpleQueue[Fault | None] = queue.SimpleQueue()
        self._left = threading.Event()
        self._answered, self._answered_at = time.monotonic(), clock_time()
        self._store_failed = False
        self._thread = threading.Thread(target=self._run, name="hexi-heartbeats", daemon=True)
        #: Seconds after which a rank that is gone is known to be.
        self.search_s = _SEARCH_BEATS * self._heartbeats.beat_s

    def start(self) -> None:
        """Begin to be heard of, and to hear."""
        self._thread.start()

    def leave(self) -> None:
        """Be missed by nobody from now on."""
        self._left.set()
        self._outbox.put(None)
        self._thread.join(timeout=self._store_silent_s)

    @property
    def told(self) -> Fault | None:
        """What another rank told."""
        fault = self._heartbeats.fault
        return fault if fault is not None and fault.rank != self._heartbeats.rank else None

    @property
    def silent(self) -> dict[int, Silence]:
        """Ranks without a heartbeat, by number."""
        return self._heartbeats.silent

    @property
    def fault(self) -> Fault | None:
        """What another rank told, or else who is gone, as far as that is known by now."""
        if self.told is not None:
            return self.told
        silent = list(self.silent.values())
        if silent:
            places = "; ".join(f"rank {one.rank} on {one.place}" for one in silent[:_NAMED])
            more = f"; and {len(silent) - _NAMED} more" if len(silent) > _NAMED else ""
            return self._loss(places + more, silent[0].since)
        if self._store_failed or time.monotonic() - self._answered > self._store_silent_s:
            keeper = "torchrun" if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" else "rank 0"
            host = os.environ.get("MASTER_ADDR", "its host")
            return self._loss(f"{keeper} on host {host}, which keeps the job's store", self._answered_at)
        return None

    def find_fault(self) -> Fault | None:
        """What is known of the others; waits for it, at most some seconds."""
        deadline = time.monotonic() + self.search_s
        while (fault := self.fault) is None and time.monotonic() < deadline:
            time.sleep(_LOOK_S)
        return fault

    def own_fault(self, message: str, code: int) -> Fault:
        """What this rank tells of itself."""
        rank, host = self._heartbeats.rank, self._heartbeats.host
        return Fault(rank, f"rank {rank} on host {host}: {message}", code)

    def tell(self, fault: Fault) -> None:
        """Tell all ranks, unless one of them told something before; returns when they have heard it."""
        self._outbox.put(fault)
        # The store may end with this rank: it stays until they have.
        deadline = time.monotonic() + self.search_s
        while (
            self._heartbeats.heard < self._world_size - len(self.silent)
            and not self._store_failed
            and time.monotonic() < deadline
        ):
            time.sleep(_LOOK_S)

    def _run(self) -> None:
        """Send and read heartbeats until this rank leaves or the store is gone."""
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

    def _loss(self, who: str, since: str) -> Fault:
        message = (
            f"lost {who}: no heartbeat since {since}. It was killed, is stopped, or is cut off: look at the "
            "end of its log, at dmesg on its host (out of memory?), and at the network"
        )
        return Fault(self._heartbeats.rank, message, FAILED)


def clock_time() -> str:
    """Local time, as hours, minutes and seconds."""
    return datetime.now().strftime("%H:%M:%S")
