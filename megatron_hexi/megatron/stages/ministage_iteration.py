"""An iteration in ministages, in whatever order they run: session, model, and batches, read once."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor

from megatron_hexi.megatron.documents_ahead import AHEAD
from megatron_hexi.megatron.session import Session, active_session
from megatron_hexi.megatron.stages.slices import StageSlices


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


class MinistageIteration:
    """One iteration of one rank in ministages; subclasses run it.

    Args:
        shape: shape of the rows between ministages, [L, b, hidden].
        batches: hands the model its micro-batch, chosen before each pass; ``None``: this rank has none.
    """

    def __init__(
        self,
        session: Session,
        model: Any,
        step: Callable[[StageSlices, int, int, Tensor | None], Tensor],
        micro_batches: int,
        shape: Any,
        batches: ReplayedBatches | None,
    ) -> None:
        assert session.stages is not None
        self._place = session.stages.view.place
        self._channels = session.stages.channels
        self._model, self._step, self._shape, self._batches = model, step, shape, batches
        self._slices: StageSlices = model.slices
        self._micro_batches = micro_batches
