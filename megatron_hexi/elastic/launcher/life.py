"""Signs of life of the agents of a round, by which agents and spares see that a node is lost.

PyTorch's rendezvous has signs of its own, but does not show them. Its numbers are taken here, too.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Mapping

import torch.distributed as dist

from megatron_hexi.elastic.launcher.round_thread import RoundThread

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

    Args:
        clock: function that returns seconds and is never set.
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
