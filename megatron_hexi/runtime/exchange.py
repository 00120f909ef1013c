"""The exchange of keys and values between groups, and the return of their gradients, part by part.

Every message is sent directly from the owner of keys and values to a user. The program (`plan.program`)
defines when parts are posted and waited for.

Key and value of a head are adjacent: a buffer is [K, B, G, Dk + Dv], so that the KV heads that one owner
sends are contiguous in it.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from operator import methodcaller

import torch.distributed as dist
from torch import Tensor

from megatron_hexi.plan.model import Range
from megatron_hexi.plan.schedule import Part, Schedule, Transfer
from megatron_hexi.runtime.call_rows import rows_of
from megatron_hexi.runtime.compiled import BufferPlace, Recorder, Value
from megatron_hexi.runtime.sums import RowSum
from megatron_hexi.runtime.wire import Message, Transfers, post


class KVExchange:
    """The exchange of keys and values on one rank: sends to their users, and receives from other owners.

    Args:
        key: keys that the rank owns, [B, k, G, Dk].
        value: values that the rank owns, [B, k, G, Dv].
    """

    def __init__(
        self, recorder: Recorder, key: Value, value: Value, schedule: Schedule, group: dist.ProcessGroup
    ) -> None:
        self._recorder = recorder
        self._key, self._value = key, value
        self._buffers: dict[tuple[Range, ...], Value] = {}
        self._schedule = schedule
        self._group = group
        self._under_way: dict[int, tuple[Value | None, Value]] = {}

    def post(self, part: Part) -> None:
        """Start the messages of a part; all ranks post parts in the order of their numbers."""
        received = self.buffer(part.kv, part.keys) if part.receives else None
        receives = [_heads(received, transfer, part.kv) for transfer in part.receives]
        sends = [
            _heads(self._rows(transfer.rows), transfer, self._schedule.own_kv) for transfer in part.sends
        ]
        transfers = self.start(part.receives, receives, part.sends, sends, tag=2 * part.number)
        self._under_way[part.number] = received, transfers

    def wait(self, part: Part) -> Value | None:
        """Wait for a part; return its keys and values [k, B, S, Dk + Dv], ``None`` if the rank uses none."""
        received, transfers = self._under_way.pop(part.number)
        self._recorder.do(methodcaller("wait"), transfers)
        return received

    def start(
        self,
        sources: Sequence[Transfer],
        receives: Sequence[Value],
        targets: Sequence[Transfer],
        sends: Sequence[Value],
        tag: int,
    ) -> Value:
        """Record the start of a batch of messages; return the value that holds its `Transfers`."""
        come, go = ([transfer.peer for transfer in transfers] for transfers in (sources, targets))
        return self._recorder.make(partial(_post, come, go, self._group, tag), (), *receives, *sends)

    def buffer(self, kv: Range, keys: int) -> Value:
        """Return a buffer for keys and values of some KV heads, in the layout of messages."""
        batch, width = self._key.shape[0], self._key.shape[3] + self._value.shape[3]
        return self._recorder.empty(kv[1] - kv[0], batch, keys, width)

    def apart(self, buffer: Value, *, are_read: bool = False) -> tuple[Value, Value]:
        """Return views of keys and of values, or of their gradients, in a buffer, [B, k, S, D] each."""
        (heads, batch, keys, width), size = buffer.shape, self._key.shape[3]
        strides = keys * width, batch * keys * width, width, 1
        places = [
            BufferPlace((batch, heads, keys, columns), strides, offset)
            for columns, offset in ((size, 0), (width - size, size))
        ]
        key, value = self._recorder.views(buffer, places, are_read=are_read)
        return key, value

    def _rows(self, ranges: tuple[Range, ...]) -> Value:
        """Return a buffer with the rank's keys and values of some tokens; cached by the tokens' ranges."""
        if ranges not in self._buffers:
            recorder, rows = self._recorder, rows_of(ranges, self._recorder.device)
            buffer = self.buffer(self._schedule.own_kv, sum(stop - start for start, stop in ranges))
            copy = partial(recorder.fused.copy_rows, rows)
            for target, source in zip(self.apart(buffer), (self._key, self._value), strict=True):
                recorder.do(copy, target, source)
            self._buffers[ranges] = buffer
        return self._buffers[ranges]


class GradientReturn:
    """The return of gradients of keys and values to their owners, on one rank.

    The rank sends gradients of keys and values that it received, and sums gradients of those that it owns.

    Args:
        keys: sum of the gradients of the rank's keys; complete when all parts have been waited for.
        values: sum of the gradients of the rank's values; complete when all parts have been waited for.
    """

    def __init__(
        self, recorder: Recorder, keys: RowSum, values: RowSum, exchange: KVExchange, schedule: Schedule
    ) -> None:
        self._recorder = recorder
        self._sums = keys, values
        self._exchange = exchange
        self._schedule = schedule
        self._under_way: dict[int, tuple[list[Value], Value]] = {}

    def post(self, part: Part, gradient: Value | None) -> None:
        """Start the return of a part's gradients.

        Args:
            gradient: gradients of the keys and values that the rank received in this part,
                [k, B, S, Dk + Dv]; ``None`` if it received none.
        """
        arriving = [self._exchange.buffer(sent.kv, sent.keys) for sent in part.sends]
        leaving = [_heads(gradient, received, part.kv) for received in part.receives]
        transfers = self._exchange.start(
            part.sends, arriving, part.receives, leaving, tag=2 * part.number + 1
        )
        self._under_way[part.number] = arriving, transfers

    def wait(self, part: Part) -> None:
        """Wait for the returned gradients of a part, and add them to `keys` and `values`."""
        arriving, transfers = self._under_way.pop(part.number)
        self._recorder.do(methodcaller("wait"), transfers)
        first = self._schedule.own_kv[0]
        for sent, buffer in zip(part.sends, arriving, strict=True):
            heads, rows = (sent.kv[0] - first, sent.kv[1] - first), rows_of(sent.rows, self._recorder.device)
            for total, gradient in zip(self._sums, self._exchange.apart(buffer), strict=True):
                total.add(heads, rows, gradient)


def _heads(buffer: Value | None, transfer: Transfer, held: Range) -> Value:
    """Return the slice of a buffer with the KV heads of a transfer; `held` are the buffer's KV heads."""
    assert buffer is not None
    return buffer.cut((transfer.kv[0] - held[0], transfer.kv[1] - held[0]))


def _post(
    sources: Sequence[int], targets: Sequence[int], group: dist.ProcessGroup, tag: int, *tensors: Tensor
) -> Transfers:
    receives = list(map(Message, sources, tensors))
    return post(receives, list(map(Message, targets, tensors[len(sources) :])), group, tag=tag)
