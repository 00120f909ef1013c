"""The stages of a probe. Every rank runs every stage, and gets the results of all ranks."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from statistics import median

import torch
import torch.distributed as dist

from megatron_hexi.probe import compute
from megatron_hexi.probe.compute import WallClock, Wire, clock_for
from megatron_hexi.probe.device import DTYPES, host_bytes, usable_bytes
from megatron_hexi.probe.document import (
    DIRECTIONS,
    MASKS,
    Between,
    Inside,
    Measurement,
    Options,
    RankInfo,
    Series,
    TransferTimes,
    message_sizes,
    point_limit_s,
    sizes_for,
    transfer_limit_s,
)
from megatron_hexi.probe.nodes import NodeFound
from megatron_hexi.probe.world import World
from megatron_hexi.runtime.kernels import select_kernel


def tournament(players: int) -> list[list[tuple[int, int]]]:
    """Return rounds of disjoint pairs in which every two players meet once.

    The circle method: the first stays, the others move on by one seat each round. With an odd number
    one player sits out each round.

    >>> tournament(4)
    [[(0, 3), (1, 2)], [(0, 2), (1, 3)], [(0, 1), (2, 3)]]
    """
    if players < 2:
        return []
    seats = [*range(players), *([-1] if players % 2 else [])]
    rounds = []
    for _ in range(len(seats) - 1):
        pairs = [(seats[i], seats[-1 - i]) for i in range(len(seats) // 2)]
        rounds.append(sorted((min(a, b), max(a, b)) for a, b in pairs if min(a, b) >= 0))
        seats = [seats[0], seats[-1], *seats[1:-1]]
    return rounds


def flows(senders: range, receivers: range) -> list[tuple[int, int]]:
    """Pair senders with receivers so that all ranks of two nodes take part; the smaller node's repeat.

    >>> flows(range(0, 4), range(4, 6))
    [(0, 4), (1, 5), (2, 4), (3, 5)]
    """
    count = max(len(senders), len(receivers))
    return [(senders[i % len(senders)], receivers[i % len(receivers)]) for i in range(count)]


def local_rounds(nodes: Mapping[int, range]) -> list[list[tuple[int, tuple[int, int]]]]:
    """Return rounds (node, two ranks) in which every two ranks of a node meet once, in all nodes at a time.

    >>> local_rounds({0: range(0, 2), 2: range(4, 7)})
    [[(0, (0, 1)), (2, (5, 6))], [(2, (4, 6))], [(2, (4, 5))]]
    """
    of_nodes = [
        [[(number, (ranks[a], ranks[b])) for a, b in pairs] for pairs in tournament(len(ranks))]
        for number, ranks in nodes.items()
    ]
    return [list(itertools.chain(*rounds)) for rounds in itertools.zip_longest(*of_nodes, fillvalue=())]


#: A stage's name, and what adds its part to the measurement.
Stage = tuple[str, Callable[[Measurement], Measurement]]


class Stages:
    """The stages of a probe, bound to this rank."""

    def __init__(
        self,
        world: World,
        options: Options,
        device: torch.device,
        info: RankInfo,
        nodes: Sequence[NodeFound],
        host_ranks: int,
    ) -> None:
        self.world, self.options, self.device, self.info = world, options, device, info
        self.nodes, self.host_ranks = nodes, host_ranks
        self.sizes = sizes_for(options, info.kind)
        self.limit_s = point_limit_s(options, self.sizes)
        self.dtype = DTYPES[options.precision]
        self.clock = clock_for(device)
        self.progress: Callable[[str], None] = lambda what: None
        self.node = next(n for n, node in enumerate(nodes) if world.rank in node.ranks)

    def all(self) -> list[Stage]:
        """Return the stages by name, in order: free memory is read before anything is allocated."""
        stages: list[Stage] = [
            ("memory", self._memory),
            ("memory bandwidth", self._stream),
            ("host memory", self._host),
            ("matrix products", self._matmul),
        ]
        stages += [
            (f"attention {name}", partial(self._attention, number))
            for number, name in enumerate(self.options.kernels)
        ]
        if any(len(node.ranks) > 1 for node in self.nodes):
            stages.append(("links inside nodes", self._inside))
        if len(self.nodes) > 1:
            stages.append(("links between nodes", self._between))
            stages.append(("all nodes at once", self._together))
        return stages

    def _memory(self, so_far: Measurement) -> Measurement:
        usable = self.world.gather(usable_bytes(self.device, self.host_ranks))
        return replace(so_far, usable_bytes=tuple(usable))

    def _stream(self, so_far: Measurement) -> Measurement:
        self.world.meet()
        size = min(self.sizes.stream_bytes, so_far.usable_bytes[self.world.rank] // 8)
        own = compute.stream_gb_s(size, self.device, self.clock, self.limit_s)
        return replace(so_far, stream_gb_s=tuple(self.world.gather(own)))

    def _host(self, so_far: Measurement) -> Measurement:
        free = self.world.gather(host_bytes(self.host_ranks))
        self.world.meet()  # all GPUs of a node copy at once, as in training
        size = min(self.sizes.stream_bytes, so_far.usable_bytes[self.world.rank] // 8, min(free) // 8)
        copied = compute.host_copy_gb_s(size, self.device, self.clock, self.limit_s)
        self.world.meet()
        size = min(size, self.sizes.host_stream_bytes)
        stream = compute.stream_gb_s(size, torch.device("cpu"), WallClock(), self.limit_s)
        return replace(
            so_far,
            host_bytes=tuple(free),
            host_gb_s=tuple(self.world.gather(copied)),
            host_stream_gb_s=tuple(self.world.gather(stream)),
        )

    def _matmul(self, so_far: Measurement) -> Measurement:
        prepare = compute.matmul(self.sizes, self.device, self.dtype)
        return self._curve(so_far, "matmul", self.sizes.rows, self.sizes.matmul_flops, prepare)

    def _attention(self, number: int, so_far: Measurement) -> Measurement:
        name = self.info.kernels[number]
        kernel = select_kernel(name, self.device, self.dtype, self.options.head_dim)
        attention = partial(compute.attention, kernel, self.sizes, self.device, self.dtype)
        for mask, direction in itertools.product(MASKS, DIRECTIONS):
            flops = partial(self.sizes.attention_flops, mask, direction)
            prepare = attention(causal=mask == "causal", backward=direction == "backward")
            so_far = self._curve(so_far, f"{name} {mask} {direction}", self.sizes.tokens, flops, prepare)
        return so_far

    def _curve(
        self,
        so_far: Measurement,
        name: str,
        sizes: tuple[int, ...],
        flops: Callable[[int], float],
        prepare: Callable[[int], compute.Work],
    ) -> Measurement:
        """Measure a curve on every rank; if `auto` chose different kernels, add a curve for each of them."""
        points = compute.measure_points(name, sizes, flops, prepare, self.clock, self.limit_s, self._meet)
        gathered = self.world.gather([name, points.tflops, points.skipped])
        curves = dict(so_far.curves)
        for rank, (curve, tflops, _) in enumerate(gathered):
            rows = list(curves[curve].tflops) if curve in curves else [(None,) * len(sizes)] * len(gathered)
            rows[rank] = tuple(tflops)
            curves[curve] = Series(sizes, tuple(rows))
        reasons = sorted({why for _, _, why in gathered if why} - set(so_far.skipped))
        return replace(so_far, curves=curves, skipped=(*so_far.skipped, *reasons))

    def _meet(self, what: str) -> None:
        self.progress(what)
        self.world.meet()

    def _wire(self, so_far: Measurement, *, sweeps: int, peers: int) -> Wire:
        return Wire(
            self.world,
            self.device,
            self._group,
            message_sizes(self.sizes, min(so_far.usable_bytes), peers),
            transfer_limit_s(self.options, sweeps),
        )

    @cached_property
    def _group(self) -> dist.ProcessGroup:
        group = self.world.data_group(self.device)
        # NCCL connects all ranks at their first collective; messages in pairs need that behind them.
        everyone = range(self.world.size)
        Wire(self.world, self.device, group, (1,), 0.0).all_to_all(everyone, [everyone])
        return group

    def _inside(self, so_far: Measurement) -> Measurement:
        inner = [n for n, node in enumerate(self.nodes) if len(node.ranks) > 1]
        lanes = [self.nodes[n].ranks for n in inner]
        most = max(len(lane) for lane in lanes)
        wire = self._wire(so_far, sweeps=most + 1, peers=most - 1)
        every = [(a, b) for lane in lanes for a in lane for b in lane if a != b]
        ports = wire.exchange(every, lanes)
        own = [rank for rank in self.nodes[self.node].ranks if rank != self.world.rank]
        collective = wire.all_to_all(own, lanes)
        latencies: dict[int, list[float]] = {n: [] for n in inner}
        straight: dict[int, list[TransferTimes]] = {n: [] for n in inner}
        for pairs in local_rounds({n: self.nodes[n].ranks for n in inner}):
            ranks = [pair for _, pair in pairs]
            both = [*ranks, *((b, a) for a, b in ranks)]
            found = zip(pairs, wire.exchange(both, ranks), wire.latencies(ranks), strict=True)
            for (n, _), transfer, latency in found:
                straight[n].append(transfer)
                latencies[n].append(latency)
        inside = []
        for n, lane, port, whole in zip(inner, lanes, ports, collective, strict=True):
            port, whole = _times(port, len(lane) - 1), _times(whole, len(lane) - 1)
            inside.append(Inside(n, port, whole, _median_transfer(straight[n]), median(latencies[n])))
        return replace(so_far, inside=tuple(inside))

    def _between(self, so_far: Measurement) -> Measurement:
        rounds = tournament(len(self.nodes))
        most = max(len(node.ranks) for node in self.nodes)  # a lone rank of the other node sends to all
        wire = self._wire(so_far, sweeps=2 * len(rounds) + 2, peers=most)
        found: list[Between] = []
        for number, pairs in enumerate(rounds):
            self.progress(f"links between nodes, round {number + 1} of {len(rounds)}")
            latencies = wire.latencies([(self.nodes[a].ranks[0], self.nodes[b].ranks[0]) for a, b in pairs])
            for directed in (pairs, [(b, a) for a, b in pairs]):
                lanes = [(*self.nodes[a].ranks, *self.nodes[b].ranks) for a, b in directed]
                crossing = [flows(self.nodes[a].ranks, self.nodes[b].ranks) for a, b in directed]
                every = wire.exchange([flow for lane in crossing for flow in lane], lanes)
                # Whether GPUs share their node's link shows in one round.
                first = [lane[0] for lane in crossing]
                single: Sequence[TransferTimes | None] = (
                    wire.exchange(first, first) if number == 0 else [None] * len(first)
                )
                results = zip(directed, crossing, every, single, latencies, strict=True)
                found += [
                    Between(a, b, _times(transfer, len(lane)), one, latency)
                    for (a, b), lane, transfer, one, latency in results
                ]
        return replace(so_far, between=tuple(sorted(found, key=lambda pair: (pair.src, pair.dst))))

    def _together(self, so_far: Measurement) -> Measurement:
        everyone = range(self.world.size)
        node_of = [n for n, node in enumerate(self.nodes) for _ in node.ranks]
        crossing = [(a, b) for a in everyone for b in everyone if node_of[a] != node_of[b]]
        wire = self._wire(so_far, sweeps=4, peers=self.world.size)
        return replace(so_far, together=wire.exchange(crossing, [everyone])[0])


def _times(transfer: TransferTimes, count: int) -> TransferTimes:
    """Return a transfer of `count` messages at once, by their total bytes."""
    return replace(transfer, sizes=tuple(size * count for size in transfer.sizes))


def _median_transfer(transfers: Sequence[TransferTimes]) -> TransferTimes:
    """Return the median time of each size that all transfers have."""
    count = min(len(transfer.sizes) for transfer in transfers)
    columns = zip(*(transfer.seconds[:count] for transfer in transfers), strict=True)
    return TransferTimes(transfers[0].sizes[:count], tuple(median(column) for column in columns))
