"""The passes of a pipeline as a graph of tasks, each of which begins as soon as all tasks before it allow.

The oracle of `megatron_hexi.cost.pipeline`: it has no clocks of stages, and an edge for each wait.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from megatron_hexi.cost.pipeline import Pipeline
from megatron_hexi.mesh import ROWS_ON_DEVICE, ministage_passes, pipeline_steps, step_source

#: A task: its kind, the stage, the place of the pass in its order, and the number of a micro-batch, of a
#: ministage or of a lane.
Task = tuple[str, int, int, int]


@dataclass
class _TaskNode:
    """A task: seconds, number of unfinished predecessors, and successors of its end or its begin."""

    seconds: float
    waits_for: int = 0
    unlocks: list[Task] = field(default_factory=list)
    unlocks_begun: list[Task] = field(default_factory=list)


class TaskGraph:
    """Tasks with their predecessors. Each lane runs tasks in the order in which they are added."""

    def __init__(self) -> None:
        self.nodes: dict[Task, _TaskNode] = {}
        self._last: dict[tuple[str, int], Task] = {}
        self._needs: list[tuple[Task, Task, bool]] = []

    def add(
        self, task: Task, seconds: float, lane: tuple[str, int] | None, after: Iterable[Task] = ()
    ) -> None:
        """Add a task after others, which may be added later."""
        self.nodes[task] = _TaskNode(seconds)
        if lane is not None:
            if lane in self._last:
                self.need(task, self._last[lane])
            self._last[lane] = task
        for earlier in after:
            self.need(task, earlier)

    def need(self, task: Task, earlier: Task, *, begun: bool = False) -> None:
        """Let a task begin only after another has ended, or has begun."""
        self._needs.append((task, earlier, begun))

    def run(self) -> dict[Task, tuple[float, float]]:
        """Return begin and end of all tasks."""
        for task, earlier, begun in self._needs:
            node = self.nodes[earlier]
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


#: Kinds: begin of a pass, work and end; rows over a border; copies, gathers and sums.
_BEGIN, _WORK, _END, _ROWS = "begin", "work", "end", "rows"
_COPY_IN, _GATHER, _SUM, _COPY_OUT, _LEFT = "copy in", "gather", "sum", "copy out", "left"
_ROWS_IN, _ROWS_OUT = "rows in", "rows out"


def end_in_turn(pipeline: Pipeline) -> float:
    """Return when all gradients are reduced, with ministages in turn.

    Each stage has four lanes: its work; its wire, for weights that are gathered and gradients that are
    summed, in the order in which it posts them; copies from host memory, and copies to it. Domains that take
    whole micro-batches have separate ones except for the wire. Rows travel independently.
    """
    assert pipeline.passing is not None
    graph = TaskGraph()
    depth, count = pipeline.parts.shape
    orders = [ministage_passes(count, gives_loss=stage == depth - 1) for stage in range(depth)]
    for stage, order in enumerate(orders):
        passing, lanes = pipeline.passing[stage], pipeline.lanes[stage]
        numbers = range(len(lanes))
        here: dict[int, Task] = {}
        left: Task | None = None
        for place, current in enumerate(order):
            begins, ends = (
                [(kind, stage, place, number_of_lane) for number_of_lane in numbers]
                for kind in (_BEGIN, _END)
            )
            for number_of_lane, begin in enumerate(begins):
                graph.add(begin, 0.0, (f"work {number_of_lane}", stage))
            here = {number: task for number, task in here.items() if number in current.weights}
            for number in current.weights:
                if number in here:
                    continue
                copies = [
                    (f"{_COPY_IN} {number_of_lane}", stage, place, number) for number_of_lane in numbers
                ]
                for number_of_lane, (copy, begin) in enumerate(zip(copies, begins, strict=True)):
                    graph.add(
                        copy, float(passing.copies_in[number]), (f"in {number_of_lane}", stage), [begin]
                    )
                gather = (_GATHER, stage, place, number)
                graph.add(gather, float(passing.gathers[number]), ("wire", stage), copies)
                here[number] = gather
            for number_of_lane, (lane, begin, end) in enumerate(zip(lanes, begins, ends, strict=True)):
                step = sum(
                    pipeline.pass_s(stage, lane, way, current.ministage)
                    for way in ("forward", "backward")
                    if current.way in (way, "turn")
                )
                has_entry = current.way != "turn" and (stage, current.ministage) != (0, 0)
                seconds = passing.rows * has_entry
                for turn, micro_batch in enumerate(lane.takes):
                    task = (_WORK, stage, place, micro_batch)
                    graph.add(task, step, (f"work {number_of_lane}", stage), [here[current.ministage]])
                    if seconds:
                        _add_rows(
                            graph, task, seconds, number_of_lane, lane.takes, turn, begin, current.is_backward
                        )
                after = [] if left is None or not current.is_backward else [left]
                graph.add(end, 0.0, (f"work {number_of_lane}", stage), after)
            if current.is_backward:
                total, left = (_SUM, stage, place, 0), (_LEFT, stage, place, 0)
                graph.add(total, float(passing.sums[current.ministage]), ("wire", stage), ends)
                copies = [(f"{_COPY_OUT} {number_of_lane}", stage, place, 0) for number_of_lane in numbers]
                for number_of_lane, copy in enumerate(copies):
                    graph.add(
                        copy,
                        float(passing.copies_out[current.ministage]),
                        (f"out {number_of_lane}", stage),
                        [total],
                    )
                graph.add(left, 0.0, None, copies)
    _add_borders(graph, pipeline)
    return max(end for _, end in graph.run().values())


def _add_rows(
    graph: TaskGraph,
    task: Task,
    seconds: float,
    lane: int,
    takes: tuple[int, ...],
    turn: int,
    begin: Task,
    is_backward: bool,
) -> None:
    """Add the copies of a micro-batch's entering rows to host memory or back."""
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


def _add_borders(graph: TaskGraph, pipeline: Pipeline) -> None:
    """Add the rows from each pass to the next in the model's order, sent when the receive is posted."""
    depth, count = pipeline.parts.shape
    own = [iter(enumerate(ministage_passes(count, stage == depth - 1))) for stage in range(depth)]
    forward = [stage for _ in range(count) for stage in range(depth)]
    before: tuple[int, int, str] | None = None
    # The last way forward is the turn: forward and backward of the ministage with the loss.
    for stage in (*forward, *reversed(forward[:-1])):
        place, current = next(own[stage])
        if before is not None:
            source, turn, way = before
            ways, border = (pipeline.there, source) if way == "forward" else (pipeline.back, stage)
            seconds = ways[border] if depth > 1 else np.zeros(pipeline.micro_batches)
            alone = len(pipeline.lanes[stage]) == len(pipeline.lanes[source]) == 1
            for lane, receiver in enumerate(pipeline.lanes[stage]):
                request, is_begun = (_BEGIN, stage, place, lane), True
                for number in receiver.takes:
                    rows, task = (_ROWS, stage, place, number), (_WORK, stage, place, number)
                    graph.add(rows, float(seconds[number]), None, [(_WORK, source, turn, number)])
                    graph.need(rows, request, begun=is_begun)
                    graph.need(task, rows)
                    request, is_begun = task, alone
        before = stage, place, current.way


def end_of_1f1b(pipeline: Pipeline) -> float:
    """Return when the last pass ends, in 1F1B or interleaved 1F1B."""
    graph = TaskGraph()
    depth, count = pipeline.parts.shape
    orders = [pipeline_steps(depth, stage, pipeline.micro_batches, count) for stage in range(depth)]
    places = [{step: place for place, step in enumerate(order)} for order in orders]
    for stage, order in enumerate(orders):
        last: dict[str, Task] = {}
        for place, step in enumerate(order):
            task = (_WORK, stage, place, step.micro_batch)
            (lane,) = pipeline.lanes[stage]
            weight = 1.0 if pipeline.weights is None else pipeline.weights[step.micro_batch]
            graph.add(task, weight * pipeline.pass_s(stage, lane, step.way, step.chunk), (_WORK, stage))
            source = step_source(depth, stage, step, count)
            if source is None:
                continue
            sender, sent = source
            sends = (_WORK, sender, places[sender][sent], step.micro_batch)
            rows = (_ROWS, stage, place, step.micro_batch)
            border = pipeline.there[sender] if step.way == "forward" else pipeline.back[stage]
            graph.add(rows, float(border[step.micro_batch]), None, [sends])
            graph.need(task, rows)
            if step.way in last:
                graph.need(rows, last[step.way], begun=True)
            elif place:
                graph.need(rows, (_WORK, stage, place - 1, order[place - 1].micro_batch))
            last[step.way] = task
    return max(end for _, end in graph.run().values())
