"""Pairs of two parameters: each value in one that always runs, all others on request."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def covering(first: Iterable[Any], second: Iterable[Any]) -> list[Any]:
    """Every pair of two lists of values; each value is in a pair that is not slow.

    Where all pairs go through the same code, the others repeat what these show.
    """
    rows, columns = list(first), list(second)
    fast = {
        (rows[number % len(rows)], columns[number % len(columns)])
        for number in range(max(len(rows), len(columns)))
    }
    return [
        pytest.param(row, column, marks=() if (row, column) in fast else pytest.mark.slow)
        for row in rows
        for column in columns
    ]
