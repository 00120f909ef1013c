"""Chooses the replicas of a plan: packs columns into the fleet for the shortest iteration.

In a given time each column processes a number of micro-batches. CP-SAT decides whether some columns, each as
often as there are GPUs for it, process the whole batch in that time. The least such time is found by
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

#: The bisection ends when the time is known to this factor.
_CLOSE = 1.003
#: Limit of CP-SAT's deterministic time, about seconds; and its seed, which plans record.
_EFFORT, SEED = 0.5, 1


@dataclass(frozen=True)
class Packed:
    """Replicas of a plan.

    Args:
        seconds: seconds of the iteration that the columns predict.
        least_s: lower bound of the seconds of any set of the columns.
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
    """Return the best set of replicas; ``None``: none finishes the batch in time.

    Args:
        replicas: numbers of replicas that a set may have.
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
    if best is None and top < most_s:  # `replicas` may need more time than the fastest one alone
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
    """Return the best column repeated for all replicas; ``None``: equal shares do not finish in time."""
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
    solver = _repeatable_solver()
    if solver.solve(model) not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return None
    chosen = [
        column for (column, _), var in zip(offers, taken, strict=True) for _ in range(solver.value(var))
    ]
    return _with_batch(chosen, micro_batches)


def _repeatable_solver() -> cp_model.CpSolver:
    """Return a solver with one worker, a fixed seed, and a limit of its work rather than of its seconds."""
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    solver.parameters.random_seed = SEED
    solver.parameters.max_deterministic_time = _EFFORT
    # OR-Tools 9.15's search for symmetries ends the process at some models with two constraints on the same
    # sum ("Check failed: context_->VarToConstraints(var).empty()"). Models this small gain nothing by it.
    solver.parameters.symmetry_level = 0
    return solver


def _most(gpus: Ints, taking: Ints, totals: Ints) -> float:
    """Return an upper bound of the micro-batches that any set of columns processes on all GPUs.

    Each GPU gets a price; no set processes more than the best column's micro-batches per price times the
    price of all GPUs. The lower of two bounds: all GPUs have one price; or a GPU of a pool costs the most
    micro-batches per GPU of columns that use this pool alone.

    Args:
        gpus: GPUs of each column from each pool, [columns, pools].
    """
    alone = gpus == gpus.sum(axis=1, keepdims=True)
    prices = np.max(taking[:, None] / np.maximum(gpus, 1), axis=0, where=alone, initial=0)
    costs = [(gpus @ each, totals @ each) for each in (prices, np.ones(len(totals)))]
    return min(float((taking / cost).max() * all_of_them) for cost, all_of_them in costs if cost.all())


def _undominated(columns: Sequence[Column], seconds: float, micro_batches: int) -> list[tuple[Column, int]]:
    """Return columns with their micro-batches in `seconds`, without those that others match on fewer GPUs."""
    offers = [(column, min(micro_batches, column.micro_batches(seconds))) for column in columns]
    offers = [offer for offer in offers if offer[1]]
    if not offers:
        return []
    offers.sort(key=lambda offer: (-offer[1], sum(offer[0].counts)))
    counts = np.array([column.counts for column, _ in offers])
    # Earlier offers have at least as many micro-batches.
    fewer = np.tril((counts <= counts[:, None]).all(axis=2), -1).any(axis=1)
    return [offer for offer, dominated in zip(offers, fewer, strict=True) if not dominated]


def _with_batch(columns: Sequence[Column], micro_batches: int) -> Packed | None:
    """Return replicas that divide the batch, at least one micro-batch each; ``None``: too small a batch."""
    if len(columns) > micro_batches:
        return None
    counts = assign_in_turn(micro_batches, [column.seconds for column in columns], least=1)
    # Gradients go round all replicas at the pace of the slowest.
    longest = max(
        column.seconds(count) - column.sync_s for column, count in zip(columns, counts, strict=True)
    )
    longest += max(column.sync_s for column in columns)
    return Packed(tuple(columns), counts, longest)
