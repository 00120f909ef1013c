"""What overlap hides: when each unit is done with its blocks while keys and values travel.

As the runtime does it (runtime/exchange.py): a step's transfer is posted when the block `window` steps
before it starts; a unit's transfers go over its wire one batch after the other, in the order posted; a
transfer begins when both ends have posted it and have their wire free; a block starts when the one before
it is done and its own keys have arrived. Block 0 is the own group's. In the backward pass the gradients
of a step start home when its block is done, behind the keys posted before, and are waited for before the
block `window` + 1 steps later; block 0 is computed in two parts, one before the steps and one after them,
behind which the last gradients travel. The parts of a step are posted together, and each is computed when its
own keys have arrived.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from functools import reduce
from typing import NamedTuple

import numpy as np

from megatron_hexi.cost.arrays import Floats, Ints


class Part(NamedTuple):
    """Some heads of a step.

    Args:
        compute: seconds of its blocks, [U].
        src: owner of each message, [M].
        dst: user of each message, [M].
        there: seconds of each message, [M].
        home: seconds of its way back, [M].
    """

    compute: Floats
    src: Ints
    dst: Ints
    there: Floats
    home: Floats


class _Wire:
    """One batch at a time on each unit's wire."""

    def __init__(self, units: int) -> None:
        self.free = np.zeros(units)

    def carry(self, posted: Floats, src: Ints, dst: Ints, seconds: Floats) -> Floats:
        """When each unit has its messages of a batch; 0 for units without any."""
        arrived = np.zeros(len(self.free))
        if len(src):
            ready = np.maximum(posted, self.free)
            ends = np.maximum(ready[src], ready[dst]) + seconds
            np.maximum.at(arrived, src, ends)
            np.maximum.at(arrived, dst, ends)
            self.free = np.maximum(self.free, arrived)
        return arrived


class ForwardClock:
    """The forward pass of the exchange.

    Args:
        posted: when each unit has its own keys, and posts them, s, [U].
        begin: from when on it computes its own group's block without a break, s, [U].
        own_block: seconds of that block, [U].
        window: steps under way ahead of the one in use.
    """

    def __init__(self, posted: Floats, begin: Floats, own_block: Floats, window: int) -> None:
        self._wire = _Wire(len(begin))
        self._starts = deque([posted] * window, maxlen=window)
        self.end = begin + own_block

    def step(self, parts: Sequence[Part]) -> None:
        """One step."""
        posted = self._starts[0]
        arrived = [self._wire.carry(posted, part.src, part.dst, part.there) for part in parts]
        self._starts.append(np.maximum(self.end, arrived[0]))
        for part, here in zip(parts, arrived, strict=True):
            self.end = np.maximum(self.end, here) + part.compute


class BackwardClock:
    """The backward pass: keys and values as in the forward pass, and their gradients on the way back.

    Args:
        posted: when each unit has its own keys, and posts them, s, [U].
        begin: from when on it computes its own group's block without a break, s, [U].
        first: seconds of the part of its own group's block that comes before the steps, [U].
        last: of the part that comes after them, [U].
        window: steps under way ahead of the one in use.
    """

    def __init__(self, posted: Floats, begin: Floats, first: Floats, last: Floats, window: int) -> None:
        self._wire = _Wire(len(begin))
        self._last = last
        self._starts = deque([posted] * window, maxlen=window)
        self._window = window
        self._returns: deque[list[tuple[Floats, Ints, Ints, Floats]]] = deque()
        self._home = np.zeros(len(begin))
        self.end = begin + first

    def step(self, parts: Sequence[Part]) -> None:
        """One step."""
        posted = self._starts[0]
        arrived = [self._wire.carry(posted, part.src, part.dst, part.there) for part in parts]
        self.end = np.maximum(self.end, self._home)
        if len(self._returns) == self._window:
            self._home = self._carry_home()
        self._starts.append(np.maximum(self.end, arrived[0]))
        self._returns.append([])
        for part, here in zip(parts, arrived, strict=True):
            self.end = np.maximum(self.end, here) + part.compute
            self._returns[-1].append((self.end, part.dst, part.src, part.home))

    def finish(self) -> None:
        """The rest of the own block while the last gradients travel; `end` is complete after this."""
        while self._returns:
            self._carry_home()
        self.end = np.maximum(self.end + self._last, self._wire.free)

    def _carry_home(self) -> Floats:
        """When each unit has the gradients of the oldest step under way."""
        return reduce(np.maximum, [self._wire.carry(*batch) for batch in self._returns.popleft()])
