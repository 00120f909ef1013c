"""The planner's mechanisms, and the function in whose place another one removes each.

The planner has no switches for them: a mechanism is removed by a patch of one name.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import numpy as np


@dataclass(frozen=True)
class Mechanism:
    """A part of the planner that can be taken out.

    Args:
        what: what it does, a few words.
        seam: the dotted name that is replaced.
        without: what stands there instead.
        of_compare: whether it serves only `hexi compare`, which is then measured in place of `hexi plan`.
    """

    what: str
    seam: str
    without: Any
    of_compare: bool = False

    def removed(self) -> AbstractContextManager[Any]:
        """Return a context in which the planner lacks the mechanism."""
        return patch(f"megatron_hexi.{self.seam}", self.without)


def _no_bounds(self: Any, _job: Any) -> Any:
    """Bound no layout of Megatron's flags from below."""
    return np.zeros(len(self._candidate))


def _unpolished(_judge: Any, trial: Any, _budget: int) -> Any:
    return trial


def _no_moves(_self: Any, _base: Any) -> Any:
    return ()


def _afresh(_self: Any, _key: Any, make: Callable[[], Any]) -> Any:
    return make()


#: By name; those that are not here are not part of the planner any more.
MECHANISMS = {
    "polish": Mechanism("small changes of a domain", "planner.search.domain.polish", _unpolished),
    "waiting": Mechanism(
        "the wait in stages of mixed kinds, from a few units",
        "planner.joint.layer_times.LayerTimer._waiting_factor",
        lambda _self, _kinds, _width: 1.0,
    ),
    "interleaving": Mechanism(
        "interleaved ministages", "planner.moves.memory.MemoryMoves._interleaved", _no_moves
    ),
    "savings": Mechanism("moves that save memory", "planner.moves.memory.MemoryMoves._saving", _no_moves),
    "saved-plans": Mechanism(
        "plans for GPUs with more memory, made to fit, beside one that fits",
        "planner.improve._FEW_GPUS",
        0,
    ),
    "layer-moves": Mechanism(
        "moves of layers between stages", "planner.improve.layer_moves", lambda _base: ()
    ),
    "synchronisation": Mechanism(
        "sums of gradients and the optimizer's step in the tables",
        "planner.joint.synchronisation.Synchronisation.seconds",
        lambda _self, _stages, _shards: 0.0,
    ),
    "floor": Mechanism(
        "lower bounds of flag layouts",
        "planner.baselines.flags.Floor.seconds",
        _no_bounds,
        of_compare=True,
    ),
    "known-layers": Mechanism(
        "the cache of layers of stages that are alike", "cost.known_layers._MOST_UNITS", 0
    ),
    "recent": Mechanism("caches of arrays in the cost model", "cost.recent.Recent.of", _afresh),
}
