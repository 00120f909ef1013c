"""The joint search over replicas, pipelines, stages and domains of a job on a cluster."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import replace

from megatron_hexi.grouping import grouped
from megatron_hexi.planner.joint.assembly import Assembly
from megatron_hexi.planner.joint.layer_times import LayerTimer
from megatron_hexi.planner.joint.packing import Packed, pack
from megatron_hexi.planner.joint.pipeline_search import PipelineSearch
from megatron_hexi.planner.joint.replica_columns import Column, ReplicaColumns
from megatron_hexi.planner.joint.stage_tables import StageTables
from megatron_hexi.planner.layouts.trial import Candidate, Progress
from megatron_hexi.planner.request import Request

#: Classes of numbers of replicas, by the least: one, two or three, four to seven, … The replicas of a class
#: are timed as if the least number shared optimizer state.
_CLASSES = (1, 2, 4, 8)
#: The most times that columns with estimated times are timed, and all columns packed again.
_ROUNDS = 12
#: Factors by which columns may take longer than the plan that is made of them: in general, and for one
#: replica whose stages do not mix kinds of GPU.
_NEAR, _NEARLY_EXACT = 1.1, 1.03
#: Sets of replicas that take longer than this factor of the best's time are left out.
_FAR = 1.5
#: The most plans that are built, and the most sets from one list of columns: of one replica, and of several.
_FINALISTS, _RIVALS = 12, (4, 2)
#: The most plans that are polished, if they take less than this factor of the best's time: with the GPUs'
#: memory, and with more, where saving memory gains more in some plans than in others.
_POLISHED, _TIED = 2, (1.01, 1.02)
#: A plan with experts is polished if it takes less than this factor of the time of a plan known before.
_OUT_OF_REACH = 1.01


class JointSearch:
    """Searches the layouts of one micro-batch size.

    Args:
        memory: factor of the GPUs' memory that plans may use.
    """

    def __init__(self, request: Request, timer: LayerTimer, memory: float) -> None:
        self._request, self._timer = request, timer
        self._micro_batches = request.job.global_batch_size // timer.micro_batch_size
        self._pools, self._is_roomy = timer.pools.with_memory(memory), memory > 1
        self._pipelines = PipelineSearch(request, StageTables(request, timer, self._pools))
        self._assembly = Assembly(request, timer, self._pipelines, self._pools)

    @property
    def trials(self) -> int:
        """Number of layouts that were timed, besides the timer's."""
        return self._assembly.trials

    def run(self, progress: Progress, faster_than: float, *, fewest: bool) -> Iterator[Candidate]:
        """Yield the best plans of each class of replicas, as long as they may be the best of all.

        Args:
            progress: callback, receives (phase, done, total).
            fewest: whether to search only plans of the fewest replicas, which need least memory.
        """
        worth_polishing_s = math.inf
        if self._request.job.model.experts is not None:  # planned once for each placement
            worth_polishing_s = _OUT_OF_REACH * faster_than
        whole = self._columns(1)
        sets = self._find(whole, 1, progress, faster_than, fewest=fewest)
        if not (fewest or whole.is_exhaustive or "data_parallel" in self._request.fixed):
            sets += self._repeated(progress, faster_than)
        unique: dict[tuple[object, ...], Packed] = {}
        for packed in sorted(sets, key=lambda packed: (len(packed.columns) > 1, packed.seconds)):
            unique.setdefault(_name(packed), packed)
        finalists = [*unique.values()][:_FINALISTS]
        tried: list[tuple[Candidate, Packed]] = []
        for number, packed in enumerate(finalists):
            progress("plans of the joint search", number, len(finalists) + 1)
            if packed.seconds > self._error(packed) * faster_than:
                continue
            candidate = self._assembly.run(packed, polished=False)
            if candidate is not None:
                tried.append((candidate, packed))
                if candidate.fits:
                    faster_than = min(faster_than, candidate.iteration_s)
                yield candidate
        tried.sort(key=lambda entry: entry[0].order)
        for candidate, packed in self._to_polish(tried):
            if candidate.iteration_s < min(
                _TIED[self._is_roomy] * tried[0][0].iteration_s, worth_polishing_s
            ):
                polished = self._assembly.run(packed, polished=True)
                if polished is not None:
                    yield polished

    def _to_polish(self, tried: list[tuple[Candidate, Packed]]) -> list[tuple[Candidate, Packed]]:
        """Return the fastest plans and, where memory is short, the fastest one of a single replica."""
        alone = (entry for entry in tried[_POLISHED:] if self._is_roomy and len(entry[1].columns) == 1)
        return [*tried[:_POLISHED], *itertools.islice(alone, 1)]

    def _repeated(self, progress: Progress, faster_than: float) -> list[Packed]:
        """Return sets of replicas that fill one of several equal parts of the fleet, repeated for each part.

        Of a large fleet only some choices of GPUs are tried; of a part, more or all of them are.
        """
        parts = math.gcd(self._micro_batches, *(len(pool.nodes) for pool in self._pools.pools))
        for copies in (number for number in range(parts, 1, -1) if parts % number == 0):
            sets = self._find(self._columns(copies), copies, progress, faster_than)
            if sets:
                return [
                    replace(
                        packed, columns=packed.columns * copies, micro_batches=packed.micro_batches * copies
                    )
                    for packed in sets
                ]
        return []

    def _columns(self, copies: int) -> ReplicaColumns:
        """Return candidate replicas for one of `copies` equal parts of the fleet and the batch."""
        micro_batches, pools = self._micro_batches // copies, self._pools.part(copies)
        return ReplicaColumns(self._request, self._timer, pools, self._pipelines, micro_batches)

    def _find(
        self,
        part: ReplicaColumns,
        copies: int,
        progress: Progress,
        faster_than: float,
        *,
        fewest: bool = False,
    ) -> list[Packed]:
        """Return the best sets of replicas of each class, for one of `copies` equal parts.

        Several replicas all have one tensor-parallel size: between different sizes gradients would have to be
        cut again, which costs more than different sizes gain.
        """
        classes = [some for some in (self._replicas(part, shards) for shards in _CLASSES) if len(some)]
        if fewest:
            del classes[1:]
        sets: list[Packed] = []
        for number, replicas in enumerate(classes):
            progress("replicas of the joint search", number, len(classes))
            shards = _class_of(replicas[0] * copies)
            for width in [None] if replicas[0] == 1 else self._timer.widths:
                columns = part.find(_class_of(replicas[0]), shards, width)
                # Packed with others, these have too few links: only copies of one fill the fleet as expected.
                parts = [column for column in columns if part.leaves_parts(column)]
                columns = [column for column in columns if column not in parts]
                most_s = _FAR * _least(faster_than, sets)
                copied = pack(
                    parts, part.micro_batches, part.pools.totals, replicas, most_s=most_s, equal=True
                )
                sets += [] if copied is None else [copied]
                if width is None and len(self._timer.widths) > 1:
                    sets += self._of_one_width(part, shards, _FAR * _least(faster_than, sets))
                whole = [column for column in columns if len(column.pipe.stages) == 1]
                for some in (columns, whole):
                    sets += _best(part, some, replicas, _FAR * _least(faster_than, sets))
                even = list(filter(_is_even, columns)) if self._is_roomy and replicas[0] == 1 else []
                sets += itertools.islice(_best(part, even, replicas, _FAR * _least(faster_than, sets)), 1)
                for some in _alike(columns) if replicas[0] > 1 else ():
                    sets += itertools.islice(_best(part, some, replicas, _least(faster_than, sets)), 1)
        return sets

    def _of_one_width(self, part: ReplicaColumns, shards: int, most_s: float) -> Iterator[Packed]:
        """Yield the best single replica of each tensor-parallel size, the same in all stages."""
        for width in self._timer.widths:
            columns = part.find(1, shards, width, whole=False)
            yield from itertools.islice(_best(part, columns, range(1, 2), most_s), 1)

    def _error(self, packed: Packed) -> float:
        """Return by what factor, 1 or more, packed replicas may overestimate the seconds of their plan.

        Where memory is short, even pipelines become faster as their stages are interleaved.
        """
        alone = len(packed.columns) == 1
        is_mixed = any(len(shape.kinds) > 1 for column in packed.columns for shape in column.pipe.shapes)
        may_gain = self._is_roomy and _is_even(packed.columns[0])
        return _NEARLY_EXACT if alone and not is_mixed and not may_gain else _NEAR

    def _replicas(self, part: ReplicaColumns, shards: int) -> range:
        """Return the numbers of replicas in the class from `shards` on, within the fixed number and batch."""
        most = min(part.micro_batches, sum(part.pools.totals))
        if "data_parallel" in self._request.fixed:
            fixed = self._request.job.data_parallel
            return range(fixed, fixed + 1) if _class_of(fixed) == shards and fixed <= most else range(0)
        end = most if shards == _CLASSES[-1] else min(most, 2 * shards - 1)
        return range(shards, end + 1)


def _least(seconds: float, sets: list[Packed]) -> float:
    """Return the least of `seconds` and the iteration seconds of the sets of packed replicas."""
    return min([seconds, *(packed.seconds for packed in sets)])


def _is_even(column: Column) -> bool:
    """Whether a replica has several stages of the same GPUs, which gain most by interleaved ministages."""
    shapes = set(column.pipe.shapes)
    return len(column.pipe.stages) > 1 and len(shapes) == 1 and len(shapes.pop().kinds) == 1


def _alike(columns: list[Column]) -> list[list[Column]]:
    """Return the columns with several stages, grouped by the layers of their stages."""
    staged = [column for column in columns if len(column.pipe.stages) > 1]
    layers = (tuple(stage.layers for stage in column.pipe.stages) for column in staged)
    return list(grouped(zip(layers, staged, strict=True)).values())


def _best(part: ReplicaColumns, columns: list[Column], replicas: range, most_s: float) -> Iterator[Packed]:
    """Yield the best sets of columns within `most_s` seconds, each without columns of the sets before."""
    least = 0.0
    for _ in range(_RIVALS[replicas[-1] > 1]):
        packed = _packed(part, columns, replicas, least, most_s)
        if packed is None:
            return
        yield packed
        least, most_s = packed.least_s, min(most_s, _FAR * packed.seconds)
        alike = {(column.counts, column.pipe.shapes) for column in packed.columns}
        columns = [column for column in columns if (column.counts, column.pipe.shapes) not in alike]


def _packed(
    part: ReplicaColumns, columns: list[Column], replicas: range, least: float, most: float
) -> Packed | None:
    """Return the best set of timed columns that takes at most `most` seconds; ``None`` if none does."""
    for _ in range(_ROUNDS):
        packed = pack(columns, part.micro_batches, part.pools.totals, replicas, least, most, equal=part.equal)
        if packed is None:
            return None
        rough = {id(column): column for column in packed.columns if not column.pipe.timed}
        if not rough:
            return packed
        least = packed.least_s
        columns = [column for column in columns if id(column) not in rough]
        columns += [timed for timed in map(part.timed, rough.values()) if timed is not None]
    known = [column for column in columns if column.pipe.timed]
    return pack(known, part.micro_batches, part.pools.totals, replicas, least, most, equal=part.equal)


def _class_of(replicas: int) -> int:
    return max(shards for shards in _CLASSES if shards <= replicas)


def _name(packed: Packed) -> tuple[object, ...]:
    """Return a key that is equal for replicas of the same stages."""
    stages = (tuple(stage[:3] for stage in column.pipe.stages) for column in packed.columns)
    return (*zip(stages, packed.micro_batches, strict=True),)
