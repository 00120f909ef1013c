"""Measures messages: inside nodes, between nodes, and all at once.

Every rank calls the same functions in the same order. A *lane* is a set of ranks whose messages are measured
together while those of other lanes are in flight: a node, or two nodes that send to each other.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

import torch
import torch.distributed as dist

from megatron_hexi.probe.document import TransferTimes
from megatron_hexi.probe.world import World
from megatron_hexi.runtime.wire import Message, all_to_all, post

#: Messages there and back.
_ROUND_TRIPS = 40
#: Times that each size is sent, after one more to warm up.
_REPEATS = 3
_TAG = 7


@dataclass(frozen=True)
class Wire:
    """Sends test messages from a rank.

    Args:
        sizes: bytes of messages, ascending.
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
