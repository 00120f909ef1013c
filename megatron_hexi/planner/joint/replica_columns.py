"""Candidate replicas: GPUs of each pool, the pipelines on them, and their seconds."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from operator import truediv

from megatron_hexi.cost.memory import GIB, static_memory
from megatron_hexi.cost.model_part import ModelPart
from megatron_hexi.planner.joint.layer_times import LayerTimer
from megatron_hexi.planner.joint.pipeline_search import PipelineSearch
from megatron_hexi.planner.joint.pipes import Pipe
from megatron_hexi.planner.joint.pools import Counts, Pools, pools_of
from megatron_hexi.planner.request import Request

#: The most choices of GPUs that are tried with pipelines, and as one stage: for a single replica, for one of
#: several.
_WITH_PIPELINES, _WITH_ONE_STAGE = (24, 16), (300, 150)
#: The most pipelines whose gradients are timed: the fastest, and of one replica the fastest of each depth and
#: tensor-parallel size. The most of these that are kept, for one replica and for one of several.
_WITH_GRADIENTS, _KEPT = 4, (3, 1)
#: Denominators of the parts of pools that replicas are made of.
_PARTS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 24, 32, 64)
#: All combinations of whole nodes of a set of pools are tried if they are at most this many.
_MOST_PRODUCTS = 300
#: One of several replicas whose share of an iteration is less than this part of a micro-batch is left out.
_LEAST_SHARE = 0.45
#: The most pools of one of several replicas, unless all have the same mix.
_MOST_KINDS = 2
#: The least share of all GPUs' speed of a single replica, if there are more choices than are tried.
_LEAST_ALONE = 1 / 4
#: Choices with more than this share of all GPUs' speed are kept first.
_NEARLY_ALL = 0.97


@dataclass(frozen=True, eq=False)
class Column:
    """A candidate replica.

    Args:
        counts: GPUs of each pool.
        pipe: its pipeline, for about as many micro-batches as it will process.
        shards: number of replicas that share its optimizer state.
        sync_s: exposed seconds of gradients, weights and the optimizer's step.
    """

    counts: Counts
    pipe: Pipe
    shards: int
    sync_s: float

    def micro_batches(self, seconds: float) -> int:
        """Return the most micro-batches in an iteration of this many seconds."""
        return self.pipe.most_within(seconds - self.sync_s)

    def seconds(self, micro_batches: int) -> float:
        """Return the seconds of an iteration with this many micro-batches."""
        return self.pipe.seconds_of(micro_batches) + self.sync_s


class ReplicaColumns:
    """Candidate replicas for one micro-batch size.

    Args:
        pools: the pools of all of the fleet, or of a part of it.
        micro_batches: micro-batches of an iteration on these pools.
    """

    def __init__(
        self, request: Request, timer: LayerTimer, pools: Pools, search: PipelineSearch, micro_batches: int
    ) -> None:
        self._search = search
        self.pools, self.micro_batches = pools, micro_batches
        #: Whether all replicas of a plan must be alike.
        self.equal = not request.rules.allow("unequal_replicas")
        self._sync = timer.synchronisation
        self._speeds = [1 / timer.seconds_alone(pool) for pool in range(len(pools.pools))]
        params = request.job.model.total_params
        # A lower bound: without copies of matrices in fp8, nor the optimizer's state, which replicas share.
        nothing = ModelPart(layers=0, again=0, is_first=False, is_last=False, ahead=1)
        self._choices = self._find_choices(
            float(sum(static_memory(request.job, nothing, params, params, 0).values()))
        )
        self._always = _always(pools)
        self._least_alone = _LEAST_ALONE if len(self._choices) > _WITH_PIPELINES[0] else 0.0
        #: Whether each choice of GPUs gets pipelines.
        self.is_exhaustive = len(self._choices) <= min(_WITH_PIPELINES)
        self._pipelines = cache(search.best)

    def find(self, replicas: int, shards: int, width: int | None, *, whole: bool = True) -> list[Column]:
        """Return the candidate replicas.

        Args:
            replicas: the least number of replicas on these pools.
            width: tensor-parallel size of all stages; ``None``: stages may differ.
            whole: whether to add replicas of one stage, for more choices of GPUs.
        """
        columns: list[Column] = []
        choices = [counts for counts in self._choices if self._take(counts, replicas)]
        several = replicas > 1
        # Pipelines depend little on how many share their optimizer state: those for two serve for more.
        sharing = min(shards, 2)
        few = [counts for counts in choices if not several or len(pools_of(counts)) <= _MOST_KINDS]
        some = self._some(few, _WITH_PIPELINES[several])
        self._search.prepare(some, sharing, width)
        for counts in some:
            take = self._take(counts, replicas)
            pipes = self._pipelines(counts, take, sharing, width)
            columns += self._columns(counts, pipes, sharing, _KEPT[several])
        single = self._some(choices, _WITH_ONE_STAGE[several]) if whole else []
        self._search.prepare_alone(single, shards, width)
        for counts in single:
            pipes = self._search.alone(counts, self._take(counts, replicas), shards, width)
            columns += self._columns(counts, pipes, shards, 2)
        return columns

    def _columns(self, counts: Counts, pipes: Sequence[Pipe], shards: int, most: int) -> list[Column]:
        """Return the best pipelines as columns of the packing, each with its seconds of summing gradients."""
        if shards == 1:
            kinds: dict[tuple[int, ...], Pipe] = {}
            for pipe in pipes:
                kinds.setdefault((len(pipe.stages), *sorted({shape.width for shape in pipe.shapes})), pipe)
            pipes = list(kinds.values())
        columns = [
            Column(counts, pipe, shards, self._sync.seconds(pipe.stages, shards))
            for pipe in pipes[:_WITH_GRADIENTS]
        ]
        columns.sort(key=lambda column: column.seconds(column.pipe.micro_batches))
        # Estimated pipelines may turn out slower.
        timed = [column for column in columns if column.pipe.timed]
        return list(dict.fromkeys([*columns[:most], *timed[:most]]))

    def timed(self, column: Column) -> Column | None:
        """Return the column with every stage timed; ``None`` if memory does not suffice."""
        pipe = self._search.layered(column.pipe.shapes, column.pipe.micro_batches, column.shards, timed=True)
        if pipe is None:
            return None
        return replace(column, pipe=pipe, sync_s=self._sync.seconds(pipe.stages, column.shards))

    def leaves_parts(self, column: Column) -> bool:
        """Return whether a replica of one pool leaves parts of nodes that some of its copies would join."""
        (counts, width), *others = column.pipe.shapes
        kinds = pools_of(counts)
        return not others and len(kinds) == 1 and not self.pools.tiles(kinds[0], counts[kinds[0]], width)

    def _some(self, choices: list[Counts], most: int) -> list[Counts]:
        """Return at most `most` of the choices, and in addition all choices in `_always`.

        The first are choices of whole pools or nearly all GPUs, and an even sample of the other choices.
        """
        nearly = [choice for choice in choices if self._share(choice) > _NEARLY_ALL][: most // 3]
        pools = [choice for choice in choices if set(map(truediv, choice, self.pools.totals)) <= {0, 1}]
        whole = dict.fromkeys([*pools[: most // 2], *nearly])
        rest = [choice for choice in choices if choice not in whole]
        every = max(1.0, len(rest) / (most - len(whole)))
        sample = (rest[int(number * every)] for number in range(int(len(rest) / every)))
        always = (choice for choice in choices if choice in self._always)
        return list(dict.fromkeys([*whole, *sample, *always]))

    def _is_even_part(self, counts: Counts) -> bool:
        """Return whether copies of such a replica can use up every GPU of all pools."""
        parts = {
            total / count if count else 0 for count, total in zip(counts, self.pools.totals, strict=True)
        }
        return len(parts) == 1 and parts.pop().is_integer()

    def _share(self, counts: Counts) -> float:
        """Return the share of all GPUs' speed that these GPUs have."""
        return math.sumprod(counts, self._speeds) / math.sumprod(self.pools.totals, self._speeds)

    def _take(self, counts: Counts, replicas: int) -> int:
        """Return about how many micro-batches one of `replicas` on these GPUs takes; 0: not worth trying."""
        share, all_of_them = self._share(counts), self.micro_batches
        if replicas == 1:
            return all_of_them if share > self._least_alone or counts in self._always else 0
        mixed = len(pools_of(counts)) > _MOST_KINDS and not self._is_even_part(counts)
        if mixed or share * all_of_them < _LEAST_SHARE or share > 2 / replicas:
            return 0
        return max(1, min(round(share * all_of_them), all_of_them - replicas + 1))

    def _find_choices(self, needed: float) -> list[Counts]:
        """Return choices of GPUs with enough memory, those from the most pools first."""
        memory = [pool.device.usable_gib * GIB for pool in self.pools.pools]
        enough = (counts for counts in set(_choices(self.pools)) if math.sumprod(counts, memory) >= needed)
        return sorted(enough, key=lambda counts: (-len(pools_of(counts)), -self._share(counts), counts))


def _always(pools: Pools) -> set[Counts]:
    """Return the choices of GPUs that are always tried, since over thin links they may be the best.

    They are one node of each pool, each whole pool, and the fastest pools together.
    """
    totals = pools.totals
    places = range(len(totals))
    alone = [
        tuple(count if pool == kind else 0 for pool in places)
        for kind, total in enumerate(totals)
        for count in (pools.pools[kind].size, total)
    ]
    fastest = [tuple(totals[pool] if pool < kinds else 0 for pool in places) for kinds in places[2:]]
    return {*alone, *fastest}


def _choices(pools: Pools) -> Iterator[Counts]:
    """Yield numbers of GPUs of each pool: of one pool, or equal parts or whole nodes of several pools."""
    number, totals = len(pools.pools), pools.totals
    grids = [_sizes(pool.size, len(pool.nodes)) for pool in pools.pools]
    for kind, grid in enumerate(grids):
        yield from (tuple(count if pool == kind else 0 for pool in range(number)) for count in grid)
    wholes = [
        [count for count in grid if count % pool.size == 0]
        for grid, pool in zip(grids, pools.pools, strict=True)
    ]
    fewer = [
        [count for count in whole if count // pool.size in (1, 2, 4, len(pool.nodes))]
        for whole, pool in zip(wholes, pools.pools, strict=True)
    ]
    sets = [kinds for size in range(2, number + 1) for kinds in itertools.combinations(range(number), size)]
    for kinds in sets:
        for part in _PARTS:
            counts = tuple(totals[pool] // part if pool in kinds else 0 for pool in range(number))
            if all(counts[pool] and pools.aligned(pool, counts[pool]) for pool in kinds):
                yield counts
        for sizes in (wholes, fewer):
            taken = [sizes[pool] if pool in kinds else [0] for pool in range(number)]
            if math.prod(map(len, taken)) <= _MOST_PRODUCTS:
                yield from itertools.product(*taken)


def _sizes(size: int, nodes: int) -> list[int]:
    """Return numbers of GPUs to take from one pool: powers of 2, whole nodes, and equal parts of the pool.

    Also, for units of 2, 4, ... GPUs, the number of one node's GPUs that whole units use.
    """
    total = size * nodes
    powers = [2**power for power in range(total.bit_length())]
    sizes = {*powers, *(size - size % width for width in powers if width <= size)}
    sizes |= {size * count for count in range(1, nodes + 1) if nodes <= 8 or nodes % count == 0}
    sizes |= {total // part for part in _PARTS if total % part == 0}
    return sorted(sizes)
