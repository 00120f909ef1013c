"""Replay of a replica in ministages: passes of micro-batches, rows, weights, gradients, copies.

Each stage has four lanes: its work; its wire, for weights that are gathered and gradients that are summed, in
the order in which it posts them; copies from host memory, and copies to it. Domains that take whole
micro-batches have separate ones except for the wire. Rows travel independently. Times are not in closed form:
a task begins as soon as all tasks before it allow.
"""

from __future__ import annotations

from collections import defaultdict

import numpy as np

from megatron_hexi.cost.arrays import Floats
from megatron_hexi.cost.ministage_pipeline import MinistagePipeline
from megatron_hexi.lab.simulator.simulation import PipelineSpan
from megatron_hexi.lab.simulator.task_graph import Task, TaskGraph
from megatron_hexi.mesh import ROWS_ON_DEVICE, ministage_passes

#: Kinds: begin of a pass, work and end; rows over a border; copies, gathers and sums.
_BEGIN, _WORK, _END, _ROWS = "begin", "work", "end", "rows"
_COPY_IN, _GATHER, _SUM, _COPY_OUT, _LEFT = "copy in", "gather", "sum", "copy out", "left"
_ROWS_IN, _ROWS_OUT = "rows in", "rows out"


def replay_ministages(pipeline: MinistagePipeline, replica: int) -> tuple[list[PipelineSpan], float]:
    """Return the passes of micro-batches in each stage, and the time at which gradients are reduced."""
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
                step, seconds = pipeline.step_s(stage, lane, current), pipeline.rows_s(stage, current)
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
    times = graph.run()
    owner = {
        (stage, number): lane
        for stage, lanes in enumerate(pipeline.lanes)
        for lane, number_of_lane in enumerate(lanes)
        for number in number_of_lane.takes
    }
    spans = [
        PipelineSpan(replica, stage, orders[stage][place].way, number, owner[stage, number], *span)
        for (kind, stage, place, number), span in times.items()
        if kind == _WORK
    ]
    return sorted(spans, key=lambda span: (span.stage, span.start_s)), max(end for _, end in times.values())


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


def _add_borders(graph: TaskGraph, pipeline: MinistagePipeline) -> None:
    """Add the rows from each pass to the next in the model's order, sent when the receive is posted."""
    placed: dict[int, int] = defaultdict(int)
    before: tuple[int, int, Floats] | None = None
    for stage, current in pipeline.order():
        place = placed[stage]
        placed[stage] += 1
        for lane, receiver in enumerate(pipeline.lanes[stage] if before is not None else ()):
            source, turn, seconds = before or (0, 0, np.zeros(0))
            request, is_begun = (_BEGIN, stage, place, lane), True
            for number in receiver.takes:
                rows, task = (_ROWS, stage, place, number), (_WORK, stage, place, number)
                graph.add(rows, float(seconds[number]), None, [(_WORK, source, turn, number)])
                graph.need(rows, request, begun=is_begun)
                graph.need(task, rows)
                request, is_begun = task, pipeline.posts_ahead(stage, source)
        before = stage, place, pipeline.border_s(stage, current)
