"""Detects changes of a rank's speed from its history of times.

A rank is held against itself only. Its samples are times relative to those that its plan predicts, so that a
change of plan is none of the rank, and ranks with much work are not slow ones.
"""

from __future__ import annotations

from collections import deque
from statistics import median

#: Samples that must agree on a new level.
WINDOW = 5
#: Samples of a level that are kept: an old one must not hide a slow drift.
KEPT = 40
#: A change is larger than this part of the level, and than so many standard deviations of its samples.
_LEAST_CHANGE = 0.05
_DEVIATIONS = 4.0
#: The median absolute deviation of a normal distribution, in standard deviations.
_MAD = 0.6745


class RankHistory:
    """The samples of one rank since its level last changed.

    A change point is where the median of the last `WINDOW` samples lies off the median of those before by
    more than `_LEAST_CHANGE` and by more than `_DEVIATIONS` robust standard deviations (median absolute
    deviation), with all but one of them on that side. One slow iteration, or two, change nothing.
    """

    def __init__(self) -> None:
        self._samples: deque[float] = deque(maxlen=KEPT)

    def __len__(self) -> int:
        return len(self._samples)

    @property
    def level(self) -> float:
        """Median of the samples since the last change."""
        return median(self._samples)

    def add(self, sample: float) -> bool:
        """Add a sample.

        Returns:
            Whether it shows that the level has changed: then only the last samples are kept.
        """
        self._samples.append(sample)
        if len(self._samples) < 2 * WINDOW:
            return False
        *before, _, _, _, _, _ = self._samples
        latest = list(self._samples)[-WINDOW:]
        old, new = median(before), median(latest)
        deviation = median(abs(value - old) for value in before) / _MAD
        if abs(new - old) <= max(_LEAST_CHANGE * old, _DEVIATIONS * deviation):
            return False
        middle = (old + new) / 2
        if sum((value > middle) == (new > old) for value in latest) < WINDOW - 1:
            return False
        self._samples.clear()
        self._samples.extend(latest)
        return True
