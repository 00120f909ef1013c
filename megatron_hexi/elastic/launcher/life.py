"""Signs of life of the agents of a round, by which agents and spares see that a node is lost.

PyTorch's rendezvous has signs of its own, but does not show them. Its numbers are taken here, too.
"""

from __future__ import annotations

import threading
import time
from contextlib import suppress
from datetime import timedelta
from typing import Self

import torch.distributed as dist

#: Seconds between two signs of life of an agent, and how many may be missed.
SIGN_S, MISSED = 1, 4
_STORE_S = 10.0


class LifeSigns:
    """Shows in the store of the present round that this node's agent runs; a context manager.

    Args:
        port: port of this node's loopback at which the job's store is reached.
    """

    def __init__(self, port: int) -> None:
        self._port = port
        self._round: tuple[str, int] | None = None
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._show, name="hexi-life", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *raised: object) -> None:
        self._stopped.set()
        self._thread.join(_STORE_S)

    def begin_round(self, name: str, number: int) -> None:
        """Begin a round, whose ranks are about to start.

        Args:
            name: name of the round.
            number: number of this node in it.
        """
        self._round = name, number

    def _show(self) -> None:
        store: dist.Store | None = None
        while not self._stopped.wait(SIGN_S):
            # Where the store is gone for good, the agent says so and ends the node.
            with suppress(RuntimeError):
                if store is None:  # a connection that no other thread waits on
                    limit = timedelta(seconds=_STORE_S)
                    store = dist.TCPStore("127.0.0.1", self._port, wait_for_workers=False, timeout=limit)
                if self._round is not None:
                    name, number = self._round
                    dist.PrefixStore(name, store).add(_key(number), 1)


class RoundLife:
    """Counts the nodes of a round that are there.

    Args:
        store: the round's store.
        nodes: number of nodes that have begun the round.
        missed: signs of life that a node may miss.
    """

    def __init__(self, store: dist.Store, nodes: int, missed: int) -> None:
        self._store, self._missed = store, missed
        self._keys = [_key(number) for number in range(nodes)]
        for key in self._keys:  # those of agents that have not shown life yet
            store.add(key, 0)
        self._seen = [(b"", time.monotonic())] * nodes
        self._looked_at = 0.0

    def count_lost(self) -> int:
        """Return the number of nodes that have shown no life lately."""
        now = time.monotonic()
        if now > self._looked_at + SIGN_S / 2:
            self._looked_at = now
            counts = self._store.multi_get(self._keys)
            self._seen = [
                old if count == old[0] else (count, now)
                for count, old in zip(counts, self._seen, strict=True)
            ]
        return sum(now - changed_at > SIGN_S * self._missed for _, changed_at in self._seen)


def _key(number: int) -> str:
    return f"life/{number}"
