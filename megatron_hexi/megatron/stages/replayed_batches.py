"""Batches that a rank reads once in an iteration and passes to each of its ministages."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

from megatron_hexi.megatron.documents_ahead import AHEAD
from megatron_hexi.megatron.session import active_session


class ReplayedBatches:
    """The batches of an iteration, read once and replayed for all ministages.

    Args:
        source: Megatron's iterator.
    """

    def __init__(self, source: Any) -> None:
        self._source = source
        self._read: list[Any] = []
        #: Number of the micro-batch that is returned next.
        self.place = 0

    def read(self, count: int) -> None:
        """Read up to a number of batches."""
        while len(self._read) < count:
            self._read.append(next(self._source))

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        self.read(self.place + 1)
        batch, session = copy.copy(self._read[self.place]), active_session()
        if session is not None:  # a batch that is replayed is not the one that was read last
            AHEAD.take(batch, session.seq_length)
        return batch
