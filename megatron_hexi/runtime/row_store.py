"""Rows of micro-batches that wait between two ministages: on the device, or in host memory."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from megatron_hexi.runtime.host_memory import Arrival, HostMemory

#: A ministage and a micro-batch.
Where = tuple[int, int]


class RowStore(Protocol):
    """What waits, by the ministage that it is for and the micro-batch."""

    def put(self, where: Where, rows: Tensor) -> None:
        """Keep rows; they may be given back, and must not be written to."""

    def get(self, where: Where, following: Where | None) -> Tensor:
        """Kept rows, which stay.

        Args:
            where: of the rows.
            following: of those that are asked for next; ``None``: none are.
        """

    def pop(self, where: Where, following: Where | None) -> Tensor:
        """The same of rows that are not asked for again, unless others are put in their place."""


class DeviceRows:
    """A store on the device."""

    def __init__(self) -> None:
        self._kept: dict[Where, Tensor] = {}

    def put(self, where: Where, rows: Tensor) -> None:
        """As of `RowStore`."""
        self._kept[where] = rows.detach()

    def get(self, where: Where, following: Where | None) -> Tensor:
        """As of `RowStore`."""
        return self._kept[where]

    def pop(self, where: Where, following: Where | None) -> Tensor:
        """As of `RowStore`."""
        return self._kept.pop(where)


class HostRows:
    """A store in host memory: the device has the rows asked for, and those that are asked for next.

    Args:
        host: the rank's host memory. What is taken of it serves again from iteration to iteration.
    """

    def __init__(self, host: HostMemory) -> None:
        self._host = host
        self._memory: dict[Where, Tensor] = {}
        self._coming: dict[Where, tuple[Tensor, Arrival]] = {}

    def put(self, where: Where, rows: Tensor) -> None:
        """As of `RowStore`."""
        rows = rows.detach()
        kept = self._memory.get(where)
        if kept is None or kept.shape != rows.shape or kept.dtype != rows.dtype:
            kept = self._memory[where] = self._host.empty(rows.shape, rows.dtype)
        self._host.copy_out(kept, rows)
        self._device = rows.device

    def get(self, where: Where, following: Where | None) -> Tensor:
        """As of `RowStore`."""
        rows, arrival = self._coming.pop(where) if where in self._coming else self._bring(where)
        if following is not None:
            self._coming[following] = self._bring(following)
        arrival.wait()
        return rows

    def pop(self, where: Where, following: Where | None) -> Tensor:
        """As of `RowStore`."""
        return self.get(where, following)

    def _bring(self, where: Where) -> tuple[Tensor, Arrival]:
        kept = self._memory[where]
        rows = kept.new_empty(kept.shape, device=self._device)
        return rows, self._host.copy_back(rows, kept)
