"""Signs of life of the agents of a round, by which agents and spares see that a node is lost.

A spare node waits, with Megatron imported, until a node of the job is missing. It has no part in the rounds
that it waits through, not even in PyTorch's rendezvous, so it may come and end without stopping anything.

PyTorch's rendezvous has signs of its own, but does not show them. Its numbers are taken here, too.
"""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Mapping
from contextlib import suppress
from datetime import timedelta
from typing import Self

import torch.distributed as dist
from torch.distributed.elastic.rendezvous import RendezvousClosedError, RendezvousTimeoutError

from megatron_hexi.elastic import say
from megatron_hexi.elastic.store import find_present, read_present

_STORE_S = 10.0


class RoundThread(ABC):
    """Attends to the present round at regular intervals, from entering its context until leaving it."""

    def __init__(self, name: str, store: tuple[str, int], interval_s: float) -> None:
        self._store, self._interval_s = store, interval_s
        self._round: tuple[str, int] | None = None
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *raised: object) -> None:
        self._round = None
        self._stopped.set()
        self._thread.join(_STORE_S)

    def begin_round(self, name: str, number: int) -> None:
        """Begin a round, whose ranks are about to start."""
        self._round = name, number

    @abstractmethod
    def _attend(self, store: dist.Store, name: str, number: int) -> None:
        """Attend to a round; a `RuntimeError` of the store is taken for its absence."""

    def _run(self) -> None:
        store: dist.Store | None = None
        while not self._stopped.wait(self._interval_s):
            # Where the store is gone for good, the agent says so and ends the node.
            with suppress(RuntimeError):
                if store is None:
                    host, port = self._store
                    limit = timedelta(seconds=_STORE_S)
                    store = dist.TCPStore(host, port, wait_for_workers=False, timeout=limit)
                if self._round is not None:
                    self._attend(store, *self._round)


#: Key in a round's store: how many spares have asked for a place.
_ASKED = "asked"
_LOOK_S = 0.2


def wait_as_spare(
    store: dist.Store, job: dist.Store, most: int, is_closed: Callable[[], bool], limit_s: float
) -> None:
    """Wait until the job needs this spare node: until fewer nodes are alive than can take part.

    Args:
        store: the store of the rendezvous, without a prefix for its keys.

    Raises:
        RendezvousClosedError: the job has ended.
        RendezvousTimeoutError: no round has begun within `limit_s`.
    """
    deadline = time.monotonic() + limit_s
    say(f"waits as a spare until fewer than {most} nodes are left")
    while not find_present(job):
        if time.monotonic() > deadline:
            raise RendezvousTimeoutError
        time.sleep(_LOOK_S)
    seen, life, place = "", None, 0
    while not is_closed():
        name, nodes = read_present(find_present(job))
        present = dist.PrefixStore(name, store)
        if life is None or name != seen:
            seen, life, place = name, RoundLife(present, nodes, MISSED), 0
        alive = nodes - life.count_lost()
        if alive < most:
            # Each spare asks once a round, so that no more come than are missing.
            place = place or present.add(_ASKED, 1)
            if place <= most - alive:
                say(f"takes part: {alive} of {most} nodes are left")
                return
        time.sleep(_LOOK_S)
    raise RendezvousClosedError


#: Seconds between two signs of life of an agent, and how many may be missed.
SIGN_S, MISSED = 1, 4


class LifeSigns(RoundThread):
    """Shows in the store of the present round that this node's agent runs; a context manager."""

    def __init__(self, port: int) -> None:
        super().__init__("hexi-life", ("127.0.0.1", port), SIGN_S)

    def _attend(self, store: dist.Store, name: str, number: int) -> None:
        dist.PrefixStore(name, store).add(_key(number), 1)


class Silences:
    """Measures for how long values of other nodes have not changed, whatever their clocks or this one's say.

    Between two looks at most two signs can be missed: a process that was stopped itself, or that waited for
    the store, has not listened.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._looked_at = clock()
        self._listened_s = 0.0
        self._seen: dict[Hashable, tuple[object, float]] = {}

    def look[Key: Hashable](self, values: Mapping[Key, object]) -> dict[Key, float]:
        """Return the seconds for which each value has not changed; those that are left out are forgotten."""
        now = self._clock()
        self._listened_s += min(now - self._looked_at, 2 * SIGN_S)
        self._looked_at = now
        self._seen = {
            key: (value, self._seen[key][1] if self._seen.get(key, ())[:1] == (value,) else self._listened_s)
            for key, value in values.items()
        }
        return {key: self._listened_s - self._seen[key][1] for key in values}


class RoundLife:
    """Counts the nodes of a round that are there."""

    def __init__(self, store: dist.Store, nodes: int, missed: int) -> None:
        self._store, self._missed = store, missed
        self._keys = [_key(number) for number in range(nodes)]
        for key in self._keys:  # those of agents that have not shown life yet
            store.add(key, 0)
        self._silences = Silences()
        self._looked_at, self._lost = 0.0, 0

    def count_lost(self) -> int:
        """Return the number of nodes that have shown no life lately."""
        now = time.monotonic()
        if now > self._looked_at + SIGN_S / 2:
            self._looked_at = now
            counts = zip(self._keys, self._store.multi_get(self._keys), strict=True)
            silent = self._silences.look(dict(counts)).values()
            self._lost = sum(seconds > SIGN_S * self._missed for seconds in silent)
        return self._lost


def _key(number: int) -> str:
    return f"life/{number}"
