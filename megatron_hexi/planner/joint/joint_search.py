"""The joint search: replicas, pipelines, stages and domains of a job on a cluster, all chosen together."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from megatron_hexi.cluster import Cluster
from megatron_hexi.cost import ceiling_tokens_per_s
from megatron_hexi.planner.joint.assembly import Assembly, Candidate
from megatron_hexi.planner.joint.layer_times import LayerTimer
from megatron_hexi.planner.joint.packing import Packed, pack
from megatron_hexi.planner.joint.pipeline_search import PipelineSearch
from megatron_hexi.planner.joint.pools import Pools
from megatron_hexi.planner.joint.replica_columns import Column, ReplicaColumns
from megatron_hexi.planner.joint.stage_tables import StageTables
from megatron_hexi.planner.layouts.trial import Progress
from megatron_hexi.planner.request import Request

#: Numbers of replicas that are told apart: one shares optimizer state, two or three do, four to seven, …
_CLASSES = (1, 2, 4, 8)
#: Times that columns which are only roughly known are timed and packed again.
_ROUNDS = 12
#: Columns of mixed stages take up to so much longer than what is made of them.
_NEAR = 1.1
#: Plans that are put together; of those with one replica, for pipelines and for one stage, so many.
_FINALISTS, _RIVALS = 12, 3


class JointSearch:
    """Layouts of one micro-batch size.

    Args:
        request: what is planned.
        cluster: where.
        micro_batch_size: sequences of a micro-batch.
    """

    def __init__(self, request: Request, cluster: Cluster, micro_batch_size: int) -> None:
        job = replace(request.job, micro_batch_size=micro_batch_size)
        self._request, self._micro_batches = request, job.global_batch_size // micro_batch_size
        speeds = {id(node.device): ceiling_tokens_per_s(job, [node.device]) for node in cluster.nodes}
        self._pools = Pools(cluster, [speeds[id(node.device)] for node in cluster.nodes])
        self._timer = LayerTimer(request, cluster, self._pools, micro_batch_size)
        tables = StageTables(request, self._timer)
        search = PipelineSearch(request, tables)
        self._columns = ReplicaColumns(request, self._timer, search, self._micro_batches)
        self._assembly = Assembly(request, tables, search, cluster)

    @property
    def trials(self) -> int:
        """Layouts that were timed."""
        return self._timer.trials + self._assembly.trials

    def run(self, tell: Progress, *, fewest: bool = False) -> Iterator[Candidate]:
        """The best plan of each class of replicas, as long as it may be the best of all.

        Between replicas of other tensor-parallel sizes gradients would have to be cut anew, which costs more
        than other sizes bring: there all have the same.

        Args:
            tell: told how far it is.
            fewest: only plans of the fewest replicas, which need least memory.
        """
        classes = [some for some in map(self._replicas, _CLASSES) if len(some)]
        if fewest:
            del classes[1:]
        found: list[Packed] = []
        for number, replicas in enumerate(classes):
            tell("replicas and pipelines", number, len(classes))
            for width in [None] if replicas[0] == 1 else self._timer.widths:
                columns = self._columns.find(_class_of(replicas[0]), width)
                whole = [column for column in columns if len(column.pipe.stages) == 1]
                for some in (columns, whole):
                    found += self._best(some, replicas, _RIVALS if replicas[-1] == 1 else 1)
        found.sort(key=lambda packed: (len(packed.columns) > 1, packed.seconds))
        best: tuple[tuple[float, float], Packed] | None = None
        for number, packed in enumerate(found[:_FINALISTS]):
            tell("finalists", number, min(len(found), _FINALISTS) + 1)
            if best is not None and packed.seconds > _NEAR * best[0][1]:
                continue
            candidate = self._assembly.run(packed, polished=False)
            if candidate is not None:
                best = min(
                    [(candidate.order, packed), *([] if best is None else [best])], key=lambda one: one[0]
                )
                yield candidate
        polished = None if best is None else self._assembly.run(best[1], polished=True)
        if polished is not None:
            yield polished

    def _replicas(self, shards: int) -> range:
        """Numbers of replicas of a class; none where another is fixed, or there is no batch for them."""
        most = min(self._micro_batches, sum(self._pools.totals))
        if "data_parallel" in self._request.fixed:
            fixed = self._request.job.data_parallel
            return range(fixed, fixed + 1) if _class_of(fixed) == shards and fixed <= most else range(0)
        end = most if shards == _CLASSES[-1] else min(most, 2 * shards - 1)
        return range(shards, end + 1)

    def _best(self, columns: list[Column], replicas: range, count: int) -> Iterator[Packed]:
        """The best sets of columns, so many, each without those of the ones before."""
        for _ in range(count):
            packed = self._packed(columns, replicas)
            if packed is None:
                return
            yield packed
            alike = {(column.counts, column.pipe.shapes) for column in packed.columns}
            columns = [column for column in columns if (column.counts, column.pipe.shapes) not in alike]

    def _packed(self, columns: list[Column], replicas: range) -> Packed | None:
        """The best set of columns, all of them timed."""
        least = 0.0
        for _ in range(_ROUNDS):
            packed = pack(columns, self._micro_batches, self._pools.totals, replicas, least)
            if packed is None:
                return None
            rough = {id(column): column for column in packed.columns if not column.pipe.timed}
            if not rough:
                return packed
            least = packed.least_s
            columns = [column for column in columns if id(column) not in rough]
            columns += [timed for timed in map(self._columns.timed, rough.values()) if timed is not None]
        known = [column for column in columns if column.pipe.timed]
        return pack(known, self._micro_batches, self._pools.totals, replicas, least)


def _class_of(replicas: int) -> int:
    return max(shards for shards in _CLASSES if shards <= replicas)
