"""Connections between the nodes of an elastic job: encrypted, and only between holders of its secret.

A client first *knocks*: it sends a random number and its HMAC, unencrypted. Strangers get no further, and so
cost a server neither TLS's buffers nor its arithmetic. Who sends an overheard knock again gets as far as TLS.

TLS with anonymous Diffie-Hellman encrypts without certificates, but does not say who is there. Both ends
therefore prove the secret for this very connection: an HMAC of their role and of the connection's *channel
binding* (`tls-unique`, RFC 5929), which is new in each and differs at the two ends of a man in the middle. So
a proof that was seen elsewhere, or is sent back, is worth nothing. TLS 1.2, since 1.3 has neither.
"""

from __future__ import annotations

import asyncio
import functools
import hashlib
import hmac
import os
import secrets
import socket
import ssl
import stat
import time
from itertools import pairwise
from pathlib import Path

from megatron_hexi.errors import HexiError
from megatron_hexi.text_file import read_text

#: The environment variable with the secret, of an agent and of its ranks.
SECRET_VARIABLE = "HEXI_SECRET"
#: The fewest characters of a secret; fewer could be guessed.
_LEAST = 16
#: The fewest distinct characters, and distances from one to the next, of a random one: 16 hexadecimal digits
#: have fewer once in 100,000.
_LEAST_DISTINCT = 5
_MAKE = "openssl rand -hex 32"


def find_secret(path: str | None, alone: bool) -> bytes:
    """Return the job's secret: from a file, else the environment, else a new one for a job of one node."""
    text = os.environ.get(SECRET_VARIABLE, "")
    if path is not None:
        place = f"--secret-file {path}"
        text = read_text(path, 4096, f"make it: (umask 077; {_MAKE} > {path})")
        mode = stat.S_IMODE(Path(path).stat().st_mode)
        if mode & 0o077:
            raise HexiError(f"{place}: others may read or write it (mode {mode:04o}); run: chmod 600 {path}")
    elif text:
        place = SECRET_VARIABLE
    elif alone:
        return secrets.token_hex(32).encode()
    else:
        raise HexiError(
            "no secret that only this job's nodes share; give each of them --secret-file job.secret, made by "
            f"(umask 077; {_MAKE} > job.secret), or the same in the environment variable {SECRET_VARIABLE}"
        )
    try:
        secret = text.strip().encode()
    except UnicodeEncodeError:  # bytes of the environment that are no text
        raise HexiError(f"{place}: the secret is not text; make one by: {_MAKE}") from None
    if len(secret) < _LEAST:
        raise HexiError(
            f"{place}: the secret has {len(secret)} characters, {_LEAST} are needed; make one by: {_MAKE}"
        )
    if _is_plain(secret):
        raise HexiError(f"{place}: the secret is not random, it can be guessed; make one by: {_MAKE}")
    return secret


def _is_plain(secret: bytes) -> bool:
    """Return whether a secret is plainly not random: of few characters, a sequence, or a part repeated."""
    steps = {after - before for before, after in pairwise(secret)}
    repeats = any(secret[part:] == secret[:-part] for part in range(1, len(secret) // 2 + 1))
    return len(set(secret)) < _LEAST_DISTINCT or len(steps) < _LEAST_DISTINCT or repeats


def secret_of_rank() -> bytes:
    """Return the secret that this rank's agent gave it."""
    return os.environ[SECRET_VARIABLE].encode()


#: Seconds within which a peer must prove the secret.
PROOF_S = 10.0
_CIPHER = "AECDH-AES256-SHA:@SECLEVEL=0"  # level 0: without certificates; the proofs stand in for them
_KNOCK, _CLIENT, _SERVER = b"megatron-hexi knock\0", b"megatron-hexi client\0", b"megatron-hexi server\0"
_NUMBER_BYTES = 16
PROOF_BYTES = hashlib.sha256().digest_size
KNOCK_BYTES = _NUMBER_BYTES + PROOF_BYTES
#: Answers to a knock, and the answer to a wrong proof.
_COME_IN, _STAY_OUT = b"+", b"-"
_REFUSED = bytes(PROOF_BYTES)


class SecretRefusedError(ConnectionError):
    """The peer has another secret, or none."""


class OtherServerError(ConnectionError):
    """The server does not answer as one of this package does."""


@functools.cache
def tls_context(server: bool) -> ssl.SSLContext:
    """Return the settings of TLS at one end."""
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


def knock(secret: bytes) -> bytes:
    """Return what a client sends first of all."""
    number = secrets.token_bytes(_NUMBER_BYTES)
    return number + hmac.digest(secret, _KNOCK + number, "sha256")


def _answer_knock(secret: bytes, knocked: bytes) -> bytes:
    number, digest = knocked[:_NUMBER_BYTES], knocked[_NUMBER_BYTES:]
    right = hmac.compare_digest(digest, hmac.digest(secret, _KNOCK + number, "sha256"))
    return _COME_IN if right else _STAY_OUT


def _check_knock(answer: bytes) -> None:
    """Check the answer to this client's knock.

    Raises:
        SecretRefusedError: the server has another secret.
        OtherServerError: it is another server.
    """
    if answer == _STAY_OUT:
        raise SecretRefusedError("the secret there is another than this node's")
    if answer != _COME_IN:
        raise OtherServerError(f"it answers {answer!r}")


def client_proof(secret: bytes, connection: ssl.SSLSocket | ssl.SSLObject) -> bytes:
    """Return the proof that a client sends first over TLS."""
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

    Raises:
        SecretRefusedError: the server has another secret.
        OtherServerError: it is another server.
        OSError: there is no such server.
    """
    plain = socket.create_connection(address, timeout)
    try:
        plain.sendall(knock(secret))
        _check_knock(_exactly(plain, 1, timeout))
        plain.settimeout(timeout)
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

    Raises:
        SecretRefusedError: the client has another secret.
        OSError: the connection ends before the client has proved the secret.
    """
    answer = _answer_knock(secret, _exactly(plain, KNOCK_BYTES, PROOF_S))
    plain.settimeout(PROOF_S)
    plain.sendall(answer)
    if answer == _STAY_OUT:
        raise SecretRefusedError("no proof of the job's secret")
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


def _exactly(connection: socket.socket, count: int, seconds: float) -> bytes:
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
    reader, writer = await asyncio.open_connection(*address)
    try:
        async with asyncio.timeout(PROOF_S):
            writer.write(knock(secret))
            _check_knock(await reader.readexactly(1))
            await writer.start_tls(tls_context(False))
            connection: ssl.SSLObject = writer.get_extra_info("ssl_object")
            writer.write(client_proof(secret, connection))
            check_server(secret, connection, await reader.readexactly(PROOF_BYTES))
    except BaseException:
        writer.close()
        raise
    return reader, writer


async def accept_stream(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, secret: bytes) -> None:
    """Let the client of an asyncio server prove the secret, and encrypt the connection, within `PROOF_S`.

    Raises:
        SecretRefusedError: the client has another secret.
        OSError, EOFError, TimeoutError: the connection ends before the client has proved the secret.
    """
    async with asyncio.timeout(PROOF_S):
        answer = _answer_knock(secret, await reader.readexactly(KNOCK_BYTES))
        writer.write(answer)
        await writer.drain()
        stays = answer == _COME_IN
        if stays:
            await writer.start_tls(tls_context(True))
            connection: ssl.SSLObject = writer.get_extra_info("ssl_object")
            answer, stays = answer_client(secret, connection, await reader.readexactly(PROOF_BYTES))
            writer.write(answer)
            await writer.drain()
    if not stays:
        raise SecretRefusedError("no proof of the job's secret")
