"""The functions of ``torch.cuda`` that Megatron calls, for a CPU: one device, one stream, all in order.

Random numbers come from two streams, as on a GPU: weights and dropout draw from the device's generator, the
data loader from the host's. Megatron relies on the two being apart: it forks the device's stream for
tensor-parallel regions, and only the first tensor-parallel rank has a data loader. On the CPU everything
draws from PyTorch's default generator, so that one is the device's, and the host gets a generator of its own.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import os
import platform
import resource
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

from megatron_hexi.patching import Patch
from megatron_hexi.platform.cpu_device import called_from_megatron

_PAGE_BYTES = resource.getpagesize()


class _Stream(contextlib.AbstractContextManager):  # type: ignore[type-arg]
    """The only stream: work on a CPU is done when the call returns."""

    cuda_stream = 0
    device = torch.device("cpu")

    def __init__(self, device: Any = None, priority: int = 0, **options: Any) -> None:
        self.priority = priority

    def __exit__(self, *exception: object) -> None: ...

    @staticmethod
    def priority_range() -> tuple[int, int]:
        return (0, 0)

    def synchronize(self) -> None: ...

    def wait_event(self, event: _Event) -> None: ...

    def wait_stream(self, stream: _Stream) -> None: ...

    def record_event(self, event: _Event | None = None) -> _Event:
        event = event or _Event()
        event.record(self)
        return event

    def query(self) -> bool:
        return True


class _Event:
    """A moment; `elapsed_time` is in milliseconds, as CUDA's."""

    def __init__(self, *options: Any, **named_options: Any) -> None:
        self.seconds = 0.0

    def record(self, stream: _Stream | None = None) -> None:
        self.seconds = time.perf_counter()

    def wait(self, stream: _Stream | None = None) -> None: ...

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True

    def elapsed_time(self, end: _Event) -> float:
        return (end.seconds - self.seconds) * 1000.0


_STREAM = _Stream()


def _always(answer: Any = None) -> Callable[..., Any]:
    """Return a new function that always returns `answer`; Dynamo needs a separate one for each name."""
    return lambda *args, **kwargs: answer


def _is_available() -> bool:
    return called_from_megatron()


def _device_count() -> int:
    # One "device" a rank of this machine, so that LOCAL_RANK always names one of them.
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1")) if called_from_megatron() else 0


def _resident_bytes(device: Any = None) -> int:
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * _PAGE_BYTES


def _peak_resident_bytes(device: Any = None) -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _memory_stats(device: Any = None) -> dict[str, int]:
    stats = collections.defaultdict(int)
    for pool in ("allocated_bytes", "reserved_bytes"):
        stats[f"{pool}.all.current"] = _resident_bytes()
        stats[f"{pool}.all.peak"] = _peak_resident_bytes()
    return stats


def _properties(device: Any = None) -> SimpleNamespace:
    return SimpleNamespace(
        name=_device_name(),
        major=0,
        minor=0,
        multi_processor_count=os.cpu_count(),
        total_memory=os.sysconf("SC_PHYS_PAGES") * _PAGE_BYTES,
    )


def _device_name(device: Any = None) -> str:
    return f"CPU ({platform.machine()})"


def _answers(why: str, **answers: Any) -> tuple[Patch, ...]:
    """Return patches that replace attributes of ``torch.cuda`` by these values, by name."""
    return tuple(
        Patch(f"torch.cuda:{name}", why, _always(answer), package="torch", versions=">=2.6")
        for name, answer in answers.items()
    )


CUDA_PATCHES = (
    *_answers(
        "Megatron refuses to start without CUDA",
        is_available=_is_available,
        device_count=_device_count,
        current_device=_always(0),
        set_device=_always(),
        device=_always(contextlib.nullcontext()),
        get_device_properties=_properties,
        get_device_capability=_always((0, 0)),
        get_device_name=_device_name,
    ),
    *_answers(
        "work on a CPU is done when the call returns: one stream, always in order",
        Stream=_Stream,
        Event=_Event,
        stream=_always(contextlib.nullcontext()),
        current_stream=_always(_STREAM),
        default_stream=_always(_STREAM),
        set_stream=_always(),
        synchronize=_always(),
        is_current_stream_capturing=_always(False),
    ),
    *_answers(
        "Megatron reports the device's memory: here, the memory of this process",
        memory_allocated=_resident_bytes,
        max_memory_allocated=_peak_resident_bytes,
        memory_reserved=_resident_bytes,
        max_memory_reserved=_peak_resident_bytes,
        device_memory_used=_resident_bytes,
        memory_stats=_memory_stats,
        reset_peak_memory_stats=_always(),
        empty_cache=_always(),
    ),
)


#: The stream of the host: what the data loader draws from.
HOST_GENERATOR = torch.Generator()

_DEVICE_GENERATOR = torch.default_generator


class _OneGenerator:
    """``torch.cuda.default_generators``: the same generator for every device index."""

    def __getitem__(self, index: int) -> torch.Generator:
        return _DEVICE_GENERATOR

    def __len__(self) -> int:
        return 1


def _seed_device(seed: int) -> None:
    _DEVICE_GENERATOR.manual_seed(int(seed))


def _get_device_state(device: Any = "cuda") -> torch.Tensor:
    return _DEVICE_GENERATOR.get_state()


def _set_device_state(new_state: torch.Tensor, device: Any = "cuda") -> None:
    _DEVICE_GENERATOR.set_state(new_state)


def _get_host_state(original: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
    @functools.wraps(original)
    def get_rng_state() -> torch.Tensor:
        return HOST_GENERATOR.get_state() if called_from_megatron() else original()

    return get_rng_state


def _set_host_state(original: Callable[[torch.Tensor], None]) -> Callable[[torch.Tensor], None]:
    @functools.wraps(original)
    def set_rng_state(new_state: torch.Tensor) -> None:
        if called_from_megatron():
            HOST_GENERATOR.set_state(new_state)
        else:
            original(new_state)

    return set_rng_state


def _call_now(call: Callable[[], Any], **options: Any) -> None:
    call()


def _patch(target: str, why: str, build: Callable[[Any], Any]) -> Patch:
    return Patch(target, why, build, package="torch", versions=">=2.6")


_DEVICE_STREAM = "the stream of the device is PyTorch's default generator, from which a CPU draws"
_HOST_STREAM = "the stream of the host is apart from that of the device"

RANDOM_PATCHES = (
    _patch("torch.cuda:default_generators", _DEVICE_STREAM, lambda original: _OneGenerator()),
    _patch("torch.cuda:manual_seed", _DEVICE_STREAM, lambda original: _seed_device),
    _patch("torch.cuda:manual_seed_all", _DEVICE_STREAM, lambda original: _seed_device),
    _patch("torch.cuda:get_rng_state", _DEVICE_STREAM, lambda original: _get_device_state),
    _patch("torch.cuda:set_rng_state", _DEVICE_STREAM, lambda original: _set_device_state),
    _patch("torch.cuda.random:get_rng_state", _DEVICE_STREAM, lambda original: _get_device_state),
    _patch("torch.cuda.random:set_rng_state", _DEVICE_STREAM, lambda original: _set_device_state),
    _patch("torch:get_rng_state", _HOST_STREAM, _get_host_state),
    _patch("torch:set_rng_state", _HOST_STREAM, _set_host_state),
    _patch("torch.cuda:_lazy_call", "there is no CUDA to wait for", lambda original: _call_now),
    _patch("torch.cuda:_lazy_init", "there is no CUDA to start", lambda original: lambda: None),
)
