"""The linear program that packs shapes of groups into units: part of the lower bound (packing.py)."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

import numpy as np
from ortools.linear_solver import pywraplp

from megatron_hexi.cost.arrays import Floats, Ints
from megatron_hexi.planner.bound.pieces.demand import Span

#: What rounding may take away.
_ROUNDING = 1e-6


def kinds_of(used: Floats) -> tuple[Floats, Ints]:
    """What units shapes use, [kinds, classes], and which of these each does, [shapes]."""
    kinds, numbers = np.unique(used, axis=0, return_inverse=True)
    return kinds, numbers.ravel()


class Program:
    """As many groups of each shape as units allow, a number of them within a span.

    Args:
        used: units of each class, [shapes, classes].
        units: that there are.
        span: the fewest and the most groups.
    """

    def __init__(self, used: Floats, units: Sequence[int], span: Span) -> None:
        self._used, self._left, self._span = used, np.array(units, dtype=float), span
        # Of shapes that use the same units, the one that is worth most counts.
        self._kinds, self._kind_of = kinds_of(used)
        self._solver = pywraplp.Solver.CreateSolver("GLOP")
        self._rows = [self._solver.Constraint(0, float(most)) for most in units]
        self._groups = self._solver.Constraint(*map(float, span))
        self._goal = self._solver.Objective()
        self._goal.SetMaximization()
        self._amounts = [self._solver.NumVar(0, inf, "") for _ in self._kinds]
        for amount, counts in zip(self._amounts, self._kinds.tolist(), strict=True):
            self._groups.SetCoefficient(amount, 1)
            for row, count in zip(self._rows, counts, strict=True):
                if count:
                    row.SetCoefficient(amount, count)

    def solve(self, worth: Floats) -> tuple[float, dict[int, float]]:
        """The most that is packed, and how many of the shapes in use; infinite if there is no answer.

        What holds nothing is no group.
        """
        # Ascending, and of two that are alike the first one last: the last one is taken.
        order = len(worth) - 1 - np.argsort(worth[::-1], kind="stable")
        best = np.zeros(len(self._kinds), dtype=np.int64)
        best[self._kind_of[order]] = order
        fits = (worth[best] > 0) & (self._kinds <= self._left).all(axis=1)
        for amount, value, may in zip(self._amounts, worth[best].tolist(), fits.tolist(), strict=True):
            self._goal.SetCoefficient(amount, value)
            amount.SetUb(inf if may else 0.0)
        status = self._solver.Solve()
        if status == pywraplp.Solver.INFEASIBLE:
            return 0.0, {}
        if status != pywraplp.Solver.OPTIMAL:
            return inf, {}
        amounts = [amount.solution_value() for amount in self._amounts]
        packed = {int(best[kind]): amount for kind, amount in enumerate(amounts) if amount > 0}
        return self._goal.Value(), packed

    def prices(self) -> tuple[Floats, float]:
        """Of the units of each class, and of a group, as `solve` found them."""
        units = np.array([row.dual_value() for row in self._rows])
        return np.maximum(0.0, units), self._groups.dual_value()

    def whole(self, worth: Floats) -> list[int]:
        """Shapes of whole groups: what is packed most is taken, and the rest packed again (diving)."""
        taken = list[int]()
        while True:
            for row, most in zip(self._rows, self._left.tolist(), strict=True):
                row.SetUb(most)
            self._groups.SetBounds(*(max(0.0, float(end - len(taken))) for end in self._span))
            _, packed = self.solve(worth)
            if not packed:
                return taken
            most = max(packed, key=lambda shape: (packed[shape], -shape))
            groups = max(1, int(packed[most] + _ROUNDING))
            self._left = self._left - groups * self._used[most]
            taken += [most] * groups
