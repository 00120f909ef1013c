"""Keeps the latest results of a calculation, for inputs that cannot be hashed but have a name that can."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable


class Recent[Result]:
    """Results by name, of which those asked for last are kept.

    Args:
        most: the most results that are kept.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._kept: OrderedDict[Hashable, Result] = OrderedDict()

    def of(self, name: Hashable, make: Callable[[], Result]) -> Result:
        """Return the result of this name; `make` calculates it if it is not kept."""
        if name in self._kept:
            self._kept.move_to_end(name)
            return self._kept[name]
        result = self._kept[name] = make()
        if len(self._kept) > self._most:
            self._kept.popitem(last=False)
        return result
