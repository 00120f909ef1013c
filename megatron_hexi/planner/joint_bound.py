"""A time that no layout can beat: replicas x pipelines x layers and tensor-parallel size of a stage x context
and heads x recomputation x shares of the batch. A linear program, in the terms of joint_options.py.

Take any plan of the cost model that fits in memory and takes T. Of a stage with l of the L layers f is l / L
and q is 1 / f; each of its GPUs is in some option, with works x and z. Then, with the best rates:

time   m micro-batches take tau each in the stage, and one passes the others besides (pipeline.py: sum of tau
       + (m - 1) x longest), no faster than on all GPUs together; the optimizer's step follows. Nothing of a
       GPU's own work overlaps (layer.py):   seconds(x, z) <= T - step - (1 - f) pass
memory Kept are l layers of n micro-batches, L S x n / m: one on a last stage, min(m, 2) before it, and
       m <= w / B. Under way is one layer, S x q / m. What attention keeps goes by tokens of the group x heads
       of the unit: half as many as z at least, since a token sees S tokens at most and S / 2 on average.
room   The same of all GPUs together, where tokens x heads are as many as x; and the optimizer's state once.
spread Each layer of each sequence has one mode: of all replicas in a range of w, z of a mode is as much as x.
last   A replica has one last stage, with the logits: its x q is w.
depth  If the pipeline's stages are fixed: x q of all of them is w times their number.
fill   Let a second of GPU g be worth c_g, so that a sequence's token work and attention together are worth 1
       at least, wherever they are done. With C the worth of a stage's GPUs and W that of what they do for a
       micro-batch, C tau >= W, and by Cauchy's inequality (second line) the GPUs of a replica are worth
         (T - step) sum C >= (sum tau + (m - 1) max tau) sum C
                          >= (sum sqrt(C tau))^2 + (m - 1) sum C tau >= m sum W + (sum sqrt W)^2 - sum W
       where the last two are the sum of sqrt(W W') over pairs of different stages, which falls with no W; and
       W >= B f. So they idle for B ((sum sqrt f)^2 - 1) at least. Now sum sqrt f = sum f sqrt q = E, and
       E^2 >= 2 a E - a^2 for any a: they idle for B sum f (2 a sqrt q - a^2 - 1), linear in f = x / w.

Each row is kept by a sum over GPUs, and the replicas' sequences are the batch. So where the program holds
less than the batch, T is not possible, and nothing below. What travels between units is not counted, nor how
uneven whole layers are: on thin links the bound says little.

A solver only suggests prices of rows. At any prices, the batch is at most what is worth most of each kind's
GPUs over all vertices of all options (weak duality); that is evaluated here, and decides.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

import numpy as np
from ortools.linear_solver import pywraplp

from megatron_hexi.cluster import Cluster
from megatron_hexi.cost import RECOMPUTES
from megatron_hexi.cost.arrays import Floats, Ints
from megatron_hexi.cost.memory import OPTIMIZER_BYTES
from megatron_hexi.planner.joint_options import MODES, Places, Unit, ranges
from megatron_hexi.planner.request import Request

#: The bound is found to this part; rounding of floats adds up to much less than the margin.
_PRECISION, _MARGIN = 2e-3, 1e-9
#: So many times the least time: only memory decides.
_LONG: Final = 1e9
#: Sequences of a micro-batch, and of a replica, from the least of a range to the most.
_SIZES_STEP, _SHARES_STEP = 2.0, 2.0
#: Where tangents touch: square roots of depths.
_TANGENTS = (1.0, 1.25, 1.6, 2.2, 3.2)
#: Columns are added so often; what is not refuted then may be.
_ROUNDS = 60
#: Pairs of works that fill time and memory together.
_PAIRS = np.array(list(itertools.combinations(range(2 * MODES), 2)))
#: Rows of a range of shares: its batch, spread, no more and no less last stages (depth) than that, fill.
_BATCH, _SPREAD, _LAST, _DEPTH, _FILL = 0, slice(1, 1 + MODES), 1 + MODES, 3 + MODES, 5 + MODES
_OWN = _FILL + len(_TANGENTS)
#: A worth of columns that the program has only until it has better ones.
_SHORT = 10.0


@dataclass(frozen=True)
class Bound:
    """A lower bound of the iteration time over all layouts.

    Args:
        iteration_s: seconds; infinite where none fits in memory.
        reason: what bounds it, one sentence for people.
    """

    iteration_s: float
    reason: str


def joint_bound(request: Request, cluster: Cluster, found_s: float = math.inf) -> Bound:
    """The bound over all layouts with causal attention and the request's tensor-parallel sizes.

    Args:
        request: the job; what it fixes is as it says.
        cluster: all GPUs that there are.
        found_s: an iteration that is known to be possible; the bound need not be higher.

    Raises:
        ClusterError: a GPU cannot do the job.
    """
    least = Bound(found_s, "memory suffices for no layout" if found_s == math.inf else "what was found")
    for program in _programs(request, cluster):
        low, high = program.ceiling_s * (1 - _MARGIN), least.iteration_s
        if low >= high or not program.carries(min(high, _LONG * low)):
            continue
        needs = set[str]()
        while high > low * (1 + _PRECISION):
            middle = min(2 * low, math.sqrt(low * high))
            if program.carries(middle):
                high = middle
            else:
                low, needs = middle, program.needs
        more = " and ".join(sorted(needs))
        least = Bound(
            low,
            f"all GPUs at their best rates take {program.ceiling_s:.3g} s"
            + (f"; {more} make it {low:.3g} s" if more else ""),
        )
    return least


def memory_fits(request: Request, cluster: Cluster) -> bool:
    """Whether memory may suffice for some layout; if not, none fits.

    Raises:
        ClusterError: a GPU cannot do the job.
    """
    return any(program.carries(_LONG * program.ceiling_s) for program in _programs(request, cluster))


def _programs(request: Request, cluster: Cluster) -> Iterator[_Program]:
    batch, fixed = request.job.global_batch_size, "micro_batch_size" in request.fixed
    sizes = [(request.job.micro_batch_size,) * 2] if fixed else []
    for first, last in () if fixed else ranges(1, batch, _SIZES_STEP):
        divisors = [size for size in range(first, last + 1) if batch % size == 0]
        if divisors:
            sizes.append((divisors[0], divisors[-1]))
    return (_Program(request, cluster, one) for one in sizes)


class _Program:
    """The linear program, of some sizes of micro-batches.

    Columns are vertices of what all GPUs of a kind can do in one option. Rows are in parts of the batch, and of
    the optimizer's state.

    Args:
        request: the job.
        cluster: its GPUs.
        sizes: sequences of a micro-batch, the least and the most.
    """

    def __init__(self, request: Request, cluster: Cluster, sizes: tuple[int, int]) -> None:
        job, fixed = request.job, request.fixed
        stages = job.pipeline_parallel if "pipeline_parallel" in fixed else None
        self._batch, self._layers, self._size = job.global_batch_size, job.model.layers, sizes[0]
        shares = list(ranges(sizes[0], self._batch, _SHARES_STEP))
        places = Places.of(self._layers, stages, shares)
        nodes = {(id(node.device), len(node.ranks), node.bandwidth): node for node in cluster.nodes}
        counts = Counter((id(node.device), len(node.ranks), node.bandwidth) for node in cluster.nodes)
        units, kinds = list[Unit](), list[int]()
        for kind, node in enumerate(nodes.values()):
            for width in request.widths(len(node.ranks)):
                one = replace(request.with_width(width), pipeline_parallel=1)
                one = replace(one, micro_batch_size=1, recompute="none")
                units.append(Unit(one, node, places, sizes))
                kinds.append(kind)
        self._units = units
        self._gpus = np.array([float(key[1] * count) for key, count in counts.items()])
        #: By option: units in their order, each in all places.
        self._kind = np.repeat(np.array(kinds, dtype=np.int64), len(places.low))
        self._places = Places(*(np.tile(values, len(units)) for values in vars(places).values()))
        self._room, self._step_s, self._held, self._attended = (
            np.concatenate([getattr(unit, name) for unit in units] or [np.zeros((0, MODES))])
            for name in ("room", "step_s", "held_bytes", "attended_bytes")
        )
        self._state = job.model.total_params * float(OPTIMIZER_BYTES[job.precision])
        some = {job.mode, "none"} if isinstance(job.recompute, int) else {job.mode}
        modes = ["recompute" not in fixed or mode in some for mode in RECOMPUTES]
        self._modes = np.array(modes * 2)
        self._set_worth(modes.index(True))
        self._set_shares(shares, stages, job.data_parallel if "data_parallel" in fixed else None)
        #: What the last proof needed besides time, and the columns that it used.
        self.needs, self._useful = set[str](), list[tuple[int, int]]()

    def _set_worth(self, mode: int) -> None:
        """What a second of a GPU is worth: dear enough for the least mode, all together as cheap as can be."""
        seconds = self._seconds(math.inf)[:, [mode, MODES + mode]]
        best = np.full((len(self._gpus), 2), np.inf)
        np.minimum.at(best, self._kind, np.where(self._room[:, None] > 0, seconds, np.inf))
        token, attention = best.T

        def worth(part: float) -> Floats:
            return np.maximum(part / token, (1 - part) / attention)

        parts = [part for part in token / (token + attention) if math.isfinite(part)]
        self._part = min(parts, key=lambda part: float(self._gpus @ worth(part)), default=0.5)
        self._worth = worth(self._part)
        together = float(self._gpus @ self._worth)
        #: A sequence on all GPUs at their best, and an iteration's.
        self._pass_s = 1 / together if together else 1.0
        self.ceiling_s = self._batch * self._pass_s

    def _set_shares(self, shares: list[tuple[int, int]], stages: int | None, replicas: int | None) -> None:
        """Rows that are not sums of columns only; the last three: room, no fewer and no more replicas."""
        count = len(shares) * _OWN
        #: What a range's part of the batch gives to all rows, [ranges, rows], and what these must come to.
        self._shares, self._least = np.zeros((len(shares), count + 3)), np.zeros(count + 3)
        for number, (fewest, most) in enumerate(shares):
            own = self._shares[number, number * _OWN :]
            own[[_BATCH, _LAST, _LAST + 1]] = -1, 1, -1
            if stages:
                own[[_DEPTH, _DEPTH + 1]] = stages, -stages
            if replicas:
                self._shares[number, count + 1 :] = 1 / fewest, -1 / most
        self._least[count] = 1
        if replicas:
            self._least[count + 1 :] = replicas / self._batch, -replicas / self._batch
        self._has_depth = stages is not None

    def _seconds(self, iteration_s: float) -> Floats:
        return np.concatenate([unit.seconds(iteration_s) for unit in self._units] or [np.zeros((0, 2 * MODES))])

    def _vertices(self, seconds: Floats, left: Floats) -> tuple[Ints, Floats]:
        """What a GPU of each option can do at the ends: nothing, a work, or two that fill time and memory.

        Args:
            seconds: of each work, [options, works].
            left: seconds that there are, [options].

        Returns:
            The option of each vertex, [V], and works, [V, works].
        """
        size, room, left = np.hstack([self._held, self._attended / 2]), self._room[:, None], left[:, None]
        count = size.shape[1]
        works = np.zeros((len(size), 1 + count + len(_PAIRS), count))
        alone, both = np.arange(count), 1 + count + np.arange(len(_PAIRS))
        works[:, 1 + alone, alone] = np.minimum(left / seconds, room / size)
        (a, b), (c, d) = ((one[:, _PAIRS[:, 0]], one[:, _PAIRS[:, 1]]) for one in (seconds, size))
        with np.errstate(divide="ignore", invalid="ignore"):
            works[:, both, _PAIRS[:, 0]] = (left * d - b * room) / (a * d - b * c)
            works[:, both, _PAIRS[:, 1]] = (a * room - left * c) / (a * d - b * c)
        found = (np.isfinite(works) & (works >= 0)).all(axis=2) & (left > 0) & (room > 0)
        found &= ~(works[:, :, ~self._modes] > 0).any(axis=2)
        option, _ = np.nonzero(found)
        return option, works[found]

    def _columns(self, iteration_s: float) -> tuple[Ints, Floats]:
        """What all GPUs of its kind give at each vertex to the rows of its range, and to the room as the last.

        Returns:
            The option of each vertex, [V], and [V, rows].
        """
        places, seconds = self._places, self._seconds(iteration_s)
        time, q, deepest = iteration_s - self._step_s, self._layers / places.high, self._layers / places.low
        option, works = self._vertices(seconds, time - (1 - 1 / q) * self._size * self._pass_s)
        x, z = works[:, :MODES], works[:, MODES:]
        passed = self._part * x.sum(axis=1) + (1 - self._part) * z.sum(axis=1)
        idle = self._worth[self._kind[option]] * (time[option] - np.einsum("vw,vw->v", works, seconds[option]))
        columns = np.zeros((len(option), _OWN + 1))
        columns[:, _BATCH], columns[:, _SPREAD] = x.sum(axis=1), z - x
        least, most = -passed * q[option], passed * deepest[option]
        columns[:, _LAST], columns[:, _LAST + 1] = least * places.last[option], most * places.last[option]
        if self._has_depth:
            columns[:, _DEPTH], columns[:, _DEPTH + 1] = least, most
        for row, touch in enumerate(_TANGENTS, _FILL):
            pipe = self._size * (2 * touch * np.sqrt(q) - touch**2 - 1)
            pipe /= np.where(pipe > 0, places.most, places.fewest)
            columns[:, row] = (idle - passed * pipe[option]) * self.ceiling_s / iteration_s
        columns /= self._batch
        whole = np.einsum("vw,vw->v", x, (self._held + self._attended)[option])
        columns[:, -1] = (self._room[option] - whole) / self._state
        return option, columns * self._gpus[self._kind[option], None]

    def carries(self, iteration_s: float) -> bool:
        """Whether the batch may be done in a time; if not, it cannot be done."""
        option, columns = self._columns(iteration_s)
        share, kind = self._places.share[option], self._kind[option]
        count = len(self._shares)
        at = np.hstack([np.arange(count * _OWN).reshape(count, _OWN), np.full((count, 1), count * _OWN)])[share]
        part = kind * count + share
        chosen = np.zeros(0, dtype=np.int64)
        for _ in range(_ROUNDS):
            solved = _solve(self, kind[chosen], at[chosen], columns[chosen])
            if solved is None or solved.goal >= 1:
                break
            worth = np.einsum("vr,vr->v", columns, solved.rows[at])
            top = np.zeros(len(self._gpus))
            np.maximum.at(top, kind, worth)
            most = max(0.0, float((1 + self._shares @ solved.rows).max())) - float(self._least @ solved.rows)
            if most + float(top.sum()) < 1 - _MARGIN:
                self.needs = self._named(solved.rows)
                return False
            best = np.full(part.max() + 1, -np.inf)
            np.maximum.at(best, part, worth)
            hits = np.flatnonzero(worth == best[part])
            hits = hits[np.unique(part[hits], return_index=True)[1]]
            new = np.setdiff1d(hits[worth[hits] > solved.kinds[kind[hits]] + _MARGIN], chosen)
            if not len(new):
                break
            chosen = np.concatenate([chosen, new])
        return True

    def _named(self, rows: Floats) -> set[str]:
        """What has a price."""
        own = rows[: len(self._shares) * _OWN].reshape(-1, _OWN)
        found = {"pipelines that fill": own[:, _FILL:].max(), "memory of all GPUs": rows[len(self._shares) * _OWN]}
        return {name for name, price in found.items() if price > _MARGIN}


class _Solved(NamedTuple):
    goal: float
    rows: Floats
    kinds: Floats


def _solve(program: _Program, kind: Ints, at: Ints, columns: Floats) -> _Solved | None:
    """The program over some columns, by GLOP"""
    shares, least, kinds = program._shares, program._least, len(program._gpus)
    solver = pywraplp.Solver.CreateSolver("GLOP")
    free, goal = solver.infinity(), solver.Objective()
    goal.SetMaximization()
    rows = [solver.Constraint(value, free) for value in least.tolist()]
    limits = [solver.Constraint(-free, 1) for _ in range(kinds)]

    def add(worth, entries):
        variable = solver.NumVar(0, free, "")
        goal.SetCoefficient(variable, worth)
        for row, value in entries:
            if abs(value) > _MARGIN:
                rows[row].SetCoefficient(variable, value)
        return variable

    for share in shares.tolist():
        add(1, enumerate(share))
    for row in range(len(rows) - 3, len(rows)):
        add(-_SHORT, [(row, 1)])
    for kind_, at_, values in zip(kind.tolist(), at.tolist(), columns.tolist(), strict=True):
        limits[kind_].SetCoefficient(add(0, zip(at_, values)), 1)
    if solver.Solve() != solver.OPTIMAL:
        return None
    return _Solved(goal.Value(), np.array([max(0.0, -row.dual_value()) for row in rows]), np.array([max(0.0, one.dual_value()) for one in limits]))
