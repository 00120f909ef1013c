"""The best plan on a few GPUs among all sets of replicas, pipelines and stages.

What a stage does (its domain, where its experts are) is searched as the planner does, and its layers are
dealt by timed tables. Which GPUs make up which stage of which replica is tried in full, where the planner
looks only at choices that its tables favour. The sets that their stages' times favour become plans.
"""

import functools
import heapq
import itertools
import math
from dataclasses import replace

from megatron_hexi.planner.expert_placement import expert_rules
from megatron_hexi.planner.joint.assembly import Assembly
from megatron_hexi.planner.joint.layer_times import LayerTimer
from megatron_hexi.planner.joint.packing import Packed
from megatron_hexi.planner.joint.pipeline_search import PipelineSearch
from megatron_hexi.planner.joint.pools import StageShape
from megatron_hexi.planner.joint.replica_columns import Column
from megatron_hexi.planner.joint.stage_tables import StageTables
from megatron_hexi.planner.joint.synchronisation import Synchronisation
from megatron_hexi.planner.recomputation import offered

#: Pipelines that are kept of each choice of GPUs, and of each of several replicas.
KEPT, KEPT_OF_SEVERAL = 60, 6
#: Sets of replicas that are planned, if their columns take at most so much longer than the best of all.
PLANNED, FAR = 60, 1.15
#: The first of these get the last small changes, if their columns take at most so much longer.
POLISHED, NEAR = 12, 1.03


@functools.cache
def parts(counts):
    """Everything that a stage may take of some GPUs, at least one."""
    return [part for part in itertools.product(*(range(count + 1) for count in counts)) if any(part)]


def left(counts, part):
    return tuple(count - taken for count, taken in zip(counts, part, strict=True))


def pipelines(counts, widths, deepest):
    """All pipelines on exactly these GPUs: sequences of stages, each of one tensor-parallel size."""
    if not any(counts):
        yield ()
    elif deepest:
        for part in parts(counts):
            for width in widths:
                if all(count % width == 0 for count in part):
                    for rest in pipelines(left(counts, part), widths, deepest - 1):
                        yield (StageShape(part, width), *rest)


def replica_sets(counts, most, first=None):
    """All sets of up to `most` replicas' GPUs, largest first."""
    yield ()
    if most:
        for part in parts(counts):
            if first is None or part <= first:
                for rest in replica_sets(left(counts, part), most - 1, part):
                    yield (part, *rest)


def dealt(columns, micro_batches):
    """Micro-batches of each column so that the slowest is done first, one at a time."""
    counts = [1] * len(columns)
    queue = [(column.seconds(2), place) for place, column in enumerate(columns)]
    heapq.heapify(queue)
    for _ in range(micro_batches - len(columns)):
        _, place = heapq.heappop(queue)
        counts[place] += 1
        heapq.heappush(queue, (columns[place].seconds(counts[place] + 1), place))
    return tuple(counts)


class Exhaustive:
    """Tries all sets of replicas of one micro-batch size and one choice of where experts are."""

    def __init__(self, request, cluster, micro_batch_size, deepest):
        widths = tuple(request.widths(max(len(node.ranks) for node in cluster.nodes)))
        job = replace(
            request.job,
            tensor_parallel=widths[0],
            pipeline_parallel=1,
            data_parallel=1,
            micro_batch_size=micro_batch_size,
            global_batch_size=micro_batch_size,
            recompute="selective",
        )
        self.timer = LayerTimer(job, cluster, widths, request.experts, offered(request, job))
        self.pools = self.timer.pools
        self.search = PipelineSearch(request, StageTables(request, self.timer, self.pools))
        self.assembly = Assembly(request, self.timer, self.search, self.pools)
        self.sync = Synchronisation(self.timer)
        self.micro_batches = request.job.global_batch_size // micro_batch_size
        self.deepest = deepest
        self.speeds = [1 / self.timer.seconds_alone(pool) for pool in range(len(self.pools.pools))]
        self.columns = functools.cache(self._columns)

    def _columns(self, counts, replicas):
        share = math.sumprod(counts, self.speeds) / math.sumprod(self.pools.totals, self.speeds)
        count = self.micro_batches if replicas == 1 else max(1, round(share * self.micro_batches))
        found = []
        for shapes in pipelines(counts, self.timer.widths, self.deepest):
            pipe = self.search.layered(shapes, count, replicas, timed=True)
            if pipe is not None:
                found.append(Column(counts, pipe, replicas, self.sync.seconds(pipe.stages, replicas)))
        found.sort(key=lambda column: column.seconds(count))
        return found[: KEPT if replicas == 1 else KEPT_OF_SEVERAL]

    def run(self):
        """The best candidate; ``None`` where nothing fits."""
        sets: list[tuple[float, int, Packed]] = []
        for counts in replica_sets(self.pools.totals, min(self.micro_batches, sum(self.pools.totals))):
            if not counts:
                continue
            for columns in itertools.product(*(self.columns(part, len(counts)) for part in counts)):
                given = dealt(columns, self.micro_batches)
                seconds = max(column.seconds(count) for column, count in zip(columns, given, strict=True))
                sets.append((seconds, len(sets), Packed(columns, given, seconds)))
        sets.sort()
        best = None
        for place, (seconds, _, packed) in enumerate(sets[:PLANNED]):
            if seconds > FAR * sets[0][0]:
                break
            is_near = place < POLISHED and seconds < NEAR * sets[0][0]
            candidate = self.assembly.run(packed, polished=is_near)
            if candidate is not None and candidate.fits:
                best = candidate if best is None else min(best, candidate, key=lambda one: one.order)
        self.sets = len(sets)
        return best


def best_plan(request, cluster, deepest=4):
    """The best plan of all micro-batch sizes and choices of experts' places, and the number of sets tried."""
    found, sets = [], 0
    for rule in expert_rules(request.job, cluster, request.expert_parallel):
        choice = replace(request, experts=rule)
        for size in request.micro_batch_sizes():
            everything = Exhaustive(choice, cluster, size, deepest)
            found.append(everything.run())
            sets += everything.sets
    return min((one for one in found if one is not None), key=lambda one: one.order), sets
