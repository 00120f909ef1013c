"""Stores, on the device or in host memory, for rows of micro-batches that wait between two ministages."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from megatron_hexi.runtime.host_memory import Arrival, HostMemory

#: Key of stored rows: number of the ministage and number of the micro-batch.
Where = tuple[int, int]


class RowStore(Protocol):
    """A store of rows by ministage and micro-batch."""

    def put(self, where: Where, rows: Tensor) -> None:
        """Store rows; the caller may free them, and must not write to them."""

    def get(self, where: Where, following: Where | None) -> Tensor:
        """Return stored rows, which stay in the store.

        Args:
            following: key of the rows that are needed next; ``None``: none are.
        """

    def pop(self, where: Where, following: Where | None) -> Tensor:
        """Return stored rows and remove them from the store; arguments are those of `get`."""


class DeviceRows:
    """A store of rows on the device."""

    def __init__(self) -> None:
        self._kept: dict[Where, Tensor] = {}

    def put(self, where: Where, rows: Tensor) -> None:
        """Store rows under a key. See `RowStore.put`."""
        self._kept[where] = rows.detach()

    def get(self, where: Where, following: Where | None) -> Tensor:
        """Return stored rows, which stay in the store. See `RowStore.get`."""
        return self._kept[where]

    def pop(self, where: Where, following: Where | None) -> Tensor:
        """Return stored rows and remove them from the store. See `RowStore.pop`."""
        return self._kept.pop(where)


class HostRows:
    """A store of rows in host memory; only rows in use and rows needed next are on the device.

    Args:
        host: host memory of this rank, whose allocations are reused in every iteration.
    """

    def __init__(self, host: HostMemory) -> None:
        self._host = host
        self._memory: dict[Where, Tensor] = {}
        self._coming: dict[Where, tuple[Tensor, Arrival]] = {}

    def put(self, where: Where, rows: Tensor) -> None:
        """Store rows under a key. See `RowStore.put`."""
        rows = rows.detach()
        kept = self._memory.get(where)
        if kept is None or kept.shape != rows.shape or kept.dtype != rows.dtype:
            kept = self._memory[where] = self._host.empty(rows.shape, rows.dtype)
        self._host.copy_out(kept, rows)
        self._device = rows.device

    def get(self, where: Where, following: Where | None) -> Tensor:
        """Return stored rows, which stay in the store. See `RowStore.get`."""
        rows, arrival = self._coming.pop(where) if where in self._coming else self._bring(where)
        if following is not None:
            self._coming[following] = self._bring(following)
        arrival.wait()
        return rows

    def pop(self, where: Where, following: Where | None) -> Tensor:
        """Return stored rows and remove them from the store. See `RowStore.pop`."""
        return self.get(where, following)

    def _bring(self, where: Where) -> tuple[Tensor, Arrival]:
        kept = self._memory[where]
        rows = kept.new_empty(kept.shape, device=self._device)
        return rows, self._host.copy_back(rows, kept)
