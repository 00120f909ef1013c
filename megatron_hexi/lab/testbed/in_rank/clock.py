"""The device's clock: an operation takes its modelled time, whatever the machine needed for it.

An operation really runs; then its rank sleeps until the modelled time is over. Work between two such
operations is not modelled: the processor time that it takes makes the rank late, and the head-room of the
next operations takes that up. Waiting for another rank is no lateness: it takes no processor time.
"""

from __future__ import annotations

import os
import time
from contextlib import suppress
from dataclasses import dataclass, field

#: A rank that is later than this (after a checkpoint, say) gives up: it would run without a pace for long.
GIVE_UP_S = 1.0
_NANO = 1e-9


@dataclass
class PacedTimes:
    """Times of paced operations, in seconds unless said otherwise.

    Args:
        modelled: modelled time, by kind of operation.
        computing: time in which operations computed; for the rest of the modelled time the rank slept.
        excess: time by which operations computed longer than modelled, summed over those that did.
        lost: lateness that was not made up: beyond `GIVE_UP_S`, or left at the end.
        between: processor time and waiting for a core between operations, which are not modelled.
        exposed: part of `between` that delayed a message, so that other ranks may have waited.
        wall: time from the start of the first operation to the end of the last one.
    """

    operations: int = 0
    modelled: dict[str, float] = field(default_factory=dict)
    computing: float = 0.0
    excess: float = 0.0
    lost: float = 0.0
    between: float = 0.0
    exposed: float = 0.0
    wall: float = 0.0


class PacedClock:
    """The clock of the calling thread's rank."""

    def __init__(self) -> None:
        self.pace = PacedTimes()
        self._first = self._last = 0.0
        self._late = 0.0
        self._unsent = 0.0
        self._busy_at = 0.0
        self._schedule: int | None = None
        with suppress(OSError):  # a kernel without schedstats: waiting for a core is then not known
            self._schedule = os.open("/proc/thread-self/schedstat", os.O_RDONLY)

    def begin(self) -> float:
        """Begin an operation.

        Returns:
            The time now, for `end`.
        """
        if self.pace.operations:
            self._note_between()
        else:
            self._first = time.perf_counter()
        return time.perf_counter()

    def end(self, begin: float, kind: str, seconds: float) -> None:
        """End an operation: sleep until its modelled time is over.

        Args:
            seconds: modelled seconds of the operation.
        """
        pace, due, now = self.pace, begin + seconds - self._late, time.perf_counter()
        pace.operations += 1
        pace.modelled[kind] = pace.modelled.get(kind, 0.0) + seconds
        pace.computing += now - begin
        pace.excess += max(0.0, now - begin - seconds)
        if now < due:
            time.sleep(due - now)
            now = time.perf_counter()
        self._late = now - due
        if self._late > GIVE_UP_S:
            pace.lost += self._late
            self._late = 0.0
        self._last = now
        self._busy_at = self._busy()

    def since_first(self, now: float) -> float:
        """Return the seconds since the first operation began."""
        return now - self._first

    def message(self) -> None:
        """Note that a collective or a message is about to be posted."""
        if self.pace.operations:
            self._note_between()
            self.pace.exposed += max(0.0, min(self._late, self._unsent))
            self._unsent = 0.0

    def finish(self) -> PacedTimes:
        """Return the times of all paced operations."""
        self.pace.lost += max(0.0, self._late)
        self._late = 0.0
        self.pace.wall = self._last - self._first
        return self.pace

    def _note_between(self) -> None:
        busy = self._busy()
        spent = busy - self._busy_at
        self._busy_at = busy
        self.pace.between += spent
        self._late += spent
        self._unsent += spent

    def _busy(self) -> float:
        """Return the seconds that this thread has computed or has waited for a core."""
        if self._schedule is None:
            return time.thread_time()
        # Its first number is the time computed too, but only up to the scheduler's last look.
        waited = os.pread(self._schedule, 100, 0).split()[1]
        return time.thread_time() + int(waited) * _NANO
