"""Which replicas the units can form at once, and how many micro-batches they take: part of the lower bound.

Where replicas are free, the rest of the bound lets them take parts of a sequence, and lets groups of one
replica use keys of another's. Here each choice of units is looked at as a replica by itself, which takes a
micro-batch in no less than whole groups of its units do (packing.py), and so many micro-batches in a time;
CP-SAT says whether replicas that the units suffice for together take as many as there are.

There are many choices and few in the optimum: a choice is bounded by its best rates until CP-SAT needs it.
More units are no slower, so what is too short for some is too short for a part of them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence

import numpy as np
from ortools.sat.python import cp_model

from megatron_hexi.cost.arrays import Floats, Ints
from megatron_hexi.planner.bound.groups.site_times import Shape, used
from megatron_hexi.planner.bound.packings.halving import least_sufficient
from megatron_hexi.planner.bound.pieces.gradients import Ring

#: The bound is found to this part.
_PRECISION = 1e-3
#: CP-SAT's own unit, about seconds; what it has not ruled out in that, may be.
_DETERMINISTIC_TIME = 0.05


class Replicas:
    """Micro-batches by whole replicas.

    Args:
        shapes: of replicas that there may be.
        units: that there are of each class.
        turns: micro-batches that a replica may take, ascending.
        together: micro-batches of an iteration.
        stages: of the pipeline.
        ring: of gradients.
        rates: micro-batches a second that each replica cannot pass.
        may: whether a replica (its number) of so many micro-batches may pass each of them through a stage in
            so many seconds.
    """

    def __init__(
        self,
        shapes: Sequence[Shape],
        units: Sequence[int],
        turns: Sequence[int],
        together: int,
        stages: int,
        ring: Ring,
        rates: Floats,
        may: Callable[[int, int, float], bool],
    ) -> None:
        self._units, self._turns, self._together = units, turns, together
        self._stages, self._ring, self._may = stages, ring, may
        self._used = used(shapes, len(units)).astype(int)
        #: Replicas that are a part of each replica, or the same.
        self._parts = [
            [n for n in np.flatnonzero((self._used <= mine).all(axis=1)).tolist() if _fits(shapes[n], whole)]
            for mine, whole in zip(self._used, shapes, strict=True)
        ]
        #: Of each number of micro-batches, seconds that each replica needs for one at least, and that may do.
        self._least = {count: count / rates / (count + stages - 1) for count in turns}
        self._enough = {count: np.full(len(shapes), np.inf) for count in turns}

    def least_s(self, low: float, high: float) -> float:
        """Seconds, between two, that no plan stays below.

        Args:
            low: known already.
            high: an iteration that is known to be possible.
        """
        return least_sufficient(self._suffices, low, high, _PRECISION)

    def _suffices(self, iteration_s: float) -> bool:
        """Whether replicas may take all micro-batches in the time."""
        seconds = {count: self._ring.micro_batch_s(iteration_s, count, self._stages) for count in self._turns}
        while True:
            most = np.zeros(len(self._used), dtype=int)
            for count, each_s in seconds.items():
                most[self._least[count] <= each_s] = count
            known = [
                count > 0 and bool(self._enough[count][n] <= seconds[count]) for n, count in enumerate(most)
            ]
            chosen = self._deal(most, known)
            if chosen is None:
                return False
            doubtful = [number for number in chosen if not known[number]]
            if not doubtful:
                return True
            for number in doubtful:
                self._look_at(number, int(most[number]), seconds[most[number]])

    def _look_at(self, number: int, count: int, each_s: float) -> None:
        # Without a pipeline, micro-batches take the same however many there are.
        alike = [count] if self._stages > 1 else self._turns
        if self._may(number, count, each_s):
            for one in alike:
                self._enough[one][number] = min(self._enough[one][number], each_s)
            return
        for one in alike:
            least, parts = self._least[one], self._parts[number]
            least[parts] = np.maximum(least[parts], np.nextafter(each_s, np.inf))

    def _deal(self, most: Ints, known: Sequence[bool]) -> list[int] | None:
        """Replicas that take all micro-batches, as few unknown ones as can be; ``None``: there are none."""
        model = cp_model.CpModel()
        counts = {
            number: model.new_int_var(0, -(-self._together // turns), "")
            for number, turns in enumerate(most.tolist())
            if turns
        }
        for place, have in enumerate(self._units):
            model.add(sum(int(self._used[number, place]) * count for number, count in counts.items()) <= have)
        model.add(sum(int(most[number]) * count for number, count in counts.items()) >= self._together)
        model.minimize(sum(count for number, count in counts.items() if not known[number]))
        solver = cp_model.CpSolver()
        solver.parameters.num_workers = 1
        solver.parameters.max_deterministic_time = _DETERMINISTIC_TIME
        status = solver.solve(model)
        if status == cp_model.INFEASIBLE:
            return None
        if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
            return []
        return [number for number, count in counts.items() if solver.value(count)]


def _fits(part: Shape, whole: Shape) -> bool:
    """Whether a shape is a part of another: site by site of a class, the largest first."""
    sites = defaultdict[int, list[int]](list)
    for place, units in sorted(whole, key=lambda site: -site[1]):
        sites[place].append(units)
    for place, units in sorted(part, key=lambda site: -site[1]):
        if not sites[place] or sites[place].pop(0) < units:
            return False
    return True
