"""Chooses the replicas of a plan: packs columns into the fleet for the shortest iteration.

For a time of the iteration each column takes so many micro-batches; CP-SAT says whether some of the columns,
each as often as there are GPUs for it, take the whole batch. The least time for which they do is found by
bisection.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from ortools.sat.python import cp_model

from megatron_hexi.cost.arrays import Ints
from megatron_hexi.planner.joint.pools import Counts
from megatron_hexi.planner.joint.replica_columns import Column
from megatron_hexi.planner.layouts.deal import assign_in_turn

#: The bisection ends where the time is known to this factor.
_CLOSE = 1.003
#: Of the solver, in its own deterministic units: about seconds.
_EFFORT = 0.5
_SEED = 1


@dataclass(frozen=True)
class Packed:
    """Replicas of a plan.

    Args:
        columns: a column for each replica.
        micro_batches: of each.
        seconds: of the iteration, by the columns.
        least_s: that no set of columns takes less than.
    """

    columns: tuple[Column, ...]
    micro_batches: tuple[int, ...]
    seconds: float
    least_s: float = 0.0


def pack(
    columns: Sequence[Column],
    micro_batches: int,
    totals: Counts,
    replicas: range,
    least_s: float = 0.0,
    most_s: float = math.inf,
    *,
    equal: bool = False,
) -> Packed | None:
    """Return the best set of replicas; ``None`` where none finishes the batch in time.

    Args:
        columns: to choose from.
        micro_batches: of an iteration.
        totals: GPUs of each pool.
        replicas: how many there may be.
        least_s: seconds that no set of them takes less than, as far as is known.
        most_s: seconds that a set may take.
        equal: whether all replicas are of one column, with equal shares of the batch.
    """
    if not columns:
        return None
    if equal:
        return _equal(columns, micro_batches, totals, replicas, most_s)
    alone = [column.seconds(micro_batches) for column in columns]
    if replicas[-1] == 1:
        least = min(alone)
        fastest = columns[alone.index(least)]
        return Packed((fastest,), (micro_batches,), least, least) if least <= most_s else None
    top = min(*alone, most_s)
    best = _packed(columns, top, micro_batches, totals, replicas)
    if best is None and top < most_s:  # so many replicas need more than the fastest of them alone
        top = min(max(alone), most_s)
        best = _packed(columns, top, micro_batches, totals, replicas)
    if best is None:
        return None
    low = max(least_s / _CLOSE, min(column.seconds(1) for column in columns) * 0.999)
    high = min(top, best.seconds)
    while high / low > _CLOSE:
        middle = math.sqrt(low * high)
        packed = _packed(columns, middle, micro_batches, totals, replicas)
        if packed is None:
            low = middle
        else:
            best, high = (
                min(best, packed, key=lambda packed_set: packed_set.seconds),
                min(middle, packed.seconds),
            )
    return replace(best, least_s=low)


def _equal(
    columns: Sequence[Column], micro_batches: int, totals: Counts, replicas: range, most_s: float
) -> Packed | None:
    """Return the best column taken several times; ``None`` where equal shares do not finish in time."""
    best: Packed | None = None
    for column in columns:
        room = min(total // count for count, total in zip(column.counts, totals, strict=True) if count)
        for count in replicas:
            if count > room or micro_batches % count:
                continue
            seconds = column.seconds(micro_batches // count)
            if seconds <= (most_s if best is None else best.seconds):
                shares = (micro_batches // count,) * count
                best = Packed((column,) * count, shares, seconds, seconds)
    return best


def _packed(
    columns: Sequence[Column], seconds: float, micro_batches: int, totals: Counts, replicas: range
) -> Packed | None:
    offers = _undominated(columns, seconds, micro_batches)
    if not offers:
        return None
    gpus = np.array([column.counts for column, _ in offers])
    taking = np.array([count for _, count in offers])
    if _most(gpus, taking, np.array(totals)) < micro_batches * (1 - 1e-9):
        return None
    most = np.min(np.array(totals) // np.maximum(gpus, 1), axis=1, where=gpus > 0, initial=replicas[-1])
    model = cp_model.CpModel()
    taken = [model.new_int_var(0, count, "") for count in most.tolist()]
    for counts, total in zip(gpus.T.tolist(), totals, strict=True):
        model.add(cp_model.LinearExpr.weighted_sum(taken, counts) <= total)
    model.add(cp_model.LinearExpr.weighted_sum(taken, taking.tolist()) >= micro_batches)
    model.add_linear_constraint(sum(taken), replicas[0], replicas[-1])
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    solver.parameters.random_seed = _SEED
    solver.parameters.max_deterministic_time = _EFFORT
    if solver.solve(model) not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return None
    chosen = [
        column for (column, _), var in zip(offers, taken, strict=True) for _ in range(solver.value(var))
    ]
    return _with_batch(chosen, micro_batches)


def _most(gpus: Ints, taking: Ints, totals: Ints) -> float:
    """An upper bound on the micro-batches of any set of columns, by prices of GPUs.

    Prices are those at which each pool alone is worth the same: what its own best columns make of it.

    Args:
        gpus: of each column by pool, [columns, pools].
        taking: micro-batches of each column.
        totals: GPUs of each pool.
    """
    alone = gpus == gpus.sum(axis=1, keepdims=True)
    prices = np.max(taking[:, None] / np.maximum(gpus, 1), axis=0, where=alone, initial=0)
    costs = [(gpus @ each, totals @ each) for each in (prices, np.ones(len(totals)))]
    return min(float((taking / cost).max() * all_of_them) for cost, all_of_them in costs if cost.all())


def _undominated(columns: Sequence[Column], seconds: float, micro_batches: int) -> list[tuple[Column, int]]:
    """Columns with their micro-batches in a time, without those that others match with fewer GPUs."""
    offers = [(column, min(micro_batches, column.micro_batches(seconds))) for column in columns]
    offers = [offer for offer in offers if offer[1]]
    if not offers:
        return []
    offers.sort(key=lambda offer: (-offer[1], sum(offer[0].counts)))
    counts = np.array([column.counts for column, _ in offers])
    # Those before take as many at least.
    fewer = np.tril((counts <= counts[:, None]).all(axis=2), -1).any(axis=1)
    return [offer for offer, dominated in zip(offers, fewer, strict=True) if not dominated]


def _with_batch(columns: Sequence[Column], micro_batches: int) -> Packed | None:
    """Replicas with at least one micro-batch each; ``None`` where there are too few."""
    if len(columns) > micro_batches:
        return None
    counts = assign_in_turn(micro_batches, [column.seconds for column in columns], least=1)
    # Gradients go round all replicas at the pace of the slowest.
    longest = max(
        column.seconds(count) - column.sync_s for column, count in zip(columns, counts, strict=True)
    )
    longest += max(column.sync_s for column in columns)
    return Packed(tuple(columns), counts, longest)
