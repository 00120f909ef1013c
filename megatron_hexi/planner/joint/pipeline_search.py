"""Searches the best pipeline on a replica's GPUs: its stages, their order and their layers.

Pools of GPUs are joined to blocks: a block's stages all have the same part of each of its pools. For a limit
of a stage's time, a table gives the most layers of the stage. So, block by block from the last stage to the
first, a dynamic program finds for each number of stages, and for each time of a geometric grid, the most
layers of these stages; the first time at which that is the whole model makes a candidate. The best candidates
then get whole layers, exactly: the least time of the slowest stage.

Layers and choices are parts of one number, so that a maximum finds both, for all times and for many numbers
of stages at once: the most layers first, and of choices that carry as many the one that was tried first.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from functools import cache, lru_cache
from typing import NamedTuple

import numpy as np

from megatron_hexi.cost.arrays import Floats, Ints
from megatron_hexi.planner.joint.pipes import Pipe, PipeStage, least_longest, moved_layers
from megatron_hexi.planner.joint.pools import Counts, StageShape, is_exact
from megatron_hexi.planner.joint.stage_runs import StageRuns
from megatron_hexi.planner.joint.stage_tables import DEEPEST, ROWS, StageTables
from megatron_hexi.planner.request import Request

#: Steps of the grid of times: 3 %, refined by the exact layers afterwards.
_STEP = 1.03
#: The most candidates that get whole layers.
_FINALISTS = 10
#: Factors of a border's seconds that are added to its sender's and to its receiver's time when layers are
#: assigned; the best of these is taken.
_CHARGED = ((2.0, 0.0), (0.0, 0.0), (0.0, 2.0), (1.0, 1.0), (0.5, 0.5))
#: Number of layers that stands for a stage which does not fit.
_NEVER = -(10**6)
#: Below the layers, a number has bits of two choices: of the stages behind, and of the block's option.
_OPTIONS, _CHOICES = 2**10, 2**15
#: Blocks whose layers are kept; each takes some 100 KB.
_MOST_BLOCKS = 512


class _Block(NamedTuple):
    """The most layers of a block's stages together, if no stage exceeds a time of the grid.

    Args:
        depths: possible numbers of its stages, in the order of their first option, [D].
        layers: the most layers, times `_CHOICES`, plus `_OPTIONS` - 1 - the option chosen; by the number of
            stages and by that of the stages behind, [D, 1 + `DEEPEST`, times]; of a last block [D, 1, times].
    """

    depths: Ints
    layers: Ints


class _Level(NamedTuple):
    """The most layers of a pipeline's last blocks, if no stage exceeds a time of the grid.

    Args:
        depths: possible numbers of stages, in the order in which they were found.
        layers: the most layers by the number of stages, with the choices in the lowest bits as in `_Block`;
            above the option, 31 - the index in `depths` of the stages behind the first block, [1 + `DEEPEST`,
            times].
    """

    depths: list[int]
    layers: Ints


class _Candidate(NamedTuple):
    """A pipeline from the tables.

    Args:
        seconds: seconds of all micro-batches.
        levels: the layers of its last blocks, from none of them to all.
        depth: number of its stages.
        time: index in the grid of the slowest stage's time.
    """

    seconds: float
    blocks: Sequence[Counts]
    levels: Sequence[_Level]
    depth: int
    time: int


class PipelineSearch:
    """Searches pipelines with the tables of one micro-batch size."""

    def __init__(self, request: Request, tables: StageTables) -> None:
        self._tables, self._pools = tables, tables.pools
        job = request.job
        self._first_layers = job.first_layers
        is_fixed = "pipeline_parallel" in request.fixed
        deepest = min(DEEPEST, tables.layers)
        self._depths = [job.pipeline_parallel] if is_fixed else list(range(1, deepest + 1))
        if not request.rules.allow("unequal_stages"):  # pipelines of equal stages are tried as baselines
            self._depths = [depth for depth in self._depths if depth == 1]
        depth = min(deepest, max(self._depths, default=0))
        self._runs = StageRuns(self._pools, tables.timer.widths, depth, request.context_parallel)
        tokens = tables.timer.micro_batch_size * job.seq_length
        #: Bytes of activations between stages, and of their gradients.
        self._bytes = tokens * job.model.hidden_size * job.element_bytes
        self._grid = self._times()
        self._block = lru_cache(_MOST_BLOCKS)(self._block_layers)
        self._carried = cache(self._stage_layers)
        self._between = cache(self._pools.seconds_between)

    def best(self, counts: Counts, micro_batches: int, shards: int, width: int | None) -> list[Pipe]:
        """Return pipelines on these GPUs, the fastest first; empty if the model does not fit.

        Args:
            width: tensor-parallel size of all stages; ``None``: stages may differ.
        """
        candidates: list[_Candidate] = []
        for blocks in self._runs.partitions(counts):
            candidates += self._candidates(blocks, micro_batches, shards, width)
        candidates.sort(key=lambda candidate: candidate.seconds)
        finalists = (self._walk(candidate, width) for candidate in candidates[:_FINALISTS])
        pipes = [self.layered(shapes, micro_batches, shards) for shapes in finalists]
        return sorted((pipe for pipe in pipes if pipe is not None), key=lambda pipe: pipe.seconds)

    def prepare(self, choices: Iterable[Counts], shards: int, width: int | None) -> None:
        """Compute the tables that `best` needs for these choices of GPUs: together takes less time."""
        last, inner = dict[StageShape, None](), dict[StageShape, None]()
        for counts in choices:
            for blocks in self._runs.partitions(counts):
                for place, block in enumerate(blocks):
                    is_last = place == len(blocks) - 1
                    options = self._runs.options(block, width)
                    last |= dict.fromkeys(shape for shape, _ in options if is_last)
                    deep = (shape for shape, depth in options if is_last < depth < DEEPEST + is_last)
                    inner |= dict.fromkeys(deep)
        self._tables.prepare(last, True, shards, False, deep=False)
        self._tables.prepare(inner, False, shards, False, deep=True)

    def alone(self, counts: Counts, micro_batches: int, shards: int, width: int | None) -> list[Pipe]:
        """Return pipelines of one stage with each tensor-parallel size that fits; arguments as in `best`."""
        pipes = [self.layered([shape], micro_batches, shards) for shape in self._single(counts, width)]
        return sorted((pipe for pipe in pipes if pipe is not None), key=lambda pipe: pipe.seconds)

    def prepare_alone(self, choices: Iterable[Counts], shards: int, width: int | None) -> None:
        """Compute the tables of all that `alone` will be asked for, which is faster than one by one."""
        shapes = itertools.chain.from_iterable(self._single(counts, width) for counts in choices)
        self._tables.prepare(shapes, True, shards, False, deep=False)

    def _single(self, counts: Counts, width: int | None) -> list[StageShape]:
        """Return the shapes of a single stage on these GPUs."""
        if 1 not in self._depths:
            return []
        return [block.shape for block in self._runs.options(counts, width) if block.stages == 1]

    def layered(
        self,
        shapes: Sequence[StageShape],
        micro_batches: int,
        shards: int,
        *,
        timed: bool = False,
        took: Sequence[tuple[int, float]] = (),
    ) -> Pipe | None:
        """Return the pipeline with the layers that make its slowest stage as fast as possible, if it fits.

        Args:
            timed: whether all stages are timed; else the times of stages on several pools are estimates.
            took: for each stage, its number of layers in a timed plan and the seconds that they took, by
                which the stage's table of times is scaled; empty: there is no timed plan.
        """
        if took:
            return self._layered(shapes, micro_batches, shards, timed, took)
        placed = tuple(self._tables.placed(shape, timed) for shape in shapes)
        name, known = (tuple(shapes), placed, micro_batches, shards, timed), self._tables.pipes
        if name not in known:
            known[name] = self._layered(shapes, micro_batches, shards, timed)
        return known[name]

    def _layered(
        self,
        shapes: Sequence[StageShape],
        micro_batches: int,
        shards: int,
        timed: bool,
        took: Sequence[tuple[int, float]] = (),
    ) -> Pipe | None:
        """Return the pipeline of `layered`, whose results from tables alone are kept."""
        tables, factors, ways, last = [], [], self._ways(shapes), len(shapes) - 1
        for place, shape in enumerate(shapes):
            under_way = min(micro_batches, last + 1 - place)
            table = self._tables.table(shape, under_way, place == 0, place == last, shards, timed)
            if table is None:
                return None
            factor = 1.0
            if took:
                layers, planned = took[place]
                factor = planned / table.seconds[layers - 1]
                if not factor:  # the table says that so many layers do not fit
                    return None
            factors.append(factor)
            tables.append(table)
        seconds = np.array([table.seconds for table in tables]) * np.array(factors)[:, None]
        is_timed = timed or all(map(is_exact, shapes))
        # Neighbouring stages wait for what travels between them, there and back: a run of them takes no
        # longer than the slowest stage together with its part of that. Which parts are best depends on them.
        before, behind = np.array([0.0, *ways]), np.array([*ways, 0.0])
        best: Pipe | None = None
        tried: set[tuple[int, ...]] = set()
        # Replicas sum their gradients sooner if their stages have the same layers: one choice for all.
        several = shards > 1 and not took
        for sender, receiver in _CHARGED if any(ways) and not several else _CHARGED[:1]:
            charged = sender * behind + receiver * before
            dealt = least_longest(seconds + charged[:, None], self._tables.layers)
            if dealt is None:
                return None
            if took:
                dealt = moved_layers(seconds, dealt, ways, micro_batches)
            if tuple(dealt) in tried or dealt[0] < self._first_layers:
                continue
            tried.add(tuple(dealt))
            stages = tuple(
                PipeStage(shape, count, table.recompute(count), float(times[count - 1]))
                for shape, count, table, times in zip(shapes, dealt, tables, seconds, strict=True)
            )
            pipe = Pipe(stages, tuple(ways), micro_batches, is_timed)
            best = pipe if best is None or pipe.seconds < best.seconds else best
        return best

    def _ways(self, shapes: Sequence[StageShape]) -> list[float]:
        """Return the seconds that a micro-batch's activations take over each border of p stages, [p - 1]."""
        ways: list[float] = []
        for shape, run in itertools.groupby(shapes):
            alike = len(list(run))
            crossings = [float(crosses) for crosses in self._pools.crossings(shape, alike)]
            ways += [self._between(shape, shape, self._bytes, crossing) for crossing in crossings]
            if len(ways) < len(shapes) - 1:
                ways.append(self._between(shape, shapes[len(ways) + 1], self._bytes, 0.5))
        return ways

    def _times(self) -> Floats:
        """Return the grid of times that a stage may take, s, ascending by the factor `_STEP`.

        The grid begins at 1 / (2 `DEEPEST`) of a micro-batch's time on all GPUs together, and ends at twice a
        micro-batch's time on one of the slowest GPUs.
        """
        rates = [self._tables.timer.seconds_alone(pool) for pool in range(len(self._pools.pools))]
        together = 1 / sum(count / seconds for count, seconds in zip(self._pools.totals, rates, strict=True))
        low, high = together / (2 * DEEPEST), 2 * max(rates)
        return low * _STEP ** np.arange(np.ceil(np.log(high / low) / np.log(_STEP)) + 1)

    def _block_layers(
        self, counts: Counts, width: int | None, most: int, is_first: bool, is_last: bool, shards: int
    ) -> _Block:
        """Return the most layers of a block's stages together, by the number of its stages."""
        options = self._runs.options(counts, width)
        # The table for each number of micro-batches in flight.
        rows = ROWS[np.minimum(np.arange(DEEPEST), most - 1)]
        found: dict[int, Ints] = {}
        for number, (shape, depth) in enumerate(options):
            make = self._last_layers if is_last else self._inner_layers
            layers = make(shape, depth, rows, is_first, shards)
            if layers is not None:
                layers = layers * _CHOICES + (_OPTIONS - 1 - number)
                found[depth] = layers if depth not in found else np.maximum(found[depth], layers)
        return _Block(np.array(list(found), dtype=np.int64), np.array(list(found.values())))

    def _last_layers(
        self, shape: StageShape, depth: int, rows: Ints, is_first: bool, shards: int
    ) -> Ints | None:
        """Return the most layers of a pipeline's last stages together, which are alike, [1, times].

        Args:
            rows: index of the table for each number of micro-batches in flight.
            is_first: whether they are the whole pipeline.
        """
        last = self._carried(shape, True, shards, depth)
        if last is None:
            return None
        layers = last[int(is_first and depth == 1)]
        if depth > 1:
            inner = self._carried(shape, False, shards, depth)
            assert inner is not None, "the last of these stages is possible"
            layers = (
                layers + inner[0][rows[1 : depth - 1]].sum(axis=0) + inner[int(is_first)][rows[depth - 1]]
            )
        return layers

    def _inner_layers(
        self, shape: StageShape, depth: int, rows: Ints, is_first: bool, shards: int
    ) -> Ints | None:
        """Return the most layers of stages together, which are alike, by the number of stages behind them.

        An array [1 + `DEEPEST`, times]; at least one stage is behind them. Arguments as for `_last_layers`.
        """
        carried = self._carried(shape, False, shards, depth)
        if carried is None or depth == DEEPEST:
            return None
        inner, foremost = carried[0][rows], carried[int(is_first)][rows[depth:]]
        layers = np.full((1 + DEEPEST, inner.shape[1]), DEEPEST * _NEVER)
        # The layers of all stages up to the one before the foremost, less those of the stages behind.
        up_to = np.cumsum(inner, axis=0)
        layers[1 : 1 + DEEPEST - depth] = up_to[depth - 1 : -1] - up_to[:-depth] + foremost
        return layers

    def _stage_layers(self, shape: StageShape, is_last: bool, shards: int, alike: int) -> Ints | None:
        """Return the most layers that a stage can run within each time of the grid, [2, F, times].

        The first axes are those of `StageTables.tables`. Sends are included. `_NEVER` stands at times within
        which not even one layer fits; ``None``: the stage is impossible. `alike` is the number of consecutive
        stages of this shape, which decides how often sends cross nodes.
        """
        tables = self._tables.tables(shape, is_last, shards, False, deep=not is_last)
        if tables is None:
            return None
        # Sends to another block's stage are taken to last as long as to one of the same block.
        crossings = self._pools.crossings(shape, alike) or [True]
        crossing = sum(crossings) / len(crossings)
        way = 0.0 if is_last else self._between(shape, shape, self._bytes, crossing)
        # The first time within which a layer more fits, of all layers of all tables.
        rows, times = tables.seconds.reshape(-1, self._tables.layers), len(self._grid)
        first = np.searchsorted(self._grid, rows + 2 * way)
        places = first + (1 + times) * np.arange(len(rows))[:, None]
        more = np.bincount(places.ravel(), minlength=(1 + times) * len(rows)).reshape(len(rows), -1)
        carried = np.cumsum(more[:, :-1], axis=1)
        return np.where(carried == 0, _NEVER, carried).reshape(2, -1, times)

    def _candidates(
        self, blocks: Sequence[Counts], micro_batches: int, shards: int, width: int | None
    ) -> Iterator[_Candidate]:
        """Yield the fastest tabulated pipeline of each number of stages."""
        times = len(self._grid)
        levels = [_Level([0], np.zeros((1, times), dtype=np.int64))]
        most = min(micro_batches, DEEPEST)
        for place in reversed(range(len(blocks))):
            ends = place == 0, place == len(blocks) - 1
            block = self._block(blocks[place], width, most, *ends, shards)
            before, following = levels[-1], _Level([], np.full((1 + DEEPEST, times), -(2**60)))
            for number, behind in enumerate(before.depths if len(block.depths) else ()):
                depths = block.depths[block.depths <= DEEPEST - behind]
                carried = before.layers[behind] & -_CHOICES
                carried = carried + (DEEPEST * 2 - 1 - number) * _OPTIONS
                together = carried + block.layers[block.depths <= DEEPEST - behind, behind]
                reached = depths + behind
                following.layers[reached] = np.maximum(following.layers[reached], together)
                following.depths.extend(d for d in reached.tolist() if d not in following.depths)
            levels.append(following)
        found = levels[-1]
        for depth in found.depths:
            enough = found.layers[depth] >= self._tables.layers * _CHOICES
            time = int(enough.argmax())
            if enough[time] and depth in self._depths:
                seconds = (micro_batches - 1 + depth) * float(self._grid[time])
                yield _Candidate(seconds, blocks, levels, depth, time)

    def _walk(self, candidate: _Candidate, width: int | None) -> list[StageShape]:
        """Return the shape of each stage of a pipeline."""
        shapes: list[StageShape] = []
        depth = candidate.depth
        for number, block in enumerate(candidate.blocks, start=1):
            choices = int(candidate.levels[-number].layers[depth, candidate.time]) % _CHOICES
            option = _OPTIONS - 1 - choices % _OPTIONS
            shape, stages = self._runs.options(block, width)[option]
            shapes += [shape] * stages
            depth = candidate.levels[-number - 1].depths[DEEPEST * 2 - 1 - choices // _OPTIONS]
        return shapes
