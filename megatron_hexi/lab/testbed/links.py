"""Measures the lab's links: plain TCP between ranks, all nodes at once, as gloo would send."""

from __future__ import annotations

import socket
import statistics
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from megatron_hexi.cluster import Cluster
from megatron_hexi.lab.testbed.isolation import within
from megatron_hexi.lab.testbed.network import rank_address, rank_namespace

#: A message takes about so long: many times the burst, the start of a stream, and the slip of a busy core.
_SECONDS = 1.0
#: Of the message; before it the stream still starts.
_WARM = 0.2
_ROUND_TRIPS = 20
_CHUNK = 1 << 18
_TIMEOUT_S = 60.0


@dataclass(frozen=True)
class LinkMeasured:
    """A measurement of the link between two ranks, in one direction.

    Args:
        tier: ``node`` inside a node, ``network`` between nodes.
        asked_gb_s: bandwidth by the file, 10^9 bytes/s.
        measured_gb_s: measured bandwidth, of a message that takes a second.
        file_latency_us: latency by the file; it is not emulated.
        measured_latency_us: half a round trip of one byte.
    """

    source: int
    target: int
    tier: str
    asked_gb_s: float
    measured_gb_s: float
    file_latency_us: float
    measured_latency_us: float

    @property
    def error(self) -> float:
        """Error of the bandwidth, relative to the file's."""
        return self.measured_gb_s / self.asked_gb_s - 1


def measure_links(cluster: Cluster) -> list[LinkMeasured]:
    """Measure between the first ranks of every two nodes, both ways, and inside each node.

    In round s every node n sends to node n + s: each link carries one message out and one in.
    """
    first = [node.ranks[0] for node in cluster.nodes]
    inside = [node.ranks[:2] for node in cluster.nodes if len(node.ranks) > 1]
    rounds = [[(a, b) for a, b in inside], [(b, a) for a, b in inside]] if inside else []
    for step in range(1, len(first)):
        rounds.append([(rank, first[(n + step) % len(first)]) for n, rank in enumerate(first)])
    return [measurement for pairs in rounds for measurement in _measure_round(cluster, pairs)]


def _measure_round(cluster: Cluster, pairs: Sequence[tuple[int, int]]) -> list[LinkMeasured]:
    quiet = threading.Barrier(len(pairs), timeout=_TIMEOUT_S)  # no message while round trips are timed
    with ThreadPoolExecutor(len(pairs)) as threads:
        return list(threads.map(lambda pair: _measure(cluster, pair[0], pair[1], quiet), pairs))


def _measure(cluster: Cluster, source: int, target: int, quiet: threading.Barrier) -> LinkMeasured:
    bandwidth = cluster.bandwidth(source, target)
    size = max(4 * _CHUNK, round(bandwidth * _SECONDS))
    address = rank_address(cluster, target)
    server = within(rank_namespace(target), lambda: socket.create_server((address, 0)))
    with server, ThreadPoolExecutor(1) as sender:
        server.settimeout(_TIMEOUT_S)
        sending = sender.submit(
            within, rank_namespace(source), lambda: _send(server.getsockname(), size, quiet)
        )
        connection, _ = server.accept()
        with connection:
            rate = _receive(connection, size)
        latency = sending.result()
    return LinkMeasured(
        source,
        target,
        "node" if cluster.ranks[source].node == cluster.ranks[target].node else "network",
        bandwidth / 1e9,
        rate / 1e9,
        cluster.route(source, target).latency_s * 1e6,
        latency * 1e6,
    )


def _send(address: tuple[str, int], size: int, quiet: threading.Barrier) -> float:
    """Send: round trips of a byte, then the message. Return half the median of the round trips, s."""
    trips = []
    with socket.create_connection(address, timeout=_TIMEOUT_S) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for _ in range(_ROUND_TRIPS):
            begin = time.perf_counter()
            connection.sendall(b"?")
            connection.recv(1)
            trips.append(time.perf_counter() - begin)
        quiet.wait()
        connection.sendall(bytes(size))
        connection.recv(1)
    return statistics.median(trips) / 2


def _receive(connection: socket.socket, size: int) -> float:
    """Receive what `_send` sends. Return bytes/s once the stream has started."""
    connection.settimeout(_TIMEOUT_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for _ in range(_ROUND_TRIPS):
        connection.recv(1)
        connection.sendall(b"!")
    buffer, got, warm_at, warm_bytes = bytearray(_CHUNK), 0, 0.0, 0
    while got < size:
        count = connection.recv_into(buffer)
        if count == 0:
            raise ConnectionError("the sender closed its end")
        got += count
        if not warm_bytes and got >= _WARM * size:
            warm_at, warm_bytes = time.perf_counter(), got
    rate = (got - warm_bytes) / (time.perf_counter() - warm_at)
    connection.sendall(b"!")
    return rate
