"""How many tokens fill the time that there is: a search for many pieces at once, never short of the truth."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from megatron_hexi.cost.arrays import Floats

#: Rounds of secants; every so many of them, what is not close is halved. Halvings where that does not do.
_ROUNDS = 10
_HALVED = 3
_HALVINGS = 20
#: Two rounds that differ by this part are close; of fewer tokens, as if there were these.
_CLOSE = 3e-5
_FEW = 100.0
#: What has no room for a token is taken to hold one: secants do not find the little that it has room for.
_LEAST = 1.0
#: What is added to come to lie above.
_SLACKS = (5e-5, 5e-4, 3e-3, 3e-2)
_TINY = 1e-300


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
        full, least = load(most), np.minimum(_LEAST, most)
        whole = full <= 1 + _SLACKS[0]
        if whole.all():
            return most
        # A load grows with the tokens nearly as a straight line: as steep as last time, then by secants.
        near, slope = self._near.get(sought, (most, None))
        found = np.where(whole, most, np.clip(near, least, most))
        loaded = load(found)
        slope = loaded / found if slope is None else slope
        # Between these the answer is; their loads.
        low, high, below, above = least, most, np.full(len(most), np.nan), full
        close = whole
        for number in range(1, _ROUNDS + 1):
            fits = loaded <= 1
            low, below = np.where(fits, found, low), np.where(fits, loaded, below)
            high, above = np.where(fits, high, found), np.where(fits, above, loaded)
            before, loaded_before = found, loaded
            found = found + (1 - loaded) / slope
            inside = (found > low) & (found < high)
            if not inside.all():
                # Where a load bends, a secant may leave the interval: then one through both of its ends.
                between = low + (high - low) * (1 - below) / np.maximum(above - below, _TINY)
                between = (low + high) / 2 if number % _HALVED == 0 else between
                found = np.where(inside, found, np.where(np.isnan(below), least, between))
            found = np.where(close, before, found)
            close |= np.abs(found - before) <= _CLOSE * np.maximum(found, _FEW)
            if close.all():
                break
            loaded = load(found)
            step, rise = found - before, loaded - loaded_before
            grows = rise * step > 0
            slope = np.where(grows, rise / np.where(grows, step, 1.0), slope)
        self._near[sought] = found, slope
        # Secants come close to where the time is up; a little above, it must be.
        over = ~close
        for slack in _SLACKS:
            more = np.minimum(most, found + slack * np.maximum(found, _FEW))
            found = np.where(over, found, more)
            over |= (load(found) > 1) | (found == most)
            if over.all():
                break
        reached = close & over
        if not reached.all():
            for _ in range(_HALVINGS):
                middle = (low + high) / 2
                fits = load(middle) <= 1
                low, high = np.where(fits, middle, low), np.where(fits, high, middle)
        return np.where(reached, found, high)
