"""Connections that prove nothing take neither the memory of the store's host nor the place of nodes."""

from __future__ import annotations

import contextlib
import resource
import secrets
import socket
import subprocess
import sys
import threading
import time
from datetime import timedelta

import psutil
import pytest
import torch.distributed as dist

from megatron_hexi.elastic import entrance
from megatron_hexi.elastic.channel import SECRET_VARIABLE, SecretRefusedError, connect, knock
from megatron_hexi.elastic.copy_files import serve_files
from megatron_hexi.elastic.entrance import Entrance
from megatron_hexi.elastic.launcher.job_store import open_door
from megatron_hexi.lab.testbed.job import free_port
from tests.megatron.launch import environment

#: Idle connections, and MiB that they may cost a server.
FLOOD, MOST_MIB = 5000, 40


@pytest.fixture
def many_files():
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    if before[1] < 2 * FLOOD:
        pytest.skip(f"{before[1]} open files are allowed")
    resource.setrlimit(resource.RLIMIT_NOFILE, (before[1], before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


def idle(port: int, number: int, networks: int, word: bytes) -> socket.socket:
    """A connection that says a word, and nothing else, from one of many addresses of the loopback."""
    network, host = number % networks, number // networks % 20
    own = socket.create_connection(("127.0.0.1", port), 20, (f"127.0.{network}.{host + 2}", 0))
    own.sendall(word)
    return own


def resident_mib(process: psutil.Process) -> float:
    return process.memory_info().rss / 2**20


@pytest.mark.parametrize("networks", [pytest.param(1, marks=pytest.mark.slow), 250])
def test_a_flood_costs_the_store_s_host_little_and_a_node_comes_in(many_files, networks):
    secret = secrets.token_hex(32).encode()
    port = free_port()
    keeper = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "megatron_hexi.elastic",
            "--keep-store",
            "--rdzv-endpoint",
            f"127.0.0.1:{port}",
        ],
        env=environment() | {SECRET_VARIABLE: secret.decode()},
    )
    flood: list[socket.socket] = []
    try:
        open_door("127.0.0.1", port, secret)
        process = psutil.Process(keeper.pid)
        before = resident_mib(process)
        flood += [idle(port, number, networks, b"x" * (number % 48)) for number in range(FLOOD)]
        begun = time.monotonic()
        door, _ = open_door("127.0.0.1", port, secret)
        store = dist.TCPStore("127.0.0.1", door, wait_for_workers=False, timeout=timedelta(seconds=20))
        store.set("key", "value")
        took, grown = time.monotonic() - begun, resident_mib(process) - before
        left = len(process.net_connections())
        print(f"{grown:.1f} MiB for {left} of {FLOOD} connections; a node came in after {took:.2f} s")
        assert took < 2
        assert grown < MOST_MIB
        assert left < entrance._MOST + 20
    finally:
        for connection in flood:
            connection.close()
        keeper.kill()
        keeper.wait()


def test_a_node_comes_in_while_a_flood_lasts(many_files, tmp_path):
    """The server of copies has a thread for each unproven connection."""
    secret = secrets.token_hex(32).encode()
    port, ends = serve_files(tmp_path, secret, "127.0.0.1"), threading.Event()
    threads = threading.active_count()

    def pour() -> None:
        flood: list[socket.socket] = []
        while not ends.is_set():
            with contextlib.suppress(OSError):
                flood.append(idle(port, len(flood), 1, b""))
            if len(flood) > 2 * entrance._MOST_OF_NETWORK:
                flood.pop(0).close()
        for connection in flood:
            connection.close()

    pouring = threading.Thread(target=pour)
    pouring.start()
    try:
        for _ in range(10):
            time.sleep(0.1)
            begun = time.monotonic()
            while time.monotonic() - begun < 2:
                with contextlib.suppress(ConnectionError):
                    connect(("127.0.0.1", port), secret, 2).close()
                    break
            assert time.monotonic() - begun < 2
            assert threading.active_count() - threads < entrance._MOST_OF_NETWORK + 50
    finally:
        ends.set()
        pouring.join()
    with pytest.raises(SecretRefusedError):
        connect(("127.0.0.1", port), b"another", 2)


def test_the_oldest_of_the_largest_network_goes_where_there_are_too_many(monkeypatch, capsys):
    monkeypatch.setattr(entrance, "_MOST", 5)
    monkeypatch.setattr(entrance, "_MOST_OF_NETWORK", 3)
    door, closed = Entrance("the door"), []
    with contextlib.ExitStack() as stack:

        def come(address: str) -> contextlib.ExitStack:
            one = contextlib.ExitStack()
            one.enter_context(door.one(address, lambda: closed.append(address)))
            stack.push(one)
            return one

        first = come("10.0.0.1")
        come("10.0.0.2")
        come("10.0.0.3")
        assert closed == []
        come("10.0.0.4")  # the fourth of its network
        come("2001:db8::1")
        come("2001:db8::2:0:0:1")  # of the same /64
        assert closed == ["10.0.0.1"]
        come("::ffff:10.0.0.5")  # of IPv4, at a socket for both
        assert closed == ["10.0.0.1", "10.0.0.2"]
        come("2001:db8:0:1::1")  # another network, but the sixth in all
        assert closed == ["10.0.0.1", "10.0.0.2", "10.0.0.3"]
        first.close()
        come("192.0.2.1")
        assert len(closed) == 4
    assert door._pending == {}
    assert "hexi: elastic: the door refused 10.0.0.0/24 (too many connections" in capsys.readouterr().err


def test_a_knock_is_new_each_time():
    assert knock(b"secret") != knock(b"secret")
