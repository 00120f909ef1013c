"""The entrance of a server of an elastic job: where it listens, and how many may stand there unproven."""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import socket
import threading
import time
from collections.abc import Callable, Iterator

from megatron_hexi.elastic import say

#: The most connections that have not proved the secret: in all, and of one network (/24, or /64 of IPv6).
_MOST, _MOST_OF_NETWORK = 1024, 256
#: Seconds between two lines about refused connections.
_SAY_S = 60.0
#: Connections that may wait to be accepted.
BACKLOG = 1024


class Entrance:
    """Limits and logs connections to a server from peers that have not proved the secret yet.

    Where there are too many, the oldest of the network with the most is closed: nodes prove the secret at
    once, so a flood closes its own.
    """

    def __init__(self, server: str) -> None:
        self._server, self._lock = server, threading.Lock()
        #: How to close each connection, from the oldest on, by network.
        self._pending: dict[str, dict[object, Callable[[], object]]] = {}
        self._said_at = -_SAY_S

    @contextlib.contextmanager
    def one(self, address: str, close: Callable[[], object]) -> Iterator[None]:
        """Let a peer prove the secret; a context that ends with the proof.

        Args:
            close: closes the connection; called in any thread that serves another one.
        """
        network, key = _network(address), object()
        with self._lock:
            self._pending.setdefault(network, {})[key] = close
            self._make_room(network)
        try:
            yield
        except (OSError, EOFError) as problem:
            self._say(address, str(problem)[:100] or type(problem).__name__)
            raise
        finally:
            with self._lock:
                self._pending.get(network, {}).pop(key, None)
                if not self._pending.get(network, True):
                    del self._pending[network]

    def _make_room(self, network: str) -> None:
        if len(self._pending[network]) <= _MOST_OF_NETWORK:
            if sum(map(len, self._pending.values())) <= _MOST:
                return
            network = max(self._pending, key=lambda each: len(self._pending[each]))
        oldest = next(iter(self._pending[network]))
        self._say(network, "too many connections that prove nothing")
        with contextlib.suppress(OSError):
            self._pending[network].pop(oldest)()

    def _say(self, peer: str, reason: str) -> None:
        if time.monotonic() - self._said_at > _SAY_S:
            self._said_at = time.monotonic()
            say(f"{self._server} refused {peer} ({reason})")


def _network(address: str) -> str:
    """Return the network of an address, of which one host can have all addresses."""
    ip = ipaddress.ip_address(address)
    if isinstance(ip, ipaddress.IPv6Address):
        ip = ip.ipv4_mapped or ip
    return str(ipaddress.ip_network((int(ip), 24 if ip.version == 4 else 64), strict=False))


def is_here(name: str) -> bool:
    """Return whether a host name or address is this node's."""
    if name in ("localhost", socket.gethostname(), socket.getfqdn()):
        return True
    try:
        _listen_at(str(socket.getaddrinfo(name, 0, type=socket.SOCK_STREAM)[0][4][0]), 0).close()
    except OSError:
        return False
    return True


def listen(name: str, port: int, bind: str | None = None) -> socket.socket:
    """Return a socket that listens at this node's address of a name, not at all of its networks.

    Where the name leads to this node itself only by its loopback (as a host's own name often does) or not at
    all (a service's), the socket listens on all networks.

    Args:
        name: host name or address at which other nodes reach this one.
        port: the port; 0: any.
        bind: an address of this node to listen at instead.

    Raises:
        OSError: the port is taken, or `bind` is none of this node's addresses.
    """
    if bind is not None:
        return _listen_at(bind, port)
    try:
        address = str(socket.getaddrinfo(name, port, type=socket.SOCK_STREAM)[0][4][0])
        loopback = address == "::1" or address.startswith("127.")
        if not loopback or name in ("localhost", address):
            return _listen_at(address, port)
    except socket.gaierror:
        pass
    except OSError as problem:
        if problem.errno != errno.EADDRNOTAVAIL:
            raise
    both = socket.has_dualstack_ipv6()
    return socket.create_server(
        ("", port), family=socket.AF_INET6 if both else socket.AF_INET, dualstack_ipv6=both, backlog=BACKLOG
    )


def _listen_at(address: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    return socket.create_server((address, port), family=family, backlog=BACKLOG)
