"""What overlap hides: when each unit is done with its blocks while keys and values travel.

As the runtime does it (runtime/exchange.py): a step's transfer is posted when the block `window` steps
before it starts; a unit's transfers go over its wire one batch after the other, in the order posted; a
transfer begins when both ends have posted it and have their wire free; a block starts when the one before
it is done and its own keys have arrived. Block 0 is the own group's. In the backward pass the gradients
of a step start home when its block is done, behind the keys posted before, and are waited for before the
block `window` + 1 steps later; block 0 is computed in two parts, one before the steps and one after them,
behind which the last gradients travel.
"""

from __future__ import annotations

from collections import deque

import numpy as np

from megatron_hexi.cost.arrays import Floats, Ints


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
        begin: when each unit enters its attention, s, [U].
        own_block: seconds of its own group's block, [U].
        window: steps under way ahead of the one in use.
    """

    def __init__(self, begin: Floats, own_block: Floats, window: int) -> None:
        self._wire = _Wire(len(begin))
        self._starts = deque([begin] * window, maxlen=window)
        self.end = begin + own_block

    def step(self, compute: Floats, src: Ints, dst: Ints, seconds: Floats) -> None:
        """One step: its blocks (s, [U]) and its messages (s, [M])."""
        arrived = self._wire.carry(self._starts[0], src, dst, seconds)
        start = np.maximum(self.end, arrived)
        self._starts.append(start)
        self.end = start + compute


class BackwardClock:
    """The backward pass: keys and values as in the forward pass, and their gradients on the way back.

    Args:
        begin: when each unit enters its attention, s, [U].
        first: seconds of the part of its own group's block that comes before the steps, [U].
        last: of the part that comes after them, [U].
        window: steps under way ahead of the one in use.
    """

    def __init__(self, begin: Floats, first: Floats, last: Floats, window: int) -> None:
        self._wire = _Wire(len(begin))
        self._last = last
        self._starts = deque([begin] * window, maxlen=window)
        self._window = window
        self._returns: deque[tuple[Floats, Ints, Ints, Floats]] = deque()
        self._home = np.zeros(len(begin))
        self.end = begin + first

    def step(self, compute: Floats, src: Ints, dst: Ints, seconds: Floats, home_seconds: Floats) -> None:
        """One step: blocks, messages, and the seconds of each message's way back."""
        arrived = self._wire.carry(self._starts[0], src, dst, seconds)
        start = np.maximum(np.maximum(self.end, arrived), self._home)
        if len(self._returns) == self._window:
            self._home = self._wire.carry(*self._returns.popleft())
        self._starts.append(start)
        self.end = start + compute
        self._returns.append((self.end, dst, src, home_seconds))

    def finish(self) -> None:
        """The rest of the own block while the last gradients travel; `end` is complete after this."""
        while self._returns:
            self._wire.carry(*self._returns.popleft())
        self.end = np.maximum(self.end + self._last, self._wire.free)
