"""Measures one rank's rates: matrix products, attention, memory bandwidth, copies to the host."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F

from megatron_hexi.probe.clock import Clock, Work, steady_seconds
from megatron_hexi.probe.sizes import WIDENING, Sizes
from megatron_hexi.runtime.kernels import BlockKind, KernelDispatch, Mode

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
        sizes: ascending.
        prepare: makes the tensors of a size, and what is to be timed.
        limit_s: seconds a size; from the first that would take longer, by the rate so far, all are skipped.
        meet: told what comes next, waits for the other ranks: all load the machine at once.
    """
    tflops: list[float | None] = []
    rate, why = 0.0, ""
    for size in sizes:
        meet(f"{name} at {size}")  # also for what is skipped: other ranks may not skip it
        rate_tflops: float | None = None
        if not why and rate and 3 * flops(size) / rate > limit_s:
            why = f"{name} from {size} on: takes too long"
        if not why:
            try:
                rate = flops(size) / steady_seconds(prepare(size), clock, limit_s)
                rate_tflops = rate / 1e12
            except (RuntimeError, MemoryError) as problem:
                if not _is_out_of_memory(problem):
                    raise
                why = f"{name} from {size} on: does not fit in memory"
        tflops.append(rate_tflops)
    return Points(tuple(tflops), why)


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
