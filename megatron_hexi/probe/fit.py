"""Bandwidth from the times of several sizes."""

from __future__ import annotations

from statistics import fmean

from megatron_hexi.probe.document import TransferTimes

#: The largest sizes are used: small ones tell of latency, buffers and bursts.
_LARGEST = 3


def bytes_per_second(transfer: TransferTimes) -> float:
    """Return the slope of seconds = alpha + bytes / bandwidth, by least squares over the three largest sizes.

    Where the line does not rise (one size, or noise alone): the plateau, the largest size over its time.
    """
    sizes = transfer.sizes[-_LARGEST:]
    seconds = transfer.seconds[-_LARGEST:]
    mean_size, mean_time = fmean(sizes), fmean(seconds)
    rise = sum((n - mean_size) * (t - mean_time) for n, t in zip(sizes, seconds, strict=True))
    run = sum((n - mean_size) ** 2 for n in sizes)
    if rise > 0 and run > 0:
        return run / rise
    return sizes[-1] / max(seconds[-1], 1e-9)
