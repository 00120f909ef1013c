"""Heartbeats and faults of a job's ranks, kept in the job's store.

Every rank counts its heartbeats in the store. Two ranks, the first and the last in case one of them is lost,
read all heartbeats and publish the list of silent ranks, which every rank reads. So all heartbeats are read
twice per job, not once per rank. A rank that fails posts a fault. Only the first fault is kept, since later
faults are its consequences.

A request to the store never returns if the store's host is stopped or the link to it is cut (c10d's client
waits without a time-out). All requests are therefore made in a separate thread (`liveness`).
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import datetime

import torch.distributed as dist

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
        seconds: seconds since the last heartbeat.
    """

    rank: int
    place: str
    since: str
    seconds: float


class Heartbeats:
    """One rank's heartbeats, and the faults and silent ranks that it has read from the store.

    Args:
        store: a clone of the job's store, since it is used from another thread.
        clock: function that returns the time in seconds, to measure silences.
    """

    def __init__(
        self, store: dist.Store, rank: int, world_size: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._store = store
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
