"""A time that no layout can beat: replicas x pipelines x layers and tensor-parallel size of a stage x context
and heads x recomputation x ministages and offload x shares of the batch. A linear program, in the terms of
options.py.

Take any plan of the cost model that fits in memory and takes T. Of a stage with l of the L layers f is l / L
and q is 1 / f; each of its GPUs is in some option, with works x and z. Then, with the best rates:

time   m micro-batches take tau each in the stage, and one passes the others besides (pipeline.py: sum of tau
       + (m - 1) x longest), no faster than on all GPUs together; the optimizer's step follows. Nothing of a
       GPU's own work overlaps (layer.py):   seconds(x, z) <= T - step - (1 - f) pass
memory Kept are l layers of n micro-batches, L S x n / m: one on a last stage, min(m, 2) before it, and
       m <= w / B. Under way is one layer, S x q / m. What attention keeps goes by tokens of the group x heads
       of the unit: half as much as z at least, since a token sees S tokens at most and S / 2 on average.
room   The same of all GPUs together, where tokens x heads are as many as x; and the optimizer's state once.
spread Each layer of each sequence has one mode: of all replicas in a range of w, z of a mode is as much as x.
last   A replica has one last stage, with the logits: its x q is w.
depth  Where pipelines have a fixed number of stages: x q of all of these is w times the number.
fill   Let a second of GPU g be worth c_g, so that a sequence's token work and attention together are worth 1
       at least, wherever they are done. With C the worth of a stage's GPUs and W that of what they do for a
       micro-batch, C tau >= W, and by Cauchy's inequality (second line) the GPUs of a replica are worth
         (T - step) sum C >= (sum tau + (m - 1) max tau) sum C
                          >= (sum sqrt(C tau))^2 + (m - 1) sum C tau >= m sum W + (sum sqrt W)^2 - sum W
       where the last two are the sum of sqrt(W W') over pairs of different stages, which falls with no W; and
       W >= B f. So they idle for B ((sum sqrt f)^2 - 1) at least. Now sum sqrt f = sum f sqrt q = E, and
       E^2 >= 2 a E - a^2 for any a: they idle for B sum f (2 a sqrt q - a^2 - 1), linear in f = x / w; and in
       f = z / w, by which attention does not go where layers are few.

A stage in ministages (options.py) gives idle time to the fill row and takes nothing of it; no micro-batch
passes the others before it ends. All stages of its replica are, so those before the last have q - 1 times
the x of the last or more. The optimizer's state may lie in host memory: the room has that too.

Sums over GPUs keep each row, and the sequences of all replicas are the batch. So where the program does less
than the batch, T is not possible, and nothing below. What travels between units is not counted, nor that
layers are whole: on thin links the bound says little.

A solver only suggests prices of rows. At any prices the batch is at most what is worth most of each kind's
GPUs over all vertices of all options (weak duality); that is evaluated here, and decides.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
from ortools.linear_solver import pywraplp

from megatron_hexi.cluster import Cluster
from megatron_hexi.cost import RECOMPUTES
from megatron_hexi.cost.arrays import Floats, Ints
from megatron_hexi.cost.hosts import Hosts
from megatron_hexi.cost.memory import OPTIMIZER_BYTES
from megatron_hexi.planner.bound.options import MODES, Places, Unit, ranges
from megatron_hexi.planner.request import Request

#: The bound is found to this part; rounding of floats adds up to much less than the margin.
_PRECISION, _MARGIN = 2e-3, 1e-9
#: The first time that is tried is so much longer than the least; each one after it four times as much.
_RISE = 0.04
#: So many times the least time: only memory decides.
_LONG = 1e9
#: Sequences of a micro-batch and of a replica, from the least of a range to the most.
_STEP = 2.0
#: Where tangents touch: square roots of depths.
_TANGENTS = (1.0, 1.4, 2.0, 3.0)
#: Columns are added so often; what is not refuted then may be.
_ROUNDS = 60
#: Pairs of works that fill time and memory together.
_PAIRS = np.array(list(itertools.combinations(range(2 * MODES), 2))).T
#: Rows of a range of shares: batch, spread, last stages and depth (no more and no less), fill by x and by z.
_BATCH, _SPREAD, _LAST, _DEPTH, _FILL = 0, slice(1, 1 + MODES), 1 + MODES, 3 + MODES, 5 + MODES
#: And the stages before the last in ministages.
_TURNS = _FILL + 2 * len(_TANGENTS)
_OWN = _TURNS + 1
#: How GLOP solves: from its last basis, which it needs no presolve for; where it gives up, with one.
_WAYS = pywraplp.MPSolverParameters(), pywraplp.MPSolverParameters()
_WAYS[0].SetIntegerParam(pywraplp.MPSolverParameters.PRESOLVE, pywraplp.MPSolverParameters.PRESOLVE_OFF)


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
    nothing = "no layout fits in memory" if math.isinf(found_s) else "no layout is faster than the one found"
    least = Bound(found_s, nothing)
    for program in _programs(request, cluster):
        low, high = program.ceiling_s * (1 - _MARGIN), least.iteration_s
        if low >= high or not program.carries(min(high, _LONG * low)):
            continue
        needs, step = "", _RISE
        while high > low * (1 + _PRECISION):
            middle = min(low * (1 + step), math.sqrt(low * high))
            if program.carries(middle):
                high = middle
            else:
                low, needs, step = middle, program.needs, 4 * step
        least = Bound(low, f"all GPUs at their best rates take {program.ceiling_s:.4g} s{needs}")
    return least


def memory_fits(request: Request, cluster: Cluster) -> bool:
    """Whether memory may suffice for some layout; if not, none fits.

    Raises:
        ClusterError: a GPU cannot do the job.
    """
    return any(program.carries(_LONG * program.ceiling_s) for program in _programs(request, cluster))


def _programs(request: Request, cluster: Cluster) -> Iterator[_Program]:
    """One for each range of micro-batch sizes: a plan has one size."""
    batch, size = request.job.global_batch_size, request.job.micro_batch_size
    fixed = "micro_batch_size" in request.fixed
    for first, last in [(size, size)] if fixed else ranges(1, batch, _STEP):
        sizes = [size for size in range(first, last + 1) if batch % size == 0]
        if sizes:
            yield _Program(request, cluster, (sizes[0], sizes[-1]))


class _Solved(NamedTuple):
    """Over some columns: what of the batch is done, prices of rows and of a kind's GPUs, columns in use."""

    done: float
    rows: Floats
    kinds: Floats
    used: Ints


class _Program:
    """The linear program, for some sizes of micro-batches.

    Columns are vertices of what all GPUs of a kind can do in one option. Rows are in parts of the batch, and
    of the optimizer's state. `Raises` as `joint_bound`.

    Args:
        request: the job.
        cluster: its GPUs.
        sizes: sequences of a micro-batch, the least and the most.
    """

    def __init__(self, request: Request, cluster: Cluster, sizes: tuple[int, int]) -> None:
        job, fixed = request.job, request.fixed
        stages = job.pipeline_parallel if "pipeline_parallel" in fixed else None
        self._batch, self._layers, self._size = job.global_batch_size, job.model.layers, sizes[0]
        shares = list(ranges(sizes[0], self._batch, _STEP))
        both = [vars(some(self._layers, stages, shares)) for some in (Places.of, Places.of_turns)]
        places = Places(**{name: np.concatenate([one[name] for one in both]) for name in both[0]})
        nodes = {(id(node.device), len(node.ranks), node.bandwidth): node for node in cluster.nodes}
        counts = Counter((id(node.device), len(node.ranks), node.bandwidth) for node in cluster.nodes)
        self._gpus = np.array([float(counts[key] * key[1]) for key in nodes])
        some = {job.mode, "none"} if isinstance(job.recompute, int) else {job.mode}
        modes = ["recompute" not in fixed or mode in some for mode in RECOMPUTES]
        units, kinds = list[Unit](), list[int]()
        for kind, node in enumerate(nodes.values()):
            for width in request.widths(len(node.ranks)):
                own = replace(request.with_width(width), pipeline_parallel=1, recompute="none")
                units.append(Unit(replace(own, micro_batch_size=1), node, places, sizes, sum(modes) > 1))
                kinds.append(kind)
        self._units = units
        #: Options by range of shares, from all places of the first unit, then of the others.
        self._order = np.argsort(np.tile(places.share, len(units)), kind="stable")
        self._kind = np.repeat(np.array(kinds, dtype=np.int64), len(places.low))[self._order]
        self._places = Places(*(np.tile(each, len(units))[self._order] for each in vars(places).values()))
        self._turns = self._places.parts > 0
        self._room, self._step_s, self._held, self._attended = (
            np.concatenate([getattr(unit, name) for unit in units])[self._order]
            for name in ("room", "step_s", "held_bytes", "attended_bytes")
        )
        self._host = Hosts(cluster).bytes
        self._state = job.model.total_params * float(OPTIMIZER_BYTES[job.precision])
        self._modes = np.array(modes * 2)
        self._set_worth(modes.index(True))
        self._set_shares(shares, stages, job.data_parallel if "data_parallel" in fixed else None)
        #: What the last proof needed besides the best rates, for people.
        self.needs = ""
        #: Vertices that the last solution used, by number.
        self._useful = np.zeros(0, dtype=np.int64)

    def _set_worth(self, mode: int) -> None:
        """What a second of a GPU is worth: enough in the least mode, and all together as little as can be."""
        seconds = np.where(self._room[:, None] > 0, self._seconds(math.inf)[:, [mode, MODES + mode]], np.inf)
        best = np.full((len(self._gpus), 2), np.inf)
        np.minimum.at(best, self._kind, seconds)
        token, attention = best.T

        def worth(part: float) -> Floats:
            return np.maximum(part / token, (1 - part) / attention)

        parts = [first / (first + second) for first, second in best if first < np.inf]
        self._worth = worth(min(parts, key=lambda part: float(self._gpus @ worth(part)), default=0.5))
        together = float(self._gpus @ self._worth)
        #: A sequence on all GPUs at their best, and an iteration's.
        self._pass_s = 1 / together if together else 1.0
        self.ceiling_s = self._batch * self._pass_s

    def _set_shares(self, shares: list[tuple[int, int]], stages: int | None, replicas: int | None) -> None:
        """What no column gives to rows. The last rows are the room, no fewer and no more replicas."""
        count = len(shares) * _OWN
        #: What a range's part of the batch gives to all rows, [ranges, rows], and what these come to.
        self._shares, self._least = np.zeros((len(shares), count + 3)), np.zeros(count + 3)
        self._least[count] = 1 - self._host / self._state
        for number, (fewest, most) in enumerate(shares):
            own = self._shares[number, number * _OWN : (number + 1) * _OWN]
            own[[_BATCH, _LAST, _LAST + 1]] = -1, 1, -1
            if stages:
                own[[_DEPTH, _DEPTH + 1]] = stages, -stages
            if replicas:
                self._shares[number, count + 1 :] = 1 / fewest, -1 / most
        if replicas:
            self._least[count + 1 :] = replicas / self._batch, -replicas / self._batch
        self._has_depth = stages is not None

    def _seconds(self, iteration_s: float) -> Floats:
        return np.concatenate([unit.seconds(iteration_s) for unit in self._units])[self._order]

    def _vertices(self, seconds: Floats, left: Floats) -> tuple[Ints, Floats]:
        """What a GPU of each option can do at the ends: nothing, a work, or two that fill time and memory.

        Args:
            seconds: of each work, [options, works].
            left: seconds that there are, [options].

        Returns:
            The number of each vertex, by options, [V], and works, [V, works].
        """
        size, room, left = np.hstack([self._held, self._attended / 2]), self._room[:, None], left[:, None]
        count, (first, second) = size.shape[1], _PAIRS
        works = np.zeros((len(size), 1 + count + len(first), count))
        alone, both = np.arange(count), 1 + count + np.arange(len(first))
        a, b, c, d = (one[:, pair] for one in (seconds, size) for pair in (first, second))
        with np.errstate(divide="ignore", invalid="ignore"):  # a work may take no memory
            works[:, 1 + alone, alone] = np.minimum(left / seconds, room / size)
            works[:, both, first] = (left * d - b * room) / (a * d - b * c)
            works[:, both, second] = (a * room - left * c) / (a * d - b * c)
        found = (np.isfinite(works) & (works >= 0)).all(axis=2) & (left > 0) & (room > 0)
        found &= ~(works[:, :, ~self._modes] > 0).any(axis=2)
        return np.flatnonzero(found), works[found]

    def _columns(self, iteration_s: float) -> tuple[Ints, Ints, Floats]:
        """What all GPUs of its kind give at each vertex to the rows of its range, and to the room.

        Returns:
            The number of each vertex, the option, [V], and [rows, V]; the room is the last.
        """
        places, seconds = self._places, self._seconds(iteration_s)
        time, q, deepest = iteration_s - self._step_s, self._layers / places.high, self._layers / places.low
        passed = np.where(self._turns, 0.0, 1 - 1 / q) * self._size * self._pass_s
        number, works = self._vertices(seconds, time - passed)
        option = number // (1 + 2 * MODES + len(_PAIRS[0]))
        x, z = works[:, :MODES].T, works[:, MODES:].T
        done = x.sum(axis=0), z.sum(axis=0)
        busy = np.einsum("vw,vw->v", works, seconds[option])
        idle = self._worth[self._kind[option]] * (time[option] - busy)
        columns = np.zeros((_OWN + 1, len(option)))
        columns[_BATCH], columns[_SPREAD] = done[0], z - x
        stages = done[0] * np.stack([-q, deepest])[:, option]
        columns[_LAST : _LAST + 2] = stages * places.last[option]
        if self._has_depth:
            columns[_DEPTH : _DEPTH + 2] = stages
        touch = np.array(_TANGENTS)[:, None]
        pipes = self._size * (2 * touch * np.sqrt(q) - touch**2 - 1)
        pipes /= np.where(pipes > 0, places.most, places.fewest)
        pipes[:, self._turns] = 0
        before = self._turns * np.where(places.last, 1 - q, 1.0)
        columns[_TURNS] = done[0] * before[option]
        for row, work in zip((_FILL, _FILL + len(touch)), done, strict=True):
            fill = idle - work * pipes[:, option]
            columns[row : row + len(touch)] = fill * (self.ceiling_s / iteration_s)
        columns /= self._batch
        whole = np.einsum("wv,vw->v", x, (self._held + self._attended)[option])
        columns[-1] = (self._room[option] - whole) / self._state
        return number, option, columns * self._gpus[self._kind[option]]

    def carries(self, iteration_s: float) -> bool:
        """Whether the batch may be done in a time; if not, it cannot be done."""
        number, option, columns = self._columns(iteration_s)
        share, kind, count = self._places.share[option], self._kind[option], len(self._shares)
        rows = np.hstack([np.arange(count * _OWN).reshape(count, _OWN), np.full((count, 1), count * _OWN)])
        part = 2 * (kind * count + share) + self._places.last[option]
        chosen = np.flatnonzero(np.isin(number, self._useful))
        spans = list(itertools.starmap(slice, itertools.pairwise(np.searchsorted(share, range(count + 1)))))
        master, new = _Master(self._least, self._shares, len(self._gpus)), chosen
        for _ in range(_ROUNDS):
            solved = master.solve(kind[new], rows[share[new]], columns[:, new].T)
            if solved is None or solved.done >= 1:
                break
            self._useful = number[chosen[solved.used]]
            prices = zip(spans, solved.rows[rows], strict=True)
            worth = np.concatenate([own @ columns[:, span] for span, own in prices])
            top = np.zeros(len(self._gpus))
            np.maximum.at(top, kind, worth)
            rest = max(0.0, float((1 + self._shares @ solved.rows).max())) - float(self._least @ solved.rows)
            if float(top.sum()) + rest < 1 - _MARGIN:
                self.needs = _name_needs(solved.rows)
                return False
            # The best of each kind in each range, on last stages and before them.
            best = np.zeros(2 * len(self._gpus) * count)
            np.maximum.at(best, part, worth)
            first = np.flatnonzero(worth == best[part])
            first = first[np.unique(part[first], return_index=True)[1]]
            new = np.setdiff1d(first[worth[first] > solved.kinds[kind[first]] + _MARGIN], chosen)
            if not len(new):
                break
            chosen = np.concatenate([chosen, new])
        return True


class _Master:
    """The program over columns that were added so far, for GLOP.

    Args:
        least: of each row.
        shares: what a range's part of the batch gives to all rows, [ranges, rows].
        kinds: of GPUs; all columns of one together are its GPUs once.
    """

    def __init__(self, least: Floats, shares: Floats, kinds: int) -> None:
        self._solver = solver = pywraplp.Solver.CreateSolver("GLOP")
        solver.Objective().SetMaximization()
        self._rows = [solver.Constraint(value, solver.infinity()) for value in least.tolist()]
        self._kinds = [solver.Constraint(-solver.infinity(), 1) for _ in range(kinds)]
        self._columns: list[Any] = []
        for share in shares.tolist():
            self._variable(1, enumerate(share))
        for row in range(len(least) - 3, len(least)):  # what is missing, at a price that none can pay
            self._variable(-10, [(row, 1)])

    def _variable(self, worth: float, entries: Iterable[tuple[int, float]]) -> Any:
        variable = self._solver.NumVar(0, self._solver.infinity(), "")
        if worth:
            self._solver.Objective().SetCoefficient(variable, worth)
        for row, value in entries:
            if abs(value) > _MARGIN:  # less only makes it unstable
                self._rows[row].SetCoefficient(variable, value)
        return variable

    def solve(self, kind: Ints, at: Ints, columns: Floats) -> _Solved | None:
        """With some more columns; ``None``: GLOP gave up.

        Args:
            kind: of GPUs of each.
            at: its rows, [V, rows].
            columns: what it gives to these.
        """
        for number, *one in zip(kind.tolist(), at.tolist(), columns.tolist(), strict=True):
            variable = self._variable(0, zip(*one, strict=True))
            self._kinds[number].SetCoefficient(variable, 1)
            self._columns.append(variable)
        if self._solver.OPTIMAL not in map(self._solver.Solve, _WAYS):
            return None
        rows, kinds = (np.abs([one.dual_value() for one in which]) for which in (self._rows, self._kinds))
        used = np.flatnonzero([variable.solution_value() > _MARGIN for variable in self._columns])
        return _Solved(self._solver.Objective().Value(), rows, kinds, used)


def _name_needs(rows: Floats) -> str:
    """What has a price besides time."""
    own = rows[:-3].reshape(-1, _OWN)
    prices = {"pipelines that fill and drain": own[:, _FILL:_TURNS].max(), "the memory of all GPUs": rows[-3]}
    needs = [name for name, price in prices.items() if price > _MARGIN]
    return f"; {' and '.join(needs)} add to it" if needs else ""
