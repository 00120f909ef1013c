"""A thread of a node's agent that attends to the present round through the job's store."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from contextlib import suppress
from datetime import timedelta
from typing import Self

import torch.distributed as dist

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
