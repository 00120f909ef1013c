"""The store of an elastic job, behind a gate that lets in holders of the job's secret only.

PyTorch's TCPStore does not authenticate its clients. It listens at the loopback of one node alone; a gate
there takes the connections of other nodes (`channel`), and each agent has a door, again at its loopback, that
passes on its own and its ranks' connections to the gate:

    rank --loopback--> door --network, encrypted, secret proved--> gate --loopback--> store

The gate begins each connection with the time by its clock, which nodes compare with their own. The answer is
a name: the store's, or an agent's. The connection with an agent's name carries nothing else; it ends when the
agent does, which the gate records in the store.

Whoever may run programs on a node can reach the loopback there. Nothing in the store is unpickled.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import resource
import socket
import ssl
import struct
import threading
import time
from collections.abc import Awaitable, Callable
from datetime import timedelta

import torch.distributed as dist

from megatron_hexi.elastic.channel import (
    PROOF_S,
    OtherServerError,
    SecretRefusedError,
    accept_stream,
    connect,
    connect_stream,
    tls_context,
)
from megatron_hexi.elastic.entrance import BACKLOG, Entrance, listen
from megatron_hexi.elastic.launcher.life import mark_gone
from megatron_hexi.errors import HexiError

_LOOPBACK = "127.0.0.1"
#: The gate's time, in seconds since the epoch, and how far a node's clock may be from it.
_TIME = struct.Struct("!d")
_MOST_APART_S = 1.0
#: Bytes of a name, and that of the store.
NAME_BYTES = 16
_STORE_NAME = bytes(NAME_BYTES)
#: Seconds without any answer of the other host after which a connection between gate and door ends: the agent
#: of a node that is cut off must not wait for ever, nor miss what a busy network or host delays.
_CUT_S = 60
_STORE = timedelta(seconds=60)
_BLOCK = 1 << 16
_AGAIN_S = 0.2
#: Seconds after which a door knocks again at a gate that has closed its connection.
_CROWDED_S = (0.1, 0.3, 1.0)
_CLOSED = (OSError, EOFError, asyncio.CancelledError)


def keep_store(host: str, port: int, secret: bytes, bind: str | None = None) -> dist.TCPStore:
    """Start the job's store and its gate; they last until the process ends.

    Raises:
        OSError: the port is taken.
    """
    tls_context(True)  # raises its error before the store exists
    try:
        listening = listen(host, port, bind)
    except OSError as problem:
        if problem.errno == errno.EADDRINUSE:
            raise
        place = f"--rdzv-endpoint {host}:{port}" if bind is None else f"--bind {bind}"
        raise HexiError(
            f"{place}: cannot be listened at here ({problem.strerror or problem}); choose another "
            "port, or an address of this node for --bind: ip addr lists them"
        ) from None
    _raise_limit()
    inner = socket.create_server((_LOOPBACK, 0))
    store = dist.TCPStore(
        _LOOPBACK,
        int(inner.getsockname()[1]),
        is_master=True,
        wait_for_workers=False,
        timeout=_STORE,
        master_listen_fd=inner.detach(),
    )
    entrance, signs = Entrance(f"the store at {host}:{port}"), store.clone()

    async def enter(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with entrance.one(str(writer.get_extra_info("peername")[0]), writer.transport.abort):
            await accept_stream(reader, writer, secret)
        writer.write(_TIME.pack(time.time()))
        if (name := await reader.readexactly(NAME_BYTES)) == _STORE_NAME:
            # By its own port: so the thread of the gate keeps the store as long as the process lasts.
            await _join(reader, writer, *await asyncio.open_connection(_LOOPBACK, store.port))
            return
        with contextlib.suppress(*_CLOSED):
            await reader.read(1)
        with contextlib.suppress(RuntimeError):  # the store has ended
            await asyncio.to_thread(mark_gone, signs, name.hex())

    _serve(enter, listening)
    return store


def open_line(gate: tuple[str, int], secret: bytes, agent: str) -> ssl.SSLSocket:
    """Return a connection to the store's gate whose end is taken for the end of an agent.

    Args:
        agent: name of the agent, in hexadecimal digits.

    Raises:
        OSError: there is no such gate.
    """
    line = connect(gate, secret, PROOF_S)
    line.recv(_TIME.size)
    line.sendall(bytes.fromhex(agent))
    return line


def open_door(host: str, port: int, secret: bytes) -> tuple[int, float]:
    """Open this node's door to the job's store; waits until the store is there.

    Returns:
        The port of this node's loopback at which the store is reached, and the seconds by which the time of
        the store's host is ahead of `time.monotonic` here.

    Raises:
        OSError: nothing is there.
    """
    place = f"--rdzv-endpoint {host}:{port}"
    deadline = time.monotonic() + _STORE.total_seconds()
    while True:
        try:
            clock = _compare_clocks(place, (host, port), secret)
            break
        except SecretRefusedError:
            raise HexiError(
                f"{place}: the store there has another secret than this node; give all nodes of the job the "
                "same --secret-file or HEXI_SECRET, or another port where that store is another job's"
            ) from None
        except OtherServerError as problem:
            raise HexiError(
                f"{place}: no store of megatron_hexi.elastic answers there ({problem}); give the port at "
                "which one does, of the same version"
            ) from None
        except OSError:  # a host that is ending closes connections, too
            if time.monotonic() > deadline:
                raise
            time.sleep(_AGAIN_S)
    _raise_limit()
    listening = socket.create_server((_LOOPBACK, 0))

    async def pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        gate_reader, gate_writer = await _enter_gate((host, port), secret)
        _bound_silence(gate_writer)
        await gate_reader.readexactly(_TIME.size)
        gate_writer.write(_STORE_NAME)
        await _join(reader, writer, gate_reader, gate_writer)

    _serve(pass_on, listening)
    return int(listening.getsockname()[1]), clock


async def _enter_gate(
    gate: tuple[str, int], secret: bytes
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Return a connection to the gate, tried again where a crowd there has closed it."""
    for wait_s in _CROWDED_S:
        with contextlib.suppress(ConnectionError, EOFError):
            return await connect_stream(gate, secret)
        await asyncio.sleep(wait_s)
    return await connect_stream(gate, secret)


def _compare_clocks(place: str, gate: tuple[str, int], secret: bytes) -> float:
    """Return the seconds by which the time of the gate's host is ahead of `time.monotonic` here.

    Raises:
        OSError: there is no such gate.
    """
    begin = time.monotonic()
    with connect(gate, secret, PROOF_S) as connection:
        read = connection.recv(_TIME.size)
    if len(read) != _TIME.size:
        raise ConnectionError("closed before it said its time")
    [there] = _TIME.unpack(read)  # between `begin` and now
    half_s = (time.monotonic() - begin) / 2
    ahead = time.time() - half_s - there
    if abs(ahead) > _MOST_APART_S + half_s:
        raise HexiError(
            f"{place}: this node's clock is {abs(ahead):.1f} s {'ahead of' if ahead > 0 else 'behind'} the "
            "store's; let NTP set both, for example: chronyc makestep"
        )
    return there - begin - half_s


_Served = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


def _serve(served: _Served, listening: socket.socket) -> None:
    """Serve the connections to a socket in a thread of its own."""

    async def one(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(*_CLOSED), contextlib.closing(writer):
            _bound_silence(writer)
            await served(reader, writer)

    async def run() -> None:
        server = await asyncio.start_server(one, sock=listening, limit=_BLOCK, backlog=BACKLOG)
        await server.serve_forever()

    threading.Thread(target=asyncio.run, args=(run(),), name="hexi-gate", daemon=True).start()


def _bound_silence(writer: asyncio.StreamWriter) -> None:
    """Let a connection end where the other host does not answer for `_CUT_S` seconds."""
    plain: socket.socket = writer.get_extra_info("socket")
    plain.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (
        (socket.TCP_KEEPIDLE, _CUT_S // 4),
        (socket.TCP_KEEPINTVL, _CUT_S // 4),
        (socket.TCP_USER_TIMEOUT, _CUT_S * 1000),
    ):
        plain.setsockopt(socket.IPPROTO_TCP, option, value)


async def _join(
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    other_reader: asyncio.StreamReader,
    other_writer: asyncio.StreamWriter,
) -> None:
    """Pass bytes between two connections until one of them ends."""
    with contextlib.closing(other_writer):
        ways = [
            asyncio.ensure_future(_copy(reader, other_writer)),
            asyncio.ensure_future(_copy(other_reader, writer)),
        ]
        try:
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for way in ways:
                way.cancel()


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(*_CLOSED):
        while block := await reader.read(_BLOCK):
            writer.write(block)
            await writer.drain()


def _raise_limit() -> None:
    """Allow as many open files as the system lets this process have: each rank has several connections."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
