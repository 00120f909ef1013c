"""A replay in Trace Event Format, for https://ui.perfetto.dev and chrome://tracing.

Format: https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from megatron_hexi.lab.simulator.simulation import Simulation

#: The exchange and all-to-alls may be in flight at once.
_THREADS = ("compute", "network", "exchange")
_MICRO = 1e6


def chrome_trace(simulation: Simulation) -> dict[str, Any]:
    """Return the replayed events: a process for each rank, a thread for each lane; times in µs.

    Each replica with several stages has a further process, with a thread of micro-batches for each stage.
    """
    events: list[dict[str, Any]] = []
    shown = sorted({span.rank for span in simulation.spans})
    for rank in shown:
        timeline = simulation.ranks[rank]
        named = f"rank {rank}: {timeline.name} ({timeline.device})"
        events += _named(rank, named, _THREADS)
    kinds = [{"kind": name} if name else {} for name in simulation.kinds]
    for span in simulation.spans:
        events.append(
            {
                "ph": "X",
                "name": span.name,
                "cat": span.kind,
                "pid": span.rank,
                "tid": _THREADS.index("exchange" if span.kind == "exchange" else span.lane),
                "ts": span.start_s * _MICRO,
                "dur": (span.end_s - span.start_s) * _MICRO,
                "args": {"layer": span.layer, "way": span.way, **kinds[span.layer_kind]},
            }
        )
    events += _pipeline_events(simulation)
    return {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {
            "iteration_s": simulation.iteration_s,
            "replayed_layers": simulation.layers,
            "stage_layers": simulation.stage_layers,
        },
    }


def _pipeline_events(simulation: Simulation) -> list[dict[str, Any]]:
    events: list[dict[str, Any]] = []
    for replica, spans in enumerate(simulation.pipeline):
        if not any(span.stage or span.lane for span in spans):
            continue
        process = len(simulation.ranks) + replica
        lanes = sorted({(span.stage, span.lane) for span in spans})
        several = {stage for stage, lane in lanes if lane}
        threads = []
        for stage, lane in lanes:
            first = min(span.micro_batch for span in spans if (span.stage, span.lane) == (stage, lane))
            threads.append(f"stage {stage}" + (f", micro-batches {first}, …" if stage in several else ""))
        events += _named(process, f"replica {replica}: micro-batches", threads)
        events += [
            {
                "ph": "X",
                "name": f"{span.way} {span.micro_batch}",
                "cat": "pipeline",
                "pid": process,
                "tid": lanes.index((span.stage, span.lane)),
                "ts": span.start_s * _MICRO,
                "dur": (span.end_s - span.start_s) * _MICRO,
                "args": {"way": span.way, "micro_batch": span.micro_batch},
            }
            for span in spans
        ]
    return events


def _named(process: int, name: str, threads: Sequence[str]) -> list[dict[str, Any]]:
    """Return the events that name a process and its threads, and sort processes by number."""
    told: list[tuple[str, int, dict[str, Any]]] = [
        ("process_name", 0, {"name": name}),
        ("process_sort_index", 0, {"sort_index": process}),
        *(("thread_name", number, {"name": thread}) for number, thread in enumerate(threads)),
    ]
    return [{"ph": "M", "name": kind, "pid": process, "tid": tid, "args": args} for kind, tid, args in told]
