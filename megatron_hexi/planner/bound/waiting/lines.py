"""Straight lines below what is known at points or in pieces: part of the lower bound (together.py)."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from megatron_hexi.cost.arrays import Floats


@dataclass(frozen=True)
class Line:
    """A straight line."""

    slope: float
    at_zero: float


def below(places: Floats, values: Floats) -> list[Line]:
    """The lower convex hull of points from left to right, as lines (Andrew's monotone chain).

    Of points at one place the lowest counts.
    """
    corners: list[tuple[float, float]] = []
    for x, y in zip(places.tolist(), values.tolist(), strict=True):
        if corners and x <= corners[-1][0]:
            y = min(y, corners.pop()[1])
        while len(corners) > 1:
            (x0, y0), (x1, y1) = corners[-2:]
            if (y1 - y0) * (x - x0) < (y - y0) * (x1 - x0):
                break
            corners.pop()
        corners.append((x, y))
    if len(corners) == 1:
        return [Line(0.0, corners[0][1])]
    slopes = [(x, y, (v - y) / (u - x)) for (x, y), (u, v) in itertools.pairwise(corners)]
    return [Line(slope, y - slope * x) for x, y, slope in slopes]


def below_pieces(grid: Floats, values: Floats) -> Line:
    """A line below what is at least so much between each two numbers."""
    wide = grid[-2] - grid[0]
    slope = float(values[-1] - values[0]) / wide if wide > 0 else 0.0
    ends = grid[1:] if slope > 0 else grid[:-1]
    return Line(slope, float((values - slope * ends).min()))
