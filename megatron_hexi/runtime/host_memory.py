"""Host memory for offloaded tensors, and copies between host and device.

Host memory is an anonymous shared mapping, registered with CUDA on GPUs. torch's own pinned memory is
allocated in powers of two, which wastes up to half of it. A limit on a process's data (`RLIMIT_DATA`) does
not count shared mappings: on the CPU platform, where device and host share memory, the limit applies to the
device only.
"""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor


class HostMemory:
    """The host memory of one rank, with copies to and from the rank's device."""

    def __init__(self, device: torch.device) -> None:
        self._has_streams = device.type == "cuda" and torch.version.cuda is not None
        self._ways: tuple[Any, Any] | None = None
        #: Number of bytes allocated so far; none are freed.
        self.nbytes = 0

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return a tensor of zeros in host memory.

        Raises:
            OSError: there is not enough memory.
            RuntimeError: CUDA cannot register the memory.
        """
        count = torch.Size(shape).numel()
        if not count:
            return torch.empty(tuple(shape), dtype=dtype)
        size = count * dtype.itemsize
        mapped = mmap.mmap(-1, size)  # shared and anonymous: Python's default
        tensor = torch.frombuffer(mapped, dtype=dtype, count=count).view(tuple(shape))
        if self._has_streams:
            cuda: Any = torch.cuda.cudart()
            failed = int(cuda.cudaHostRegister(tensor.data_ptr(), size, 0))
            if failed:
                raise RuntimeError(f"cudaHostRegister: error {failed} for {size} bytes of host memory")
        self.nbytes += size
        return tensor

    def copy_of(self, tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """Return a copy of a tensor in host memory."""
        return self.empty(tensor.shape, dtype or tensor.dtype).copy_(tensor)

    def copy_out(self, target: Tensor, source: Tensor) -> None:
        """Start a copy from the device to host memory; `drain` waits for it.

        Args:
            source: tensor on the device; it may be freed at once.
        """
        with self._way(0) as stream:
            target.copy_(source, non_blocking=stream is not None)
            if stream is not None:
                source.record_stream(stream)

    @contextlib.contextmanager
    def coming_back(self) -> Iterator[None]:
        """Run copies from host memory, and collectives, in parallel with computation inside this context.

        Copies to host memory that were started before finish first. `arrival` waits for copies that were
        started within the context.
        """
        with self._way(1) as stream:
            if stream is not None and self._ways is not None:
                stream.wait_stream(self._ways[0])
            yield

    def copy_back(self, target: Tensor, source: Tensor) -> Arrival:
        """Start a copy from host memory to the device; return its `Arrival`."""
        with self.coming_back():
            target.copy_(source, non_blocking=self._has_streams)
            return self.arrival([target])

    def arrival(self, tensors: Sequence[Tensor]) -> Arrival:
        """Return the `Arrival` of copies to the given tensors, which were started within `coming_back`."""
        if self._ways is None:
            return Arrival(None)
        for tensor in tensors:
            tensor.record_stream(self._ways[1])
        return Arrival(self._ways[1].record_event())

    def drain(self) -> None:
        """Wait until all copies to host memory are done, before the host reads them."""
        if self._ways is not None:
            self._ways[0].synchronize()

    @contextlib.contextmanager
    def _way(self, number: int) -> Iterator[Any]:
        """Enter the stream of a copy direction, after all work of the device so far.

        Yields the stream; ``None`` without streams.
        """
        if not self._has_streams:
            yield None
            return
        if self._ways is None:
            self._ways = torch.cuda.Stream(), torch.cuda.Stream()
        stream = self._ways[number]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            yield stream


class Arrival:
    """A copy from host memory in flight.

    Args:
        event: CUDA event after the copy; ``None``: the copy is done.
    """

    def __init__(self, event: Any) -> None:
        self._event = event

    def wait(self) -> None:
        """Let the device wait for the copy before its next computation."""
        if self._event is not None:
            torch.cuda.current_stream().wait_event(self._event)
            self._event = None
