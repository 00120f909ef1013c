"""Signs of life of agents, by which agents and spares see that a node is lost.

The store's gate notices at once where an agent's process has ended, by its connection (`job_store`). A node
without power or network is noticed by the signs that it does not give.

A spare node waits, with Megatron imported, until a node of the job is missing. It has no part in the rounds
that it waits through, so it may come and end without stopping anything.
"""

from __future__ import annotations

import math
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from contextlib import suppress
from datetime import timedelta
from typing import Self

import torch.distributed as dist
from torch.distributed.elastic.rendezvous import RendezvousClosedError, RendezvousTimeoutError

from megatron_hexi.elastic import say
from megatron_hexi.elastic.store import read_present

_STORE_S = 10.0
#: Seconds between two signs of life of an agent, and how many may be missed.
SIGN_S, MISSED = 1, 4


class StoreThread(ABC):
    """Attends to the store at regular intervals, from entering its context until leaving it."""

    def __init__(self, name: str, store: tuple[str, int], interval_s: float) -> None:
        self._store, self._interval_s = store, interval_s
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *raised: object) -> None:
        self._stopped.set()
        self._thread.join(_STORE_S)

    @abstractmethod
    def _attend(self, store: dist.Store) -> None:
        """Attend to the store; a `RuntimeError` of it is taken for its absence."""

    def _run(self) -> None:
        store: dist.Store | None = None
        while not self._stopped.wait(self._interval_s):
            # Where the store is gone for good, the agent says so and ends the node.
            with suppress(RuntimeError):
                if store is None:
                    host, port = self._store
                    limit = timedelta(seconds=_STORE_S)
                    store = dist.TCPStore(host, port, wait_for_workers=False, timeout=limit)
                self._attend(store)


class LifeSigns(StoreThread):
    """Shows in the store that an agent runs; a context manager."""

    #: Name of the agent; empty: it has none yet.
    agent = ""

    def __init__(self, port: int) -> None:
        super().__init__("hexi-life", ("127.0.0.1", port), SIGN_S)

    def _attend(self, store: dist.Store) -> None:
        if self.agent:
            give_sign(store, self.agent)


#: Keys in the store, without a job's prefix: how many agents are gone, and the signs of one.
_GONE, _SIGNS = "gone", "life"
#: So much less than no sign have those that are gone.
_NEVER = -(1 << 40)


def give_sign(store: dist.Store, agent: str, count: int = 1) -> None:
    """Give signs of an agent's life, before others may look for them."""
    store.add(f"{_SIGNS}/{agent}", count)


def mark_gone(store: dist.Store, agent: str) -> None:
    """Record that an agent has ended; called by the gate."""
    give_sign(store, agent, _NEVER)
    store.add(_GONE, 1)


class Life:
    """Tells for how long agents have been silent, by what changes: nobody's clock that can be set is asked.

    Args:
        store: the store of the rendezvous, without a prefix for its keys.
        clock: this node's seconds.
    """

    def __init__(self, store: dist.Store, clock: Callable[[], float] = time.monotonic) -> None:
        self._store, self._clock = store, clock
        self._gone, self._looked_at, self._listened_s = -1, clock(), 0.0
        #: The signs of each agent, and the seconds that had been listened to when they last changed.
        self._seen: dict[str, tuple[int, float]] = {}

    def silences(self, agents: Iterable[str]) -> dict[str, float]:
        """Return the silence (s) of each agent that has given signs; infinite where its process has ended."""
        names, now, gone = set(agents), self._clock(), int(self._store.add(_GONE, 0))
        if names != self._seen.keys() or gone != self._gone or now > self._looked_at + SIGN_S / 2:
            # Between two looks at most two signs can be missed: a process that was stopped itself, or that
            # waited for the store, has not listened.
            self._listened_s += min(now - self._looked_at, 2 * SIGN_S)
            self._gone, self._looked_at, before = gone, now, self._seen
            signs = self._store.multi_get([f"{_SIGNS}/{name}" for name in names]) if names else []
            self._seen = {
                name: (int(sign), self._listened_s) for name, sign in zip(names, signs, strict=True)
            }
            self._seen |= {
                name: seen for name, seen in before.items() if seen[0] == self._seen.get(name, (0,))[0]
            }
        return {
            name: self._listened_s - at if signs > 0 else math.inf for name, (signs, at) in self._seen.items()
        }

    def lost(self, agents: Iterable[str], missed: int = MISSED) -> set[str]:
        """Return the agents that have ended, or have missed more signs than `missed`."""
        return {name for name, seconds in self.silences(agents).items() if seconds > SIGN_S * missed}


#: Key of the job, with a round's name: how many spares have asked for a place.
_ASKED = "asked"
_LOOK_S = 0.1


def wait_as_spare(life: Life, job: dist.Store, most: int, limit_s: float) -> None:
    """Wait until the job needs this spare node: until fewer nodes are alive than can take part.

    Raises:
        RendezvousClosedError: the job has ended.
        RendezvousTimeoutError: no round has begun within `limit_s`.
    """
    deadline = time.monotonic() + limit_s
    say(f"waits as a spare until fewer than {most} nodes are left")
    seen, place = "", 0
    while not (present := read_present(job)).is_closed:
        if not present.round and time.monotonic() > deadline:
            raise RendezvousTimeoutError
        if present.round != seen:
            seen, place = present.round, 0
        alive = len(present.nodes) - len(life.lost(present.nodes))
        if present.round and alive < most:
            # Each spare asks once a round, so that no more come than are missing.
            place = place or job.add(f"{_ASKED}/{seen}", 1)
            if place <= most - alive:
                say(f"takes part: {alive} of {most} nodes are left")
                return
        time.sleep(_LOOK_S)
    raise RendezvousClosedError
