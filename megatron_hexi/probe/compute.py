"""Measures one rank's rates (matrix products, attention, memory bandwidth, copies), and messages of all.

A figure is timed until it is steady. For messages every rank calls the same functions in the same order. A
*lane* is a set of ranks whose messages are measured together while those of other lanes are in flight: a
node, or two nodes that send to each other.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Protocol

import torch
import torch.distributed as dist
import torch.nn.functional as F

from megatron_hexi.probe.document import WIDENING, Sizes, TransferTimes
from megatron_hexi.probe.world import World
from megatron_hexi.runtime.kernels import BlockKind, KernelDispatch, Mode
from megatron_hexi.runtime.wire import Message, all_to_all, post

#: A sample lasts at least so long, so that neither clock nor launch shows.
_SAMPLE_S = 0.02
#: Clocks, caches and the choice of an algorithm settle in this time.
_WARM_UP_S = 0.5
_MOST_CALLS = 1000
_MOST_SAMPLES = 9

#: Work that is measured: called many times, its result is dropped.
Work = Callable[[], object]


class Clock(Protocol):
    """Times work on a device."""

    def seconds(self, work: Work, calls: int) -> float:
        """Return the mean seconds of a call, over `calls` in a row."""


class WallClock:
    """Times work that is done when the call returns."""

    def seconds(self, work: Work, calls: int) -> float:
        """See `Clock.seconds`."""
        start = time.perf_counter()
        for _ in range(calls):
            work()
        return (time.perf_counter() - start) / calls


class CudaClock:
    """Times asynchronous work of a GPU, between two events in its stream."""

    def seconds(self, work: Work, calls: int) -> float:
        """See `Clock.seconds`."""
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(calls):
            work()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1e3 / calls


def clock_for(device: torch.device) -> Clock:
    """Return the clock of a device."""
    return CudaClock() if device.type == "cuda" else WallClock()


def steady_seconds(work: Work, clock: Clock, limit_s: float) -> float:
    """Return the seconds of one call: the median of up to nine samples, after a warm-up.

    Args:
        limit_s: no further sample is taken that would go beyond; one always is.
    """
    spent, warm_up_s = 0.0, min(_WARM_UP_S, limit_s / 4)
    while spent < warm_up_s:
        once = max(clock.seconds(work, 1), 1e-6)
        spent += once
    once = max(clock.seconds(work, 1), 1e-9)
    calls = min(_MOST_CALLS, math.ceil(_SAMPLE_S / once))
    count = max(1, min(_MOST_SAMPLES, int(limit_s / (once * calls))))
    # One call that lasts is a sample already.
    samples = [once] if calls == 1 else []
    return median([*samples, *(clock.seconds(work, calls) for _ in range(count - len(samples)))])


#: Messages there and back.
_ROUND_TRIPS = 40
#: Times that each size is sent, after one more to warm up.
_REPEATS = 3
_TAG = 7


@dataclass(frozen=True)
class Wire:
    """Sends test messages from a rank.

    Args:
        limit_s: a transfer that takes so long ends its sweep over the sizes.
    """

    world: World
    device: torch.device
    group: dist.ProcessGroup
    sizes: Sequence[int]
    limit_s: float

    def exchange(
        self, flows: Sequence[tuple[int, int]], lanes: Sequence[Sequence[int]]
    ) -> list[TransferTimes]:
        """Time point-to-point messages sent at once; return each lane's times by bytes of one message."""

        def prepare(size: int) -> Callable[[], None]:
            rank = self.world.rank
            incoming = [Message(src, self._empty(size)) for src, dst in flows if dst == rank]
            outgoing = [Message(dst, self._empty(size)) for src, dst in flows if src == rank]
            return lambda: post(incoming, outgoing, self.group, _TAG).wait()

        return self._sweep(prepare, lanes)

    def all_to_all(self, peers: Sequence[int], lanes: Sequence[Sequence[int]]) -> list[TransferTimes]:
        """Time an all-to-all of equal messages; return each lane's times by bytes to one peer."""

        def prepare(size: int) -> Callable[[], None]:
            splits = [size if rank in set(peers) else 0 for rank in range(self.world.size)]
            sent, received = self._empty(sum(splits)), self._empty(sum(splits))
            return lambda: all_to_all(received, sent, splits, splits, self.group).wait()

        return self._sweep(prepare, lanes)

    def latencies(self, pairs: Sequence[tuple[int, int]]) -> list[float]:
        """Return the latency between the two ranks of each pair, s: half of the median round trip."""
        own_rank = self.world.rank
        ball = self._empty(8)
        peer = next((b if a == own_rank else a for a, b in pairs if own_rank in (a, b)), None)

        def trip() -> None:
            if peer is None:
                return
            message = [Message(peer, ball)]
            for sends in (True, False) if own_rank < peer else (False, True):  # the first of a pair serves
                post([] if sends else message, message if sends else [], self.group, _TAG).wait()

        self.world.meet()
        trips = [self._seconds(trip) for _ in range(_ROUND_TRIPS)]
        trip_s = self.world.all_gather_number(median(trips[_ROUND_TRIPS // 4 :]))  # the first ones warm up
        return [trip_s[min(pair)] / 2 for pair in pairs]

    def _sweep(
        self, prepare: Callable[[int], Callable[[], None]], lanes: Sequence[Sequence[int]]
    ) -> list[TransferTimes]:
        """Time transfers of growing size until the slowest rank takes long enough.

        A lane, ranks that send to each other, takes as long as its slowest rank.
        """
        seconds: list[list[float]] = [[] for _ in lanes]
        sizes: list[int] = []
        for size in self.sizes:
            work = prepare(size)
            samples = []
            for _ in range(1 + _REPEATS):  # one to warm up
                self.world.meet()
                samples.append(self.world.all_gather_number(self._seconds(work)))
            del samples[0]
            sizes.append(size)
            for lane, lane_seconds in zip(lanes, seconds, strict=True):
                lane_seconds.append(median(max(sample[rank] for rank in lane) for sample in samples))
            if median(max(sample) for sample in samples) >= self.limit_s:
                break
        return [TransferTimes(tuple(sizes), tuple(lane_seconds)) for lane_seconds in seconds]

    def _seconds(self, work: Callable[[], None]) -> float:
        start = time.perf_counter()
        with self.world.lost_ranks():
            work()
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
        return time.perf_counter() - start

    def _empty(self, size: int) -> torch.Tensor:
        return torch.zeros(size, dtype=torch.uint8, device=self.device)


#: What memory allocators say when there is none left: torch's on CUDA, its own on the CPU, oneDNN's.
_NO_MEMORY = ("out of memory", "can't allocate memory", "could not create a memory", "bad_alloc")


@dataclass(frozen=True)
class Points:
    """A curve on one rank: TFLOP/s at each size, ``None`` where it was skipped, and why (empty: none was)."""

    tflops: tuple[float | None, ...]
    skipped: str


def measure_points(
    name: str,
    sizes: Sequence[int],
    flops: Callable[[int], float],
    prepare: Callable[[int], Work],
    clock: Clock,
    limit_s: float,
    meet: Callable[[str], None],
) -> Points:
    """Measure one kind of work at every size, from the smallest up.

    Args:
        limit_s: seconds a size; from the first that would take longer, by the rate so far, all are skipped.
        meet: told what comes next, waits for the other ranks: all load the machine at once.
    """
    tflops: list[float] = []
    rate, why = 0.0, ""
    for size in sizes:
        meet(f"{name} at {size}")  # also for what is skipped: other ranks may not skip it
        if not why and rate and 3 * flops(size) / rate > limit_s:
            why = f"{name} from {size} on: takes too long"
        if why:
            continue
        try:
            rate = flops(size) / steady_seconds(prepare(size), clock, limit_s)
            tflops.append(rate / 1e12)
        except (RuntimeError, MemoryError) as problem:
            if not _is_out_of_memory(problem):
                raise
            why = f"{name} from {size} on: does not fit in memory"
    return Points((*tflops, *[None] * (len(sizes) - len(tflops))), why)


def matmul(sizes: Sizes, device: torch.device, dtype: torch.dtype) -> Callable[[int], Work]:
    """Return the products of a linear layer in training: output, gradients of input and of weight."""
    wide = WIDENING * sizes.hidden

    def prepare(rows: int) -> Work:
        weight = torch.randn(wide, sizes.hidden, device=device, dtype=dtype)
        x = torch.randn(rows, sizes.hidden, device=device, dtype=dtype)
        grad = torch.randn(rows, wide, device=device, dtype=dtype)
        return lambda: (F.linear(x, weight), grad @ weight, grad.t() @ x)

    return prepare


def attention(
    kernel: KernelDispatch,
    sizes: Sizes,
    device: torch.device,
    dtype: torch.dtype,
    *,
    causal: bool,
    backward: bool,
) -> Callable[[int], Work]:
    """Return a block of attention in the runtime's layout: [B, tokens, heads, D] in memory."""
    mode = Mode(causal, sizes.head_dim**-0.5)

    def prepare(tokens: int) -> Work:
        shape = (1, tokens, sizes.heads, sizes.head_dim)
        query, key, value, grad = (
            torch.randn(shape, device=device, dtype=dtype).transpose(1, 2) for _ in range(4)
        )
        chosen = kernel.choose(BlockKind(query.shape, key.shape, causal, device))
        if not backward:
            return lambda: chosen.forward(query, key, value, mode)
        output, log_sum_exp = chosen.forward(query, key, value, mode)
        return lambda: chosen.backward(grad, query, key, value, output, log_sum_exp, mode)

    return prepare


def stream_gb_s(size: int, device: torch.device, clock: Clock, limit_s: float) -> float:
    """Measure memory bandwidth, 10^9 bytes/s, by the triad a = b + s c of arrays of `size` bytes."""
    a, b, c = (torch.ones(size // 4, device=device, dtype=torch.float32) for _ in range(3))
    return 3 * size / steady_seconds(lambda: torch.add(b, c, alpha=3.0, out=a), clock, limit_s) / 1e9


def host_copy_gb_s(size: int, device: torch.device, clock: Clock, limit_s: float) -> float | None:
    """Measure copies between the device and pinned memory of its host, the slower direction, 10^9 bytes/s.

    On a CPU both are the host's memory, and what is timed is a plain copy.

    Returns:
        ``None`` where there is no memory for it.
    """
    try:
        on_device = torch.ones(size // 4, device=device, dtype=torch.float32)
        on_host = torch.ones(size // 4, dtype=torch.float32, pin_memory=device.type == "cuda")
        ways = ((on_host, on_device), (on_device, on_host))
        slower = max(
            steady_seconds(partial(to.copy_, source, non_blocking=True), clock, limit_s / 2)
            for to, source in ways
        )
    except (RuntimeError, MemoryError) as problem:
        if not _is_out_of_memory(problem):
            raise
        return None
    return size / slower / 1e9


def _is_out_of_memory(problem: BaseException) -> bool:
    return isinstance(problem, MemoryError) or any(text in str(problem) for text in _NO_MEMORY)
