"""Our entry point, with every byte counted that torch's CPU allocator hands out: what a rank really holds."""

from __future__ import annotations

import functools
import json
import re
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch

from megatron_hexi.runtime.host_memory import HostMemory

_SAID = "bytes held:"


@dataclass(frozen=True)
class HeldBytes:
    """What a rank's tensors took.

    Attributes:
        resident: after the last optimizer step: weights, gradients, optimizer state.
        peak: the most during the last iteration.
        host: in host memory, which the allocator does not hand out.
    """

    resident: int
    peak: int
    host: int


def main() -> None:
    """Train, and print what was held in the last iteration."""
    from megatron.training import training

    from megatron_hexi import pretrain_gpt

    original = training.train_step
    ends: list[int] = []

    @functools.wraps(original)
    def train_step(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        ends.append(time.time_ns())
        return result

    training.train_step = train_step
    memories: list[HostMemory] = []
    made = HostMemory.__init__

    def init(self: HostMemory, device: torch.device) -> None:
        made(self, device)
        memories.append(self)

    HostMemory.__init__ = init  # type: ignore[method-assign]
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profile:
        pretrain_gpt.main()
    host = sum(memory.nbytes for memory in memories)
    begin, end = ends[-2:]
    print(_SAID, json.dumps(asdict(_held(profile, begin, end, host))))


def _held(profile: torch.profiler.profile, begin: int, end: int, host: int) -> HeldBytes:
    """The level at the end of the last iteration, and its highest in it; times in ns since the epoch.

    Gloo's threads are the last to drop some tensors, which no profiler sees: when their memory is handed out
    again they are known to be gone.
    """
    assert profile.profiler is not None
    assert profile.profiler.kineto_results is not None
    held: dict[int, int] = {}
    level, resident, peak = 0, 0, 0
    for time_ns, pointer, size in sorted(_changes(profile.profiler.kineto_results.experimental_event_tree())):
        level -= held.pop(pointer, 0)
        if size > 0:
            held[pointer] = size
            level += size
        if time_ns <= end:
            resident = level
            if time_ns >= begin:
                peak = max(peak, level)
    return HeldBytes(resident, peak, host)


def _changes(events: list[Any]) -> Iterator[tuple[int, int, int]]:
    """When which address was handed out or taken back, and bytes, below 0 where it was taken back."""
    left = list(events)
    while left:
        event = left.pop()
        left += event.children
        if event.tag == torch._C._profiler._EventType.Allocation:
            yield event.start_time_ns, event.extra_fields.ptr, event.extra_fields.alloc_size


def held(output: str) -> Iterator[HeldBytes]:
    """What the ranks said, in the order of their output."""
    for said in re.findall(rf"{_SAID} (\{{.*\}})", output):
        yield HeldBytes(**json.loads(said))
