"""The device's memory as a limit on what a rank may allocate."""

from __future__ import annotations

import resource
from pathlib import Path

from megatron_hexi.cluster import Device

_GIB = 2**30


def limit_memory(device: Device) -> int:
    """Limit this process to the device's memory, on top of what it already uses.

    Call it when torch is imported, and before the job: code and libraries lie outside a device's memory.

    Returns:
        The limit (``RLIMIT_DATA``), bytes.
    """
    limit = _data_bytes() + round(device.usable_gib * _GIB)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    return limit


def is_out_of_memory(problem: BaseException) -> bool:
    """Return whether an exception is a failed allocation. torch raises a plain RuntimeError on the CPU."""
    return isinstance(problem, MemoryError) or "can't allocate memory" in str(problem)


def _data_bytes() -> int:
    """Return the private writable memory of this process, bytes, as `RLIMIT_DATA` counts it."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmData:"))
