"""Replay of a replica with ministages interleaved: passes of micro-batches, and rows over borders."""

from __future__ import annotations

from megatron_hexi.cost.interleaved_pipeline import InterleavedPipeline
from megatron_hexi.lab.simulator.simulation import PipelineSpan
from megatron_hexi.lab.simulator.task_graph import Task, TaskGraph
from megatron_hexi.mesh import pipeline_steps, step_source

_WORK, _ROWS = "work", "rows"


def replay_interleaved(pipeline: InterleavedPipeline, replica: int) -> tuple[list[PipelineSpan], float]:
    """Return the passes of micro-batches in each stage, and the time at which the last one ends."""
    graph = TaskGraph()
    depth, count = pipeline.parts.shape
    orders = [pipeline_steps(depth, stage, pipeline.micro_batches, count) for stage in range(depth)]
    places = [{step: place for place, step in enumerate(order)} for order in orders]
    for stage, order in enumerate(orders):
        last: dict[str, Task] = {}
        for place, step in enumerate(order):
            task = (_WORK, stage, place, step.micro_batch)
            graph.add(task, pipeline.step_s(stage, step), (_WORK, stage))
            source = step_source(depth, stage, step, count)
            if source is None:
                continue
            sender, sent = source
            sends = (_WORK, sender, places[sender][sent], step.micro_batch)
            rows = (_ROWS, stage, place, step.micro_batch)
            graph.add(rows, pipeline.border_s(stage, step), None, [sends])
            graph.need(task, rows)
            if step.way in last:
                graph.need(rows, last[step.way], begun=True)
            elif place:
                graph.need(rows, (_WORK, stage, place - 1, order[place - 1].micro_batch))
            last[step.way] = task
    times = graph.run()
    spans = [
        PipelineSpan(replica, stage, step.way, number, 0, *span, step.chunk)
        for (kind, stage, place, number), span in times.items()
        if kind == _WORK
        for step in [orders[stage][place]]
    ]
    return sorted(spans, key=lambda span: (span.stage, span.start_s)), max(end for _, end in times.values())
