"""How many tokens fill the time that there is: a search for many pieces at once, never short of the truth."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from megatron_hexi.cost.arrays import Floats

#: How tokens are sought: rounds of secants, what is added then, halvings where that does not do.
_ROUNDS = 12
_CLOSE = 3e-5
#: Every so many rounds, what is not close is halved.
_HALVED = 3
_SLACKS = (5e-5, 5e-4, 3e-3, 3e-2)
_HALVINGS = 20


class Filling:
    """Searches that ask for much the same again and again."""

    def __init__(self) -> None:
        #: What was found last, and how steep the load was there, by what was sought.
        self._near: dict[str, tuple[Floats, Floats]] = {}

    def last(self, sought: str, most: Floats, load: Callable[[Floats], Floats]) -> Floats:
        """The largest numbers up to `most` whose load is 1, or a little more.

        Args:
            sought: tells apart searches of different loads; each starts from what it found last.
            most: tokens of each piece.
            load: of so many tokens of each piece, the part of the limits that they take.
        """
        # All tokens of the sequence may be less to do than nearly all: then there is no exchange.
        whole = load(most) <= 1 + _SLACKS[0]
        if whole.all():
            return most
        # A load grows with the tokens nearly as a straight line: as steep as last time, then by secants.
        near, slope = self._near.get(sought, (most, None))
        found = np.where(whole, most, np.minimum(most, near))
        loaded = load(found)
        slope = loaded / np.maximum(found, 1.0) if slope is None else slope
        low, high = np.where(loaded <= 1, found, 0.0), np.where(loaded > 1, found, most)
        for number in range(_ROUNDS):
            before, loaded_before = found, loaded
            found = np.where(whole, most, np.clip(found + (1 - loaded) / slope, low, high))
            close = np.abs(found - before) <= _CLOSE * found
            if close.all():
                break
            # Where a load bends, secants may go round in a circle.
            if number % _HALVED == _HALVED - 1:
                found = np.where(close, found, (low + high) / 2)
            loaded = load(found)
            low, high = np.where(loaded <= 1, found, low), np.where(loaded > 1, found, high)
            step, rise = found - before, loaded - loaded_before
            grows = rise * step > 0
            slope = np.where(grows, rise / np.where(grows, step, 1.0), slope)
        self._near[sought] = found, slope
        # Secants come close to where the time is up; a little above, it must be.
        above = np.full(len(found), False)
        for slack in _SLACKS:
            found = np.where(above | ~close, found, np.minimum(most, found * (1 + slack)))
            above |= close & ((load(found) > 1) | (found == most))
            if (above | ~close).all():
                break
        if above.all():
            return found
        for _ in range(_HALVINGS):
            middle = (low + high) / 2
            fits = load(middle) <= 1
            low, high = np.where(fits, middle, low), np.where(fits, high, middle)
        return np.where(above, found, high)
