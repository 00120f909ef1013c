"""Searches the best pipeline on a replica's GPUs: its stages, their order and their layers.

Pools of GPUs are joined to blocks: a block's stages all have the same part of each of its pools. For a limit
of a stage's time, a table gives the most layers of the stage. So, block by block from the last stage to the
first, a dynamic program finds for each number of stages, and for each time of a geometric grid, the most
layers of these stages; the first time at which that is the whole model makes a candidate. The best candidates
then get whole layers, exactly: the least time of the slowest stage.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from functools import cache
from typing import NamedTuple

import numpy as np

from megatron_hexi.cost.arrays import Floats, Ints
from megatron_hexi.planner.joint.chunked_pipes import ChunkedPipe, chunked, chunked_part
from megatron_hexi.planner.joint.pipes import Pipe, PipeStage, least_longest, moved_layers
from megatron_hexi.planner.joint.pools import Counts, StageShape, is_exact
from megatron_hexi.planner.joint.stage_runs import StageRuns
from megatron_hexi.planner.joint.stage_tables import DEEPEST, StageTables
from megatron_hexi.planner.request import Request

#: Steps of the grid of times: 3 %, refined by the exact layers afterwards.
_STEP = 1.03
#: The most candidates that get whole layers.
_FINALISTS = 10
#: The most candidates that are interleaved.
_INTERLEAVED = 4
#: Factors of a border's seconds that are added to its sender's and to its receiver's time when layers are
#: assigned; the best of these is taken.
_CHARGED = ((2.0, 0.0), (0.0, 0.0), (0.0, 2.0), (1.0, 1.0), (0.5, 0.5))
#: Number of layers that stands for a stage which does not fit.
_NEVER = -(10**6)


class _CarriedLayers(NamedTuple):
    """The most layers of a pipeline's last blocks, if no stage exceeds a time of the grid, and the choices.

    Args:
        layers: the most layers, [times].
        block: index of the option chosen for the first of these blocks, [times], or one number for all times.
        behind: number of stages in the blocks after the first, [times], or one number for all times.
    """

    layers: Floats
    block: Ints
    behind: Ints


class PipelineSearch:
    """Searches pipelines with the tables of one micro-batch size."""

    def __init__(self, request: Request, tables: StageTables) -> None:
        self._tables, self._pools = tables, tables.pools
        job = request.job
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
        self._carry = cache(self._block_layers)
        self._carried = cache(self._stage_layers)
        self._between = cache(self._pools.seconds_between)

    def best(
        self, counts: Counts, micro_batches: int, shards: int, width: int | None, *, chunked: bool = False
    ) -> list[Pipe]:
        """Return pipelines on these GPUs, the fastest first; empty if the model does not fit.

        Args:
            width: tensor-parallel size of all stages; ``None``: stages may differ.
            chunked: whether to add some that are interleaved, after the others.
        """
        candidates: list[tuple[float, list[StageShape]]] = []
        for blocks in self._runs.partitions(counts):
            candidates += self._candidates(blocks, micro_batches, shards, width)
        candidates.sort(key=lambda candidate: candidate[0])
        pipes = [self.layered(shapes, micro_batches, shards) for _, shapes in candidates[:_FINALISTS]]
        found = sorted((pipe for pipe in pipes if pipe is not None), key=lambda pipe: pipe.seconds)
        if chunked and micro_batches > 1:
            deep = [candidate for candidate in candidates if len(candidate[1]) > 1]
            deep.sort(key=lambda candidate: candidate[0] * chunked_part(micro_batches, len(candidate[1])))
            cut = (self.chunked(shapes, micro_batches, shards) for _, shapes in deep[:_INTERLEAVED])
            found += sorted((pipe for pipe in cut if pipe is not None), key=lambda pipe: pipe.seconds)
        return found

    def alone(self, counts: Counts, micro_batches: int, shards: int, width: int | None) -> list[Pipe]:
        """Return pipelines of one stage with each tensor-parallel size that fits; arguments as in `best`."""
        if 1 not in self._depths:
            return []
        blocks = (block for block in self._runs.options(counts, width) if block.stages == 1)
        pipes = [self.layered([block.shape], micro_batches, shards) for block in blocks]
        return sorted((pipe for pipe in pipes if pipe is not None), key=lambda pipe: pipe.seconds)

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

    def chunked(
        self, shapes: Sequence[StageShape], micro_batches: int, shards: int, *, timed: bool = False
    ) -> ChunkedPipe | None:
        """Return the interleaved pipeline of these stages, if it fits; arguments as in `layered`."""
        ways = self._ways(shapes)
        return chunked(self._tables, shapes, ways, micro_batches, shards, timed=timed)

    def _layered(
        self,
        shapes: Sequence[StageShape],
        micro_batches: int,
        shards: int,
        timed: bool,
        took: Sequence[tuple[int, float]] = (),
    ) -> Pipe | None:
        """Return the pipeline of `layered`, whose results from tables alone are kept."""
        seconds, tables, ways, last = [], [], self._ways(shapes), len(shapes) - 1
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
            seconds.append(table.seconds * factor)
            tables.append(table)
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
            dealt = least_longest([*map(np.add, seconds, charged)], self._tables.layers)
            if dealt is None:
                return None
            if took:
                dealt = moved_layers(seconds, dealt, ways, micro_batches)
            if tuple(dealt) in tried:
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
        self,
        counts: Counts,
        width: int | None,
        behind: int,
        most: int,
        is_first: bool,
        is_last: bool,
        shards: int,
    ) -> dict[int, _CarriedLayers]:
        """Return the most layers of a block's stages together, by the number of its stages."""
        by_depth: dict[int, _CarriedLayers] = {}
        for number, (shape, depth) in enumerate(self._runs.options(counts, width)):
            if behind + depth > DEEPEST:
                continue
            layers = np.zeros(len(self._grid))
            for place in range(depth):
                first, last = is_first and place == depth - 1, is_last and place == 0
                carried = self._carried(shape, min(most, behind + place + 1), first, last, shards, depth)
                if carried is None:
                    break
                layers = layers + carried
            else:
                _keep_most(by_depth, depth, _CarriedLayers(layers, np.array(number), np.array(behind)))
        return by_depth

    def _stage_layers(
        self, shape: StageShape, under_way: int, is_first: bool, is_last: bool, shards: int, alike: int
    ) -> Floats | None:
        """Return the most layers that a stage can run within each time of the grid, [times].

        Sends are included. `_NEVER` stands at times within which not even one layer fits; ``None``: the stage
        is impossible. `alike` is the number of consecutive stages of this shape, which decides how often
        sends cross nodes; the other arguments are those of `StageTables.table`.
        """
        table = self._tables.table(shape, under_way, is_first, is_last, shards, False)
        if table is None:
            return None
        # Sends to another block's stage are taken to last as long as to one of the same block.
        crossings = self._pools.crossings(shape, alike) or [True]
        crossing = sum(crossings) / len(crossings)
        way = 0.0 if is_last else self._between(shape, shape, self._bytes, crossing)
        carried = np.searchsorted(table.seconds, self._grid - 2 * way, side="right")
        return np.where(carried == 0, _NEVER, carried)

    def _candidates(
        self, blocks: Sequence[Counts], micro_batches: int, shards: int, width: int | None
    ) -> Iterator[tuple[float, list[StageShape]]]:
        """Yield the seconds and stage shapes of the fastest tabulated pipeline of each number of stages."""
        levels = [{0: _CarriedLayers(np.zeros(len(self._grid)), np.array(0), np.array(0))}]
        most = min(micro_batches, DEEPEST)
        for place in reversed(range(len(blocks))):
            following: dict[int, _CarriedLayers] = {}
            ends = place == 0, place == len(blocks) - 1
            for behind, carried in levels[-1].items():
                block_layers = self._carry(blocks[place], width, behind, most, *ends, shards)
                for depth, block in block_layers.items():
                    together = block._replace(layers=carried.layers + block.layers)
                    _keep_most(following, behind + depth, together)
            levels.append(following)
        for depth, carried in levels[-1].items():
            enough = np.flatnonzero(carried.layers >= self._tables.layers)
            if len(enough) and depth in self._depths:
                time = int(enough[0])
                seconds = (micro_batches - 1 + depth) * float(self._grid[time])
                yield seconds, self._walk(blocks, levels, depth, time, width)

    def _walk(
        self,
        blocks: Sequence[Counts],
        levels: list[dict[int, _CarriedLayers]],
        depth: int,
        time: int,
        width: int | None,
    ) -> list[StageShape]:
        shapes: list[StageShape] = []
        for block, level in zip(blocks, reversed(levels), strict=False):
            _, options, behind = level[depth]
            shape, stages = self._runs.options(block, width)[options[time]]
            shapes += [shape] * stages
            depth = int(behind[time])
        return shapes


def _keep_most(found: dict[int, _CarriedLayers], stages: int, new: _CarriedLayers) -> None:
    """Merge `new` into the entry of a number of stages; at each time the one with more layers stays."""
    old = found.get(stages, new)
    better = new.layers > old.layers
    found[stages] = _CarriedLayers(*(np.where(better, a, b) for a, b in zip(new, old, strict=True)))
