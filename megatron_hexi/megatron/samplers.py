"""Samplers of unequal replicas: each draws its own micro-batches of every global batch, and no others.

Megatron sees one replica there, whose samplers give every rank the whole global batch, a micro-batch after
another. Which of them are a rank's own says `Session.share`; its schedule runs as many (`pipeline.py`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

from megatron_hexi.megatron.session import active_session
from megatron_hexi.patching import Patch


def _of_own_share(original: Callable[[Any], Iterator[list[int]]]) -> Callable[[Any], Iterator[list[int]]]:
    @functools.wraps(original)
    def __iter__(self: Any) -> Iterator[list[int]]:
        session = active_session()
        if session is None or session.share is None:
            yield from original(self)
            return
        for micro_batch in original(self):
            # A sampler begins with a global batch. Kept with it, for an epoch may end inside of one.
            number = getattr(self, "hexi_drawn", 0)
            self.hexi_drawn = number + 1
            if number in session.share:
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
