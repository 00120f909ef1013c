"""A replica in ministages, event by event: passes of micro-batches, rows, weights, gradients, copies.

Each stage has four lanes: its work; its wire, for weights that are gathered and gradients that are summed, in
the order in which it posts them; copies from host memory, and copies to it. Domains that take whole
micro-batches have all but the wire for themselves. Rows travel beside these. Nothing here is timed in closed
form: what may begin begins, and what ends lets others begin.
"""

from __future__ import annotations

import heapq
import itertools
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from megatron_hexi.cost.arrays import Floats
from megatron_hexi.cost.ministage_pipeline import MinistagePipeline
from megatron_hexi.lab.simulator.simulation import PipelineSpan
from megatron_hexi.mesh import ROWS_ON_DEVICE, ministage_passes

#: What is replayed: a kind, the stage, the place of the sweep in its order, and the number of a micro-batch,
#: of a ministage or of a lane.
Task = tuple[str, int, int, int]
#: A stage's begin of a sweep, its work and its end; rows over its border; all else that comes and goes.
_BEGIN, _WORK, _END, _ROWS = "begin", "work", "end", "rows"
_COPY_IN, _GATHER, _SUM, _COPY_OUT, _LEFT = "copy in", "gather", "sum", "copy out", "left"
_ROWS_IN, _ROWS_OUT = "rows in", "rows out"


@dataclass
class _Node:
    """A task: its seconds, how many others it still waits for, and who waits for its end, or its begin."""

    seconds: float
    waits_for: int = 0
    unlocks: list[Task] = field(default_factory=list)
    unlocks_begun: list[Task] = field(default_factory=list)


class _Graph:
    """Tasks, and what must be done or begun before each. Lanes take tasks as they are added, in order."""

    def __init__(self) -> None:
        self.nodes: dict[Task, _Node] = {}
        self._last: dict[tuple[str, int], Task] = {}
        self._needs: list[tuple[Task, Task, bool]] = []

    def add(
        self, task: Task, seconds: float, lane: tuple[str, int] | None, after: Iterable[Task] = ()
    ) -> None:
        """A task after some others, which may be added later."""
        self.nodes[task] = _Node(seconds)
        if lane is not None:
            if lane in self._last:
                self.need(task, self._last[lane])
            self._last[lane] = task
        for other in after:
            self.need(task, other)

    def need(self, task: Task, other: Task, *, begun: bool = False) -> None:
        """A task cannot begin before another is done, or has begun."""
        self._needs.append((task, other, begun))

    def run(self) -> dict[Task, tuple[float, float]]:
        """Begin and end of all tasks."""
        for task, other, begun in self._needs:
            node = self.nodes[other]
            (node.unlocks_begun if begun else node.unlocks).append(task)
            self.nodes[task].waits_for += 1
        times: dict[Task, tuple[float, float]] = {}
        number = itertools.count()
        events: list[tuple[float, int, Task]] = []

        def unlock(tasks: Iterable[Task], now: float) -> None:
            for task in tasks:
                node = self.nodes[task]
                node.waits_for -= 1
                if not node.waits_for:
                    begin(task, now)

        def begin(task: Task, now: float) -> None:
            node = self.nodes[task]
            times[task] = now, now + node.seconds
            heapq.heappush(events, (now + node.seconds, next(number), task))
            unlock(node.unlocks_begun, now)

        for task in [task for task, node in self.nodes.items() if not node.waits_for]:
            begin(task, 0.0)
        while events:
            now, _, task = heapq.heappop(events)
            unlock(self.nodes[task].unlocks, now)
        assert len(times) == len(self.nodes), "nothing waits for itself"
        return times


def replay_ministages(pipeline: MinistagePipeline, replica: int) -> tuple[list[PipelineSpan], float]:
    """When each stage passes which micro-batch, and when all gradients are with their owners.

    Args:
        pipeline: the stages.
        replica: number of the replica.
    """
    graph = _Graph()
    depth, count = pipeline.parts.shape
    orders = [ministage_passes(count, gives_loss=stage == depth - 1) for stage in range(depth)]
    for stage, order in enumerate(orders):
        passing, lanes = pipeline.passing[stage], pipeline.lanes[stage]
        numbers = range(len(lanes))
        here: dict[int, Task] = {}
        left: Task | None = None
        for place, sweep in enumerate(order):
            begins, ends = ([(kind, stage, place, own) for own in numbers] for kind in (_BEGIN, _END))
            for own, begin in enumerate(begins):
                graph.add(begin, 0.0, (f"work {own}", stage))
            here = {number: task for number, task in here.items() if number in sweep.weights}
            for number in sweep.weights:
                if number in here:
                    continue
                copies = [(f"{_COPY_IN} {own}", stage, place, number) for own in numbers]
                for own, (copy, begin) in enumerate(zip(copies, begins, strict=True)):
                    graph.add(copy, float(passing.copies_in[number]), (f"in {own}", stage), [begin])
                gather = (_GATHER, stage, place, number)
                graph.add(gather, float(passing.gathers[number]), ("wire", stage), copies)
                here[number] = gather
            for own, (lane, begin, end) in enumerate(zip(lanes, begins, ends, strict=True)):
                step, seconds = pipeline.step_s(stage, lane, sweep), pipeline.rows_s(stage, sweep)
                for turn, micro_batch in enumerate(lane.takes):
                    task = (_WORK, stage, place, micro_batch)
                    graph.add(task, step, (f"work {own}", stage), [here[sweep.ministage]])
                    if seconds:
                        _add_rows(graph, task, seconds, own, lane.takes, turn, begin, sweep.is_backward)
                after = [] if left is None or not sweep.is_backward else [left]
                graph.add(end, 0.0, (f"work {own}", stage), after)
            if sweep.is_backward:
                total, left = (_SUM, stage, place, 0), (_LEFT, stage, place, 0)
                graph.add(total, float(passing.sums[sweep.ministage]), ("wire", stage), ends)
                copies = [(f"{_COPY_OUT} {own}", stage, place, 0) for own in numbers]
                for own, copy in enumerate(copies):
                    graph.add(
                        copy, float(passing.copies_out[sweep.ministage]), (f"out {own}", stage), [total]
                    )
                graph.add(left, 0.0, None, copies)
    _add_borders(graph, pipeline)
    times = graph.run()
    owner = {
        (stage, number): lane
        for stage, lanes in enumerate(pipeline.lanes)
        for lane, own in enumerate(lanes)
        for number in own.takes
    }
    spans = [
        PipelineSpan(replica, stage, orders[stage][place].way, number, owner[stage, number], *span)
        for (kind, stage, place, number), span in times.items()
        if kind == _WORK
    ]
    return sorted(spans, key=lambda span: (span.stage, span.start_s)), max(end for _, end in times.values())


def _add_rows(
    graph: _Graph,
    task: Task,
    seconds: float,
    lane: int,
    takes: tuple[int, ...],
    turn: int,
    begin: Task,
    is_backward: bool,
) -> None:
    """Rows that entered for a micro-batch, on their way to host memory or back."""
    _, stage, place, micro_batch = task
    if is_backward:
        rows = (_ROWS_IN, stage, place, micro_batch)
        graph.add(rows, seconds, (f"in {lane}", stage))
        ahead = turn - ROWS_ON_DEVICE + 1
        graph.need(rows, (_WORK, stage, place, takes[ahead]) if ahead >= 0 else begin, begun=True)
        graph.need(task, rows)
        return
    rows = (_ROWS_OUT, stage, place, micro_batch)
    graph.add(rows, seconds, (f"out {lane}", stage))
    graph.need(rows, task, begun=True)
    if turn >= ROWS_ON_DEVICE:
        graph.need(task, (_ROWS_OUT, stage, place, takes[turn - ROWS_ON_DEVICE]))


def _add_borders(graph: _Graph, pipeline: MinistagePipeline) -> None:
    """Rows from each sweep to the next one in the model's order, when they are there and asked for."""
    placed: dict[int, int] = defaultdict(int)
    before: tuple[int, int, Floats] | None = None
    for stage, sweep in pipeline.order():
        place = placed[stage]
        placed[stage] += 1
        for lane, own in enumerate(pipeline.lanes[stage] if before is not None else ()):
            source, turn, seconds = before or (0, 0, np.zeros(0))
            asked, is_begun = (_BEGIN, stage, place, lane), True
            for number in own.takes:
                rows, task = (_ROWS, stage, place, number), (_WORK, stage, place, number)
                graph.add(rows, float(seconds[number]), None, [(_WORK, source, turn, number)])
                graph.need(rows, asked, begun=is_begun)
                graph.need(task, rows)
                asked, is_begun = task, pipeline.posts_ahead(stage, source)
        before = stage, place, pipeline.border_s(stage, sweep)
