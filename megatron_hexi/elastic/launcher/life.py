"""Signs of life of the agents of a round, by which agents and spares see that a node is lost.

PyTorch's rendezvous has signs of its own, but does not show them. Its numbers are taken here, too.
"""

from __future__ import annotations

import time

import torch.distributed as dist

from megatron_hexi.elastic.launcher.round_thread import RoundThread

#: Seconds between two signs of life of an agent, and how many may be missed.
SIGN_S, MISSED = 1, 4


class LifeSigns(RoundThread):
    """Shows in the store of the present round that this node's agent runs; a context manager.

    Args:
        port: port of this node's loopback at which the job's store is reached.
    """

    def __init__(self, port: int) -> None:
        super().__init__("hexi-life", ("127.0.0.1", port), SIGN_S)

    def _attend(self, store: dist.Store, name: str, number: int) -> None:
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
