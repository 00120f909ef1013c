"""Keeps the latest results of a calculation whose inputs cannot be hashed, but have a key that can."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable


class Recent[Result]:
    """A cache of results by key, which keeps those that were asked for last.

    Args:
        most: the most results that are kept.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._kept: OrderedDict[Hashable, Result] = OrderedDict()

    def of(self, key: Hashable, make: Callable[[], Result]) -> Result:
        """Return the result of this key; `make` calculates it if it is not kept."""
        try:
            result = self._kept.pop(key)
        except KeyError:
            result = make()
        self._kept[key] = result  # as the latest
        if len(self._kept) > self._most:
            self._kept.popitem(last=False)
        return result
