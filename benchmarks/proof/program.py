"""A linear program that refutes times of an iteration; bound.py proves its rows, options.py has its terms."""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from benchmarks.proof.linear_solver import solve
from benchmarks.proof.options import MODES, Places, UnitCandidates, ranges
from megatron_hexi.cluster import Cluster
from megatron_hexi.cost.arrays import Bools, Floats, Ints
from megatron_hexi.cost.hosts import Hosts
from megatron_hexi.cost.memory import weight_bytes
from megatron_hexi.plan.recompute import of_layer
from megatron_hexi.planner.request import Request

#: Tolerance for rounding of floats, which adds up to much less.
MARGIN = 1e-9
#: Ratio of the most to the least sequences of a replica in a range.
SHARES_STEP = 2.0
#: Values of a, where the fill rows' tangents touch: square roots of depths.
_TANGENTS = (1.0, 1.4, 2.0, 3.0)
#: The most rounds of adding columns; a time that is not refuted by then counts as possible.
_ROUNDS = 60
#: Rows of a range of shares: batch, spread, last stages and depth (no more and no less), fill by x and by z.
_BATCH, _SPREAD, _LAST, _DEPTH, _FILL = 0, 1, 1 + len(MODES), 3 + len(MODES), 5 + len(MODES)
#: Row of the stages before the last in ministages.
_TURNS = _FILL + 2 * len(_TANGENTS)
_OWN = _TURNS + 1
#: Number of rows common to all ranges: the room, no fewer and no more replicas.
_ALL = 3


class _Ends(NamedTuple):
    """Work that a GPU of each option can do in a time.

    Args:
        possible: whether there is time for anything, [options].
        works: amounts of the two works of each vertex, [2, vertices, options].
        idle: values in the fill rows of a kind's GPUs without work, and of one of each work,
            [1 + works, options].
    """

    possible: Bools
    works: Floats
    idle: Floats
    scale: float


class BoundProgram:
    """The linear program, for some sizes of micro-batches.

    Columns are vertices of the set of works that all GPUs of a kind can do in one option. Rows are in parts
    of the batch, and of the optimizer's state.

    Args:
        request: the job, with the terms that are fixed.
        sizes: the least and the most sequences of a micro-batch.
        alike: a program for other sizes, with whose prices and columns this one starts.

    Raises:
        ClusterError: a GPU cannot do the job.
    """

    def __init__(
        self, request: Request, cluster: Cluster, sizes: tuple[int, int], alike: BoundProgram | None = None
    ) -> None:
        job, fixed = request.job, request.fixed
        stages = job.pipeline_parallel if "pipeline_parallel" in fixed else None
        self._batch, self._layers, self._least_size = job.global_batch_size, job.model.layers, sizes[0]
        # From the most down, so that equal ranges have the same number in all programs.
        shares = list(ranges(sizes[0], self._batch, SHARES_STEP))[::-1]
        places = Places.of(self._layers, stages, shares)
        nodes = {(id(node.device), len(node.ranks), node.bandwidth): node for node in cluster.nodes}
        counts = Counter((id(node.device), len(node.ranks), node.bandwidth) for node in cluster.nodes)
        self._gpus = np.array([float(counts[key] * key[1]) for key in nodes])
        allowed = {of_layer(job.recompute), *(["none"] if job.again.first else [])}
        modes = ["recompute" not in fixed or mode in allowed for mode in MODES]
        units, kinds = list[UnitCandidates](), list[int]()
        for kind, node in enumerate(nodes.values()):
            for width in request.widths(len(node.ranks)):
                job_of_width = replace(request.with_width(width), pipeline_parallel=1, recompute="none")
                units.append(
                    UnitCandidates(
                        replace(job_of_width, micro_batch_size=1), node, places, sizes, sum(modes) > 1
                    )
                )
                kinds.append(kind)
        share = np.tile(places.share, len(units))
        order = np.argsort(share, kind="stable")
        #: Options by range of shares: the places of each unit where weights leave room.
        self._units, self._order = units, order[np.concatenate([unit.room for unit in units])[order] > 0]
        self._places = Places(*(np.tile(each, len(units))[self._order] for each in vars(places).values()))
        self._kind = np.repeat(np.array(kinds, dtype=np.int64), len(places.low))[self._order]
        #: Names of the options, the same in all programs, ascending.
        self._name = (share * len(share) // len(shares) + np.arange(len(share)) // len(shares))[self._order]
        self._room, self._step_s, held, attended = (
            np.concatenate([getattr(unit, name) for unit in units])[self._order].T
            for name in ("room", "step_s", "held_bytes", "attended_bytes")
        )
        self._modes = np.flatnonzero(modes)
        self._works = np.concatenate([self._modes, len(MODES) + self._modes])
        self._size = np.concatenate([held, attended / 2])[self._works]
        #: The two works of each vertex: no work, one work, or two works that fill time and memory.
        works = range(len(self._works))
        pairs = [(0, 0), *zip(works, works, strict=True), *itertools.combinations(works, 2)]
        self._pairs = np.array(pairs).T
        self._state = job.model.total_params * weight_bytes(job).state
        self._chunks = _most_chunks(request, self._places)
        self._set_worth()
        self._set_shares(shares, stages, job.data_parallel if "data_parallel" in fixed else None)
        self._least[-_ALL] = 1 - Hosts(cluster).bytes / self._state
        self._set_gives(held + attended, has_depth=stages is not None)
        first = np.resize(np.eye(_OWN)[_BATCH], len(self._least)) if alike is None else alike._prices
        #: Prices that last refuted a time, and the largest part of the batch that they allow in it.
        self._prices: Floats = np.append(first[: len(self._least) - _ALL], first[-_ALL:])
        self.done = 0.0
        #: Vertices that this and earlier programs had as columns, by name.
        self._used: Ints = np.zeros(0, dtype=np.int64) if alike is None else alike._used
        #: Text about what the last proof needed besides the best rates, for people.
        self.needs = ""

    def _set_worth(self) -> None:
        """Set the worth of a GPU's second, such that all GPUs together are worth as little as possible."""
        best = np.full((len(self._gpus), 2), np.inf)
        np.minimum.at(best, self._kind, self._seconds(np.inf)[[0, len(self._modes)]].T)
        token, attention = best.T

        def worth(part: float) -> Floats:
            return np.maximum(part / token, (1 - part) / attention)

        parts = [first / (first + second) for first, second in best if first < np.inf]
        self._worth = worth(min(parts, key=lambda part: float(self._gpus @ worth(part)), default=0.5))
        together = float(self._gpus @ self._worth)
        #: Seconds of a sequence on all GPUs at their best rates, and of an iteration.
        self._pass_s = 1 / together if together else 1.0
        self.ceiling_s = self._batch * self._pass_s

    def _set_shares(self, shares: list[tuple[int, int]], stages: int | None, replicas: int | None) -> None:
        """Set the rows' values that no column adds to."""
        row_values = np.zeros(_OWN)
        row_values[[_BATCH, _LAST, _LAST + 1]] = -1, 1, -1
        if stages:
            row_values[[_DEPTH, _DEPTH + 1]] = stages, -stages
        #: Values of a range's part of the batch in all rows, [ranges, rows]; the least of each row, [rows].
        self._shares = np.pad(np.kron(np.eye(len(shares)), row_values), ((0, 0), (0, _ALL)))
        self._least = np.zeros(self._shares.shape[1])
        if replicas:
            self._shares[:, -2:] = np.array([1, -1]) / shares
            self._least[-2:] = replicas / self._batch, -replicas / self._batch

    def _set_gives(self, whole: Floats, *, has_depth: bool) -> None:
        """Set the values that all GPUs of a kind add to their range's rows and the memory row.

        Args:
            whole: bytes of x of each mode on all GPUs together.
        """
        places, modes = self._places, len(self._modes)
        q, deepest, turns = self._layers / places.high, self._layers / places.low, places.parts > 0
        self._passed = np.where(turns, 0.0, 1 - 1 / q) * self._least_size * self._pass_s / self._chunks
        gives, x, z = np.zeros((_OWN + 1, 1 + 2 * modes, len(q))), slice(1, 1 + modes), slice(1 + modes, None)
        gives[_BATCH, x] = 1
        for number, mode in enumerate(self._modes, 1):
            gives[_SPREAD + mode, [number, modes + number]] = [[-1], [1]]
        stages = np.stack([-q, deepest])[:, None]
        gives[_LAST : _LAST + 2, x] = stages * places.last
        if has_depth:
            gives[_DEPTH : _DEPTH + 2, x] = stages
        touch = np.array(_TANGENTS)[:, None]
        pipes = self._least_size * (2 * touch * np.sqrt(q) - touch**2 - 1)
        pipes /= np.where(pipes > 0, places.most * self._chunks, places.fewest)
        pipes[:, turns] = 0
        for row, works in zip((_FILL, _FILL + len(touch)), (x, z), strict=True):
            gives[row : row + len(touch), works] = -pipes[:, None]
        gives[_TURNS, x] = turns * np.where(places.last, 1 - q, 1.0)
        gives /= self._batch
        gives[-1, 0] = self._room / self._state
        gives[-1, x] = -whole[self._modes] / self._state
        #: Values in the rows: without work, and of one of each work, [options, 1 + works, rows].
        self._gives = np.ascontiguousarray((gives * self._gpus[self._kind]).T)
        spans = np.searchsorted(places.share, range(len(self._shares) + 1))
        self._spans = list(itertools.starmap(slice, itertools.pairwise(spans)))

    def _seconds(self, iteration_s: float) -> Floats:
        """Return the seconds of each work in each option, [works, options]."""
        return np.concatenate([unit.seconds(iteration_s) for unit in self._units])[self._order].T[self._works]

    def _at(self, iteration_s: float) -> _Ends:
        """Return the work that options can do in a time: none, one kind, or two that fill time and memory."""
        seconds, time, count = self._seconds(iteration_s), iteration_s - self._step_s, 1 + len(self._works)
        left = time - self._passed
        works = np.zeros((2, len(self._pairs[0]), len(left)))
        a, b, c, d = (values[pair] for values in (seconds, self._size) for pair in self._pairs[:, count:])
        with np.errstate(divide="ignore", invalid="ignore"):  # a work may take no memory
            works[0, 1:count] = np.minimum(left / seconds, self._room / self._size)
            both = np.stack([left * d - b * self._room, a * self._room - left * c]) / (a * d - b * c)
            works[:, count:] = np.where((np.isfinite(both) & (both >= 0)).all(axis=0), both, 0)
        scale = self.ceiling_s / iteration_s
        worth = (self._worth * self._gpus)[self._kind] * scale / self._batch
        return _Ends(left > 0, works, np.concatenate([time[None], -seconds]) * worth, scale)

    def _value(self, ends: _Ends, prices: Floats) -> tuple[Floats, Floats, float]:
        """Evaluate the worth of options at these prices.

        Returns:
            The largest worth of each option, [options]; the worth of each vertex, [vertices, options]; the
            largest part of the batch that can be done.
        """
        range_prices = np.append(
            prices[:-_ALL].reshape(-1, _OWN), np.full((len(self._shares), 1), prices[-_ALL]), axis=1
        )
        idle = range_prices[:, _FILL:_TURNS].sum(axis=1)[self._places.share] * ends.idle
        range_prices[:, _FILL:_TURNS] *= ends.scale
        parts = [self._gives[span] @ price for span, price in zip(self._spans, range_prices, strict=True)]
        each = np.ascontiguousarray(np.concatenate(parts).T) + idle
        first, second = self._pairs
        vertices = ends.works[0] * each[1:].take(first, axis=0)
        vertices += ends.works[1] * each[1:].take(second, axis=0)
        vertices += each[0]
        worth = np.where(ends.possible, vertices.max(axis=0), 0)
        top = np.zeros(len(self._gpus))
        np.maximum.at(top, self._kind, worth)
        rest = max(0.0, float((1 + self._shares @ prices).max())) - float(self._least @ prices)
        return worth, vertices, float(top.sum()) + rest

    def most_done(self, iteration_s: float) -> float:
        """Return the largest part of the batch done in a time, by the prices that last refuted a time."""
        return self._value(self._at(iteration_s), self._prices)[2]

    def _columns(self, ends: _Ends, option: Ints, vertex: Ints) -> Floats:
        """Return columns of V vertices: the values that all GPUs of their kind add to the rows, [rows, V]."""
        gives, number, count = self._gives[option], np.arange(len(option)), len(self._least)
        gives[:, :, _FILL:_TURNS] *= ends.scale
        gives[:, :, _FILL:_TURNS] += ends.idle.T[option][:, :, None]
        values = gives[:, 0]
        for works, pair in zip(ends.works, self._pairs, strict=True):
            values = values + works[vertex, option][:, None] * gives[number, 1 + pair[vertex]]
        columns = np.zeros((count + len(self._gpus), len(option)))
        columns[_OWN * self._places.share[option] + np.arange(_OWN)[:, None], number] = values[:, :-1].T
        columns[count - _ALL], columns[count + self._kind[option], number] = values[:, -1], 1
        return columns

    def may_finish(self, iteration_s: float) -> bool:
        """Whether the batch may finish in a time; ``False`` proves that it cannot."""
        ends, prices, vertices = self._at(iteration_s), self._prices, len(self._pairs[0])
        rows, shares, paid = len(self._least), len(self._shares), np.zeros(len(self._gpus))
        columns = np.zeros((rows + len(paid), shares + _ALL))
        columns[:rows, :shares], columns[rows - _ALL : rows, shares:] = self._shares.T, np.eye(_ALL)
        names, vertex = np.divmod(self._used, vertices)
        option = np.minimum(np.searchsorted(self._name, names), len(self._name) - 1)
        there = (self._name[option] == names) & ends.possible[option]
        option, vertex = option[there], vertex[there]
        group = 2 * (self._places.share * len(paid) + self._kind) + self._places.last
        for _ in range(_ROUNDS):
            worth, each, done = self._value(ends, prices)
            if done < 1 - MARGIN:
                self._prices, self.done, self.needs = prices, done, _name_needs(prices)
                return False
            # The best of each kind in each range, on last stages and before them.
            best, order = np.zeros(2 * shares * len(paid), dtype=np.int64), np.argsort(worth)
            best[group[order]] = order
            best = np.unique(best)
            best = best[worth[best] > paid[self._kind[best]] + MARGIN]
            option, vertex = np.append(option, best), np.append(vertex, each[:, best].argmax(axis=0))
            if not len(option):
                break
            columns = np.append(columns, self._columns(ends, option, vertex), axis=1)
            self._used = np.union1d(self._used, self._name[option] * vertices + vertex)
            option, vertex = option[:0], vertex[:0]
            worths = np.zeros(columns.shape[1])
            worths[:shares], worths[shares : shares + _ALL] = 1, -10  # artificial variables, at a high cost
            solved = solve(columns, worths, self._least)
            if solved is None or solved.worth >= 1:
                break
            prices, paid = solved.prices[:rows], solved.prices[rows:]
        return True


def _most_chunks(request: Request, places: Places) -> Floats | Ints:
    """Return the most chunks that stages may have, [P]: as many as is fixed, or a layer each.

    Infinite where stages of several layers that differ may have them: a GPU may idle for no time there.
    """
    if request.virtual_stages is not None:
        return np.full(len(places.high), request.virtual_stages)
    if request.may_interleave:
        return np.where(places.high > 1, np.inf, 1)
    job = request.job
    if "pipeline_parallel" in request.fixed:
        return np.full(len(places.high), max(request.chunk_counts(job)))
    return places.high


def _name_needs(prices: Floats) -> str:
    """Return the names of the rows, besides time, that have a price, as text; may be empty."""
    range_prices = prices[:-_ALL].reshape(-1, _OWN)
    besides = {
        "pipelines that fill and drain": range_prices[:, _FILL:_TURNS].max(),
        "the memory of all GPUs": prices[-_ALL],
    }
    needs = [name for name, price in besides.items() if price > MARGIN]
    return f"; {' and '.join(needs)} add to it" if needs else ""
