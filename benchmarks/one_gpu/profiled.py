"""Training as of `megatron_hexi.pretrain_gpt` with one iteration profiled: which kernels ran when on the GPU.

Each rank writes `profile-RANK.json`: intervals of its kernels by kind and stream, and how long its messages
ran with other kernels beside them.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

#: Which call of Megatron's train_step is profiled: buffers and connections are there by then.
_STEP = 3
#: Kinds of kernels by parts of their names, the first that fits.
_KINDS = (
    ("message", ("nccl",)),
    ("attention", ("flash", "sdpa", "fmha", "attention")),
    ("product", ("gemm", "cutlass", "xmma", "nvjet", "cublas")),
)
#: (kind, stream, begin and end in milliseconds from the first kernel).
Span = tuple[str, int, float, float]


def main() -> None:
    """Train by the command line, and profile one iteration."""
    from megatron.training import training

    from megatron_hexi.megatron.gpt import pretrain_from_command_line

    with mock.patch.object(training, "train_step", _profiling(training.train_step)):
        pretrain_from_command_line()


def _profiling(original: Callable[..., Any]) -> Callable[..., Any]:
    calls = 0

    @functools.wraps(original)
    def train_step(*args: Any, **kwargs: Any) -> Any:
        import torch.distributed as dist
        from torch.profiler import ProfilerActivity, profile

        nonlocal calls
        calls += 1
        if calls != _STEP:
            return original(*args, **kwargs)
        with profile(activities=[ProfilerActivity.CUDA]) as found:
            result = original(*args, **kwargs)
        spans = _spans(found.profiler.kineto_results.events())
        text = json.dumps({**overlap(spans), "spans": spans})
        Path(f"profile-{dist.get_rank()}.json").write_text(text)
        return result

    return train_step


def _spans(events: Iterable[Any]) -> list[Span]:
    kernels = [
        (_kind(event.name()), event.device_resource_id(), event.start_ns(), event.duration_ns())
        for event in events
        if str(event.device_type()).endswith("CUDA") and event.duration_ns() > 0
    ]
    first = min((start for _, _, start, _ in kernels), default=0)
    return sorted(
        (
            (kind, stream, (start - first) / 1e6, (start - first + length) / 1e6)
            for kind, stream, start, length in kernels
        ),
        key=lambda span: span[2],
    )


def _kind(name: str) -> str:
    return next((kind for kind, parts in _KINDS if any(part in name.lower() for part in parts)), "other")


def overlap(spans: Sequence[Span]) -> dict[str, float]:
    """Milliseconds in which messages ran, and those of them in which any other kernel ran too."""
    messages = _union([span[2:] for span in spans if span[0] == "message"])
    others = _union([span[2:] for span in spans if span[0] != "message"])
    both = sum(
        max(0.0, min(end, other_end) - max(begin, other_begin))
        for begin, end in messages
        for other_begin, other_end in others
    )
    return {"message_ms": sum(end - begin for begin, end in messages), "hidden_ms": both}


def _union(intervals: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """Intervals that do not meet, which cover the same."""
    merged: list[tuple[float, float]] = []
    for begin, end in sorted(intervals):
        if merged and begin <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((begin, end))
    return merged
