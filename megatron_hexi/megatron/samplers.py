"""Samplers of unequal replicas: each draws its own micro-batches of every global batch, and no others.

Megatron sees one replica there, whose samplers give every rank the whole global batch, a micro-batch after
another. Which of them are a rank's own says `Session.share`; its schedule runs as many (`pipeline.py`).

A swap of plans may change the share. Loaders with workers draw before the swap what is trained on after it,
so a swap is announced before (`announce_share`), by the iteration that begins with it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

from megatron_hexi.megatron.session import Session, active_session
from megatron_hexi.patching import Patch
from megatron_hexi.plan import Share

#: From which iteration on which share is trained on, after the first.
_announced: list[tuple[int, Share]] = []
#: Whether batches are drawn for training now, and not for validation.
_training = False


def announce_share(iteration: int, share: Share) -> None:
    """From the global batch of an iteration on, counted from 0, this rank takes another share."""
    _announced.append((iteration, share))


def batches_ahead(workers: int, share: Share) -> int:
    """Global batches that a loader may have drawn of before they are trained on.

    Args:
        workers: of the loader; each has two micro-batches ahead.
        share: of the rank.
    """
    return -(-2 * workers // share.count) if workers else 0


def set_training(training: bool) -> None:
    """Say that what is drawn from now on is for training, or not."""
    global _training
    _training = training


class _Draws:
    """What one sampler has drawn; kept with it, for an epoch may end inside of a global batch."""

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
        draws = self.hexi_draws = getattr(self, "hexi_draws", None) or _Draws(session)
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
