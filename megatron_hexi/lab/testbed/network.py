"""Builds the links of a cluster file from namespaces, veth pairs, bridges and token buckets.

    rank --[its port]-- bridge of its node --[the node's link]-- bridge of the switch -- other nodes

Each rank and each node has a namespace. A token bucket (htb) at either end of a veth pair caps one direction:
a rank's port at the file's `intra`, a node's link at its `network`.

Links are measured by plain TCP between ranks, all nodes at once, as gloo would send.
"""

from __future__ import annotations

import math
import socket
import statistics
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from megatron_hexi.cluster import Cluster
from megatron_hexi.lab.testbed.isolation import prepare, run, within

#: An Ethernet frame of 1514 bytes carries 1448 of a TCP stream (headers: 14 Ethernet, 20 IP, 32 TCP with
#: timestamps). The file says what is achieved, the bucket counts frames.
FRAME_SHARE = 1514 / 1448
#: A large segment passes the bucket whole: it must not be larger than the burst.
_SEGMENT_BYTES = 16384
_BURST_BYTES = 20_000
#: What a connection may have on its way: more than a round trip holds, so that it fills its link also where a
#: busy core answers late. It waits in the bucket's queue, where nothing is dropped.
_WINDOW_S = 10e-3
_WINDOW_LEAST_BYTES = 64_000
_QUEUE_BYTES = 64_000_000
_SEGMENT_PAYLOAD = 1448
_SYSCTL = Path("/proc/sys/net")
_SWITCH = "switch"


def node_namespace(node: int) -> str:
    """Return the name of the namespace of a node's torchrun."""
    return f"node-{node}"


def rank_namespace(rank: int) -> str:
    """Return the name of a rank's namespace."""
    return f"rank-{rank}"


def node_address(node: int) -> str:
    """Return the IPv4 address of a node's bridge; the addresses of its ranks follow it."""
    return f"10.77.{node}.1"


def rank_address(cluster: Cluster, rank: int) -> str:
    """Return the IPv4 address of a rank's port."""
    place = cluster.ranks[rank]
    return f"10.77.{place.node}.{place.local + 2}"


def build_network(cluster: Cluster) -> None:
    """Make all namespaces and links, in a lab that has none yet."""
    prepare()
    _add_namespace(_SWITCH)
    _add_bridge(_SWITCH)
    for number, node in enumerate(cluster.nodes):
        name = node_namespace(number)
        _add_namespace(name)
        _add_bridge(name)
        run("ip", "-n", name, "addr", "add", f"{node_address(number)}/16", "dev", "bridge")
        _add_cable((name, "uplink"), (_SWITCH, f"node{number}"))
        _join_bridge(name, "uplink")
        _join_bridge(_SWITCH, f"node{number}")
        if node.cards is not None:
            _cap(name, "uplink", node.cards.bandwidth)
            _cap(_SWITCH, f"node{number}", node.cards.bandwidth)
        for rank in node.ranks:
            _add_rank(cluster, rank)
            if len(node.ranks) > 1:
                _cap(rank_namespace(rank), "eth0", node.bandwidth)
                _cap(name, f"rank{rank}", node.bandwidth)


def raise_loopback() -> None:
    """Bring up the loopback interface of the lab's namespace, which all ranks share without links."""
    run("ip", "link", "set", "lo", "up")


def _add_rank(cluster: Cluster, rank: int) -> None:
    name, host = rank_namespace(rank), node_namespace(cluster.ranks[rank].node)
    address = rank_address(cluster, rank)
    _add_namespace(name)
    _add_cable((name, "eth0"), (host, f"rank{rank}"))
    _join_bridge(host, f"rank{rank}")
    ip = ("ip", "-n", name)
    run(*ip, "link", "set", "eth0", "gso_max_size", str(_SEGMENT_BYTES))
    run(*ip, "addr", "add", f"{address}/16", "dev", "eth0")
    run(*ip, "link", "set", "eth0", "up")
    owner = cluster.nodes[cluster.ranks[rank].node]
    inside, outside = owner.bandwidth, owner.cards.bandwidth if owner.cards else owner.bandwidth
    node = f"10.77.{cluster.ranks[rank].node}.0/24"
    for change, subnet, bandwidth in (("change", "10.77.0.0/16", outside), ("add", node, inside)):
        route = (subnet, "dev", "eth0", "proto", "kernel", "scope", "link", "src", address)
        window = str(_window(bandwidth))
        run(*ip, "route", change, *route, "initcwnd", window, "cwnd", "lock", window)


def _window(bandwidth: float) -> int:
    """Return the number of segments that a connection may have in flight."""
    return math.ceil(max(_WINDOW_LEAST_BYTES, bandwidth * _WINDOW_S) / _SEGMENT_PAYLOAD)


def _add_namespace(name: str) -> None:
    run("ip", "netns", "add", name)
    run("ip", "-n", name, "link", "set", "lo", "up")
    within(name, _set_protocol)


def _set_protocol() -> None:
    # Steady rates: the newer algorithms probe for bandwidth, and their messages differ by 10 % and more.
    (_SYSCTL / "ipv4/tcp_congestion_control").write_text("reno")
    # A connection starts with its whole window, after a pause and after another's loss too.
    (_SYSCTL / "ipv4/tcp_slow_start_after_idle").write_text("0")
    (_SYSCTL / "ipv4/tcp_no_metrics_save").write_text("1")
    for which in ("all", "default"):  # an address that nobody uses would be announced on every link
        switch = _SYSCTL / f"ipv6/conf/{which}/disable_ipv6"
        if switch.exists():
            switch.write_text("1")


def _add_bridge(name: str) -> None:
    run("ip", "-n", name, "link", "add", "bridge", "type", "bridge")
    run("ip", "-n", name, "link", "set", "bridge", "up")


def _add_cable(a: tuple[str, str], b: tuple[str, str]) -> None:
    run("ip", "-n", a[0], "link", "add", a[1], "type", "veth", "peer", "name", b[1], "netns", b[0])


def _join_bridge(name: str, port: str) -> None:
    run("ip", "-n", name, "link", "set", port, "master", "bridge", "up")


def _cap(name: str, port: str, bandwidth: float) -> None:
    """Cap what leaves through a port at a bandwidth, bytes/s of a TCP stream.

    Acknowledgements pass the data that waits. Behind it, two streams that cross would empty each other's
    queue in turns and reach 75 to 80 % of the link (Zhang, Shenker and Clark, SIGCOMM 1991), which network
    cards do not show.
    """
    rate, tc = f"{round(bandwidth * FRAME_SHARE * 8)}bit", ("tc", "-n", name)
    burst = ("burst", str(_BURST_BYTES), "cburst", str(_BURST_BYTES), "quantum", str(_BURST_BYTES))
    run(*tc, "qdisc", "add", "dev", port, "root", "handle", "1:", "htb", "default", "20")
    run(*tc, "class", "add", "dev", port, "parent", "1:", "classid", "1:1", "htb", "rate", rate, *burst)
    for which, part, priority in (("1:10", 0.05, "0"), ("1:20", 0.95, "1")):
        least = f"{round(bandwidth * FRAME_SHARE * 8 * part)}bit"
        limits = ("rate", least, "ceil", rate, "prio", priority, *burst)
        run(*tc, "class", "add", "dev", port, "parent", "1:1", "classid", which, "htb", *limits)
        run(*tc, "qdisc", "add", "dev", port, "parent", which, "bfifo", "limit", str(_QUEUE_BYTES))
    small = ("u32", "match", "u16", "0", "0xff80", "at", "2")  # IP packets of less than 128 bytes
    on_root = ("parent", "1:", "protocol", "ip", "prio", "1")
    run(*tc, "filter", "add", "dev", port, *on_root, *small, "flowid", "1:10")


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
    rounds += [list(zip(first, first[step:] + first[:step], strict=True)) for step in range(1, len(first))]
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
