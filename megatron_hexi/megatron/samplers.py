"""Samplers of unequal replicas: each draws only its own micro-batches of every global batch.

Megatron sees one replica there, whose samplers give every rank the whole global batch, a micro-batch after
another. `Session.share` says which are the rank's own; its schedule runs that many (`pipeline.py`).

A swap of plans may change the share. Loaders with workers draw batches before the swap that are trained on
after it, so a swap is announced in advance (`announce_share`), with its first iteration.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

from megatron_hexi.megatron.session import Session, active_session
from megatron_hexi.patching import Patch
from megatron_hexi.plan import Share

#: Shares after the first one, each with its first iteration.
_announced: list[tuple[int, Share]] = []
#: Whether batches are being drawn for training, not for validation.
_training = False


def announce_share(iteration: int, share: Share) -> None:
    """Change this rank's share of the batch from an iteration on; iterations count from 0."""
    _announced.append((iteration, share))


def batches_ahead(workers: int, share: Share) -> int:
    """Return the number of global batches that a loader may draw from before they are trained on.

    Args:
        workers: number of the loader's workers; each has two micro-batches ahead.
    """
    return -(-2 * workers // share.count) if workers else 0


def set_training(training: bool) -> None:
    """Set whether batches are drawn for training from now on."""
    global _training
    _training = training


class _DrawnBatches:
    """The position of one sampler in its batches; kept with it, as an epoch may end inside a global batch."""

    def __init__(self, session: Session) -> None:
        from megatron.training import get_args

        assert session.share is not None
        self._first, self._share, self._number = get_args().iteration, session.share, 0
        self._trains = False

    def takes_next(self, session: Session) -> bool:
        """Whether the next micro-batch is the rank's own."""
        number, self._number = self._number, self._number + 1
        assert session.share is not None
        batch, place = divmod(number, self._share.total)
        self._trains = self._trains or _training
        if place == 0 and self._trains:
            due = [share for iteration, share in _announced if self._first + batch >= iteration]
            self._share = due[-1] if due else self._share
        elif place == 0:
            self._share = session.share
        return place in self._share


def _of_own_share(original: Callable[[Any], Iterator[list[int]]]) -> Callable[[Any], Iterator[list[int]]]:
    @functools.wraps(original)
    def __iter__(self: Any) -> Iterator[list[int]]:
        session = active_session()
        if session is None or session.share is None:
            yield from original(self)
            return
        draws = self.hexi_draws = getattr(self, "hexi_draws", None) or _DrawnBatches(session)
        for micro_batch in original(self):
            session = active_session()
            assert session is not None, "no plan is dropped before the training ends"
            if draws.takes_next(session):
                yield micro_batch

    return __iter__


_MODULE = "megatron.training.datasets.data_samplers"

SAMPLER_PATCHES = tuple(
    Patch(
        target=f"{_MODULE}:{sampler}.__iter__",
        why="a rank draws the micro-batches of its replica, where replicas differ",
        build=_of_own_share,
        parameters=("self",),
    )
    for sampler in ("MegatronPretrainingSampler", "MegatronPretrainingRandomSampler")
)
