"""Connections between the nodes of an elastic job: encrypted, and only between holders of its secret.

TLS with anonymous Diffie-Hellman encrypts without certificates, but does not say who is there. Both ends
therefore prove the secret for this very connection: an HMAC of their role and of the connection's *channel
binding* (`tls-unique`, RFC 5929), which is new in each and differs at the two ends of a man in the middle. So
a proof that was seen elsewhere, or is sent back, is worth nothing. TLS 1.2, since 1.3 has neither.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import functools
import hashlib
import hmac
import socket
import ssl
import threading
import time
from collections import Counter
from collections.abc import Iterator

from megatron_hexi.elastic.speech import say
from megatron_hexi.errors import HexiError

#: Seconds within which a peer must prove the secret, and the most connections of an address that have not.
PROOF_S = 10.0
_PENDING = 256
_CIPHER = "AECDH-AES256-SHA:@SECLEVEL=0"  # level 0: without certificates; the proofs stand in for them
_CLIENT, _SERVER = b"megatron-hexi client\0", b"megatron-hexi server\0"
PROOF_BYTES = hashlib.sha256().digest_size
#: Answer to a wrong proof.
_REFUSED = bytes(PROOF_BYTES)
#: Seconds between two lines about refused connections.
_SAY_S = 60.0


class SecretRefusedError(ConnectionError):
    """The peer has another secret, or none."""


@functools.cache
def tls_context(server: bool) -> ssl.SSLContext:
    """Return the settings of TLS at one end.

    Raises:
        HexiError: this Python's OpenSSL has no anonymous Diffie-Hellman, as builds for FIPS.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if server else ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    context.minimum_version = context.maximum_version = ssl.TLSVersion.TLSv1_2
    try:
        context.set_ciphers(_CIPHER)
    except ssl.SSLError:
        raise HexiError(
            f"megatron_hexi.elastic: this Python's OpenSSL ({ssl.OPENSSL_VERSION}) has no anonymous "
            "Diffie-Hellman, which connects the nodes; take a Python whose OpenSSL has it: "
            "openssl ciphers -s -tls1_2 'aNULL:@SECLEVEL=0' lists some"
        ) from None
    context.options |= ssl.OP_NO_RENEGOTIATION | ssl.OP_NO_TICKET
    return context


def _proof(secret: bytes, role: bytes, connection: ssl.SSLSocket | ssl.SSLObject) -> bytes:
    binding = connection.get_channel_binding("tls-unique")
    assert binding, "the handshake is done"
    return hmac.digest(secret, role + binding, "sha256")


def client_proof(secret: bytes, connection: ssl.SSLSocket | ssl.SSLObject) -> bytes:
    """Return the proof that a client sends first."""
    return _proof(secret, _CLIENT, connection)


def answer_client(
    secret: bytes, connection: ssl.SSLSocket | ssl.SSLObject, proof: bytes
) -> tuple[bytes, bool]:
    """Return the server's answer to a client's proof, and whether the client stays connected."""
    if hmac.compare_digest(proof, client_proof(secret, connection)):
        return _proof(secret, _SERVER, connection), True
    return _REFUSED, False


def check_server(secret: bytes, connection: ssl.SSLSocket | ssl.SSLObject, answer: bytes) -> None:
    """Check a server's answer to this client's proof.

    Raises:
        SecretRefusedError: the server has another secret.
    """
    if not hmac.compare_digest(answer, _proof(secret, _SERVER, connection)):
        raise SecretRefusedError("the secret there is another than this node's")


def connect(address: tuple[str, int], secret: bytes, timeout: float) -> ssl.SSLSocket:
    """Return a connection to a server that has the secret.

    Args:
        address: host and port.
        secret: the job's secret.
        timeout: seconds for each step, and for later reads and writes.

    Raises:
        SecretRefusedError: the server has another secret.
        OSError: there is no such server.
    """
    plain = socket.create_connection(address, timeout)
    try:
        connection = tls_context(False).wrap_socket(plain)
    except BaseException:
        plain.close()
        raise
    try:
        connection.sendall(client_proof(secret, connection))
        check_server(secret, connection, _exactly(connection, PROOF_BYTES, timeout))
        connection.settimeout(timeout)
    except BaseException:
        connection.close()
        raise
    return connection


def accept(plain: socket.socket, secret: bytes) -> ssl.SSLSocket:
    """Return the connection to a client that has proved the secret.

    Args:
        plain: the accepted socket, which is used up.
        secret: the job's secret.

    Raises:
        SecretRefusedError: the client has another secret.
        OSError: the connection ends before the client has proved the secret.
    """
    plain.settimeout(PROOF_S)
    connection = tls_context(True).wrap_socket(plain, server_side=True)
    try:
        answer, stays = answer_client(secret, connection, _exactly(connection, PROOF_BYTES, PROOF_S))
        connection.settimeout(PROOF_S)
        connection.sendall(answer)
        if not stays:
            raise SecretRefusedError("no proof of the job's secret")
    except BaseException:
        connection.close()
        raise
    return connection


def _exactly(connection: ssl.SSLSocket, count: int, seconds: float) -> bytes:
    """Return exactly `count` bytes of a peer, received within `seconds` in total."""
    received, end = b"", time.monotonic() + seconds
    while len(received) < count:
        connection.settimeout(max(1e-3, end - time.monotonic()))
        block = connection.recv(count - len(received))
        if not block:
            raise ConnectionError("closed before the secret was proved")
        received += block
    return received


async def connect_stream(
    address: tuple[str, int], secret: bytes
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Return asyncio's streams of a connection to a server that has the secret, see `connect`.

    Raises:
        SecretRefusedError: the server has another secret.
        OSError, EOFError, TimeoutError: there is no such server.
    """
    host, port = address
    reader, writer = await asyncio.open_connection(
        host, port, ssl=tls_context(False), ssl_handshake_timeout=PROOF_S
    )
    try:
        connection: ssl.SSLObject = writer.get_extra_info("ssl_object")
        writer.write(client_proof(secret, connection))
        answer = await asyncio.wait_for(reader.readexactly(PROOF_BYTES), PROOF_S)
        check_server(secret, connection, answer)
    except BaseException:
        writer.close()
        raise
    return reader, writer


async def accept_stream(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, secret: bytes) -> None:
    """Encrypt a connection to an asyncio server, and let its client prove the secret, within `PROOF_S`.

    Raises:
        SecretRefusedError: the client has another secret.
        OSError, EOFError, TimeoutError: the connection ends before the client has proved the secret.
    """
    async with asyncio.timeout(PROOF_S):
        await writer.start_tls(tls_context(True))
        connection: ssl.SSLObject = writer.get_extra_info("ssl_object")
        answer, stays = answer_client(secret, connection, await reader.readexactly(PROOF_BYTES))
        writer.write(answer)
        await writer.drain()
    if not stays:
        raise SecretRefusedError("no proof of the job's secret")


class Entrance:
    """Limits and logs connections to a server from peers that have not proved the secret yet.

    Args:
        server: a name of the server, for the log.
    """

    def __init__(self, server: str) -> None:
        self._server, self._lock = server, threading.Lock()
        self._pending: Counter[str] = Counter()
        self._said_at = -_SAY_S

    @contextlib.contextmanager
    def one(self, address: str) -> Iterator[None]:
        """Context in which a peer proves the secret.

        Args:
            address: the peer's IP address.

        Raises:
            SecretRefusedError: too many connections of that address have not proved it yet.
        """
        with self._lock:
            self._pending[address] += 1
            full = self._pending[address] > _PENDING
        try:
            if full:
                raise SecretRefusedError(f"more than {_PENDING} connections that prove nothing")
            yield
        except (OSError, EOFError) as problem:
            self._say(address, problem)
            raise
        finally:
            with self._lock:
                self._pending[address] -= 1
                self._pending += Counter()  # forgets addresses without any

    def _say(self, address: str, problem: Exception) -> None:
        if time.monotonic() - self._said_at < _SAY_S:
            return
        self._said_at = time.monotonic()
        reason = str(problem)[:100] or type(problem).__name__
        say(f"{self._server} refused {address} ({reason})")


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


#: Connections that may wait to be accepted.
BACKLOG = 1024


def _listen_at(address: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    return socket.create_server((address, port), family=family, backlog=BACKLOG)
