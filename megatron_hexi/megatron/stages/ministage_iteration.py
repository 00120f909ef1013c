"""The session, model and batches of an iteration in ministages, in whatever order they run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from megatron_hexi.megatron.session import Session
from megatron_hexi.megatron.stages.replayed_batches import ReplayedBatches
from megatron_hexi.megatron.stages.slices import StageSlices


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
