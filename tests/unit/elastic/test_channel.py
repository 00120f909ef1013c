"""Peers without the secret of an elastic job read, write and end nothing at its store and its copies."""

from __future__ import annotations

import contextlib
import hmac
import socket
import struct
import threading
import time
from datetime import timedelta
from random import Random

import pytest
import torch.distributed as dist

from megatron_hexi.elastic import channel
from megatron_hexi.elastic.channel import (
    KNOCK_BYTES,
    PROOF_BYTES,
    SecretRefusedError,
    accept,
    client_proof,
    connect,
    knock,
    tls_context,
)
from megatron_hexi.elastic.copy_files import copy_folder, copy_path, list_files, pull, serve_files
from megatron_hexi.elastic.launcher.job_store import keep_store, open_door
from megatron_hexi.errors import HexiError
from megatron_hexi.lab.testbed.job import free_port

SECRET, OTHER = b"known to the job's nodes alone", b"known to a stranger's nodes"
_STORE = timedelta(seconds=20)


class Job:
    """A store and a server of copies, as agents keep them, with one value and one file."""

    def __init__(self, folder):
        self.port = free_port()
        self.store = keep_store("localhost", self.port, SECRET)
        self.store.set("key", "value")
        inside = copy_folder(folder, "round", 1)
        inside.mkdir(parents=True)
        (inside / "weights").write_bytes(b"weights")
        self.files = list_files(inside)
        self.copies = serve_files(folder, SECRET)
        self.door, _ = open_door("localhost", self.port, SECRET)

    def check_untouched(self):
        """A node of the job still reads what it wrote, nothing else is there, and its copies are served."""
        node = dist.TCPStore("127.0.0.1", self.door, wait_for_workers=False, timeout=_STORE)
        assert node.get("key") == b"value"
        assert not node.check(["stranger"])
        connect(("localhost", self.copies), SECRET, 20).close()


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    return Job(tmp_path_factory.mktemp("copies"))


@pytest.fixture(params=["store", "copies"])
def server(request, job):
    """Both servers that a stranger reaches over the network."""
    yield "localhost", job.port if request.param == "store" else job.copies
    job.check_untouched()


def everything(connection):
    """All that a server sends before it closes; a reset is an end, too."""
    received = b""
    try:
        while block := connection.recv(1 << 16):
            received += block
    except OSError:
        pass
    return received


#: As TCPStore's client begins: a validation, and a value to set (`c10d/TCPStoreBackend.hpp`).
VALIDATE = struct.pack("<BI", 0, 0x3C85F7CE)
SET = struct.pack("<BQ8sQ1s", 1, 8, b"stranger", 1, b"1")


@pytest.mark.parametrize(
    "words",
    [VALIDATE + SET, b"round/iter_0000001/weights\n", b"", Random(0).randbytes(4096)],
    ids=["store", "copies", "nothing", "noise"],
)
def test_plain_words_are_answered_nothing(server, words):
    with socket.create_connection(server, 20) as connection:
        with contextlib.suppress(OSError):  # the server may have closed already
            connection.sendall(words)
            connection.shutdown(socket.SHUT_WR)
        assert not {b"weights", b"value"} & set(everything(connection).split())


def encrypted(server):
    """A connection by a knock that was overheard."""
    plain = socket.create_connection(server, 20)
    plain.sendall(knock(SECRET))
    assert plain.recv(1) == b"+"
    return tls_context(False).wrap_socket(plain)


@pytest.mark.parametrize(
    "words", [knock(OTHER), bytes(KNOCK_BYTES), VALIDATE * 10], ids=["other", "zeros", "store"]
)
def test_without_a_knock_there_is_no_tls(server, words):
    with socket.create_connection(server, 20) as connection:
        connection.sendall(words)
        assert everything(connection) == b"-"


@pytest.mark.parametrize("proof", ["none", "zeros", "other", "reflected"])
def test_without_the_proof_a_connection_ends(server, proof):
    with encrypted(server) as connection:
        words = {
            "none": b"",
            "zeros": bytes(PROOF_BYTES),
            "other": client_proof(OTHER, connection),
            # What the server itself would answer: of no use to who lacks the secret, and none as a client's.
            "reflected": hmac.digest(
                SECRET, b"megatron-hexi server\0" + connection.get_channel_binding("tls-unique"), "sha256"
            ),
        }[proof]
        with contextlib.suppress(OSError):
            connection.sendall(words + VALIDATE + SET + b"round/iter_0000001/weights\n")
        assert everything(connection) in (b"", bytes(PROOF_BYTES))


def test_a_proof_that_was_seen_proves_nothing_again(server):
    with encrypted(server) as first, encrypted(server) as second:
        proof = client_proof(SECRET, first)
        second.sendall(proof)
        assert everything(second) == bytes(PROOF_BYTES)
        first.sendall(proof)
        assert first.recv(PROOF_BYTES) not in (b"", bytes(PROOF_BYTES))
    with encrypted(server) as third:
        third.sendall(proof)
        assert everything(third) == bytes(PROOF_BYTES)


def test_what_was_recorded_on_the_wire_opens_nothing(server):
    """The very bytes of a node's connection, sent again."""
    recorded: list[bytes] = []
    tap = socket.create_server(("127.0.0.1", 0))

    def relay(source, target, keep):
        with contextlib.suppress(OSError):  # an end that is reset, or idle at the end of the test
            while block := source.recv(1 << 16):
                keep.append(block)
                target.sendall(block)

    def pass_on():
        near, _ = tap.accept()
        far = socket.create_connection(server, 20)
        threading.Thread(target=relay, args=(far, near, []), daemon=True).start()
        relay(near, far, recorded)

    threading.Thread(target=pass_on, daemon=True).start()
    connect(tap.getsockname(), SECRET, 20).close()  # whoever only passes bytes on is no obstacle
    with socket.create_connection(server, 20) as connection:
        with contextlib.suppress(OSError):
            connection.sendall(b"".join(recorded))
            connection.shutdown(socket.SHUT_WR)
        answer = everything(connection)
    assert not {b"weights", b"value"} & set(answer.split())


def test_a_man_in_the_middle_is_refused_by_both(server):
    """He speaks TLS to either, and passes on the proofs."""
    tap = socket.create_server(("127.0.0.1", 0))
    answers = []

    def between():
        plain, _ = tap.accept()
        assert len(plain.recv(KNOCK_BYTES)) == KNOCK_BYTES
        plain.sendall(b"+")
        near = tls_context(True).wrap_socket(plain, server_side=True)
        with encrypted(server) as far:
            far.sendall(near.recv(PROOF_BYTES))
            answers.append(far.recv(PROOF_BYTES))
            near.sendall(answers[0])

    middle = threading.Thread(target=between, daemon=True)
    middle.start()
    with pytest.raises(SecretRefusedError):
        connect(tap.getsockname(), SECRET, 20)
    middle.join(20)
    assert answers == [bytes(PROOF_BYTES)]


def test_many_who_prove_nothing_stop_nobody(server, job):
    idle = [socket.create_connection(server, 20) for _ in range(100)]
    begun = time.monotonic()
    job.check_untouched()
    assert time.monotonic() - begun < 5
    for connection in idle:
        connection.close()


def test_the_store_itself_is_reached_from_its_own_node_only(job):
    """It listens at the loopback alone: from any other address of this machine the port is closed."""
    probe = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    with probe:
        try:
            probe.connect(("192.0.2.1", 9))  # sends nothing; picks the address of the default route
        except OSError:
            pytest.skip("this machine has no network")
        own = probe.getsockname()[0]
    for port in (job.store.port, job.door):
        with pytest.raises(OSError, match="refused"):
            socket.create_connection((own, port), 5)


def test_a_store_with_another_secret_is_named_with_the_remedy(job):
    with pytest.raises(
        HexiError,
        match=f"--rdzv-endpoint localhost:{job.port}: the store there has another secret than this node; "
        "give all nodes of the job the same --secret-file or HEXI_SECRET",
    ):
        open_door("localhost", job.port, OTHER)


def test_what_is_no_store_is_named():
    with socket.create_server(("127.0.0.1", 0)) as other:

        def answer():
            connection, _ = other.accept()
            with connection:
                connection.recv(1 << 16)
                connection.sendall(b"HTTP/1.0 400 Bad Request\r\n\r\n" * 10)
                time.sleep(1)

        threading.Thread(target=answer, daemon=True).start()
        with pytest.raises(HexiError, match=r"no store of megatron_hexi\.elastic answers there"):
            open_door("127.0.0.1", other.getsockname()[1], SECRET)


def test_copies_are_fetched_from_holders_of_the_secret_only(job, tmp_path):
    """Neither does a node send them to a stranger, nor does it take his, whatever the store says of them."""
    url, path = f"localhost:{job.copies}", copy_path("round", 1)
    with pytest.raises(OSError, match="another than this node's"):
        pull([url], path, "weights", job.files["weights"], tmp_path, OTHER)
    assert not list(tmp_path.iterdir())
    pull([url], path, "weights", job.files["weights"], tmp_path, SECRET)
    assert (tmp_path / "weights").read_bytes() == b"weights"


def test_a_proof_that_comes_byte_by_byte_is_not_waited_for(monkeypatch):
    monkeypatch.setattr(channel, "PROOF_S", 0.5)
    near, far = socket.socketpair()

    def drip():
        far.sendall(knock(SECRET))
        assert far.recv(1) == b"+"
        with contextlib.suppress(OSError), tls_context(False).wrap_socket(far) as connection:
            for byte in client_proof(SECRET, connection):
                connection.sendall(bytes([byte]))
                time.sleep(0.2)

    threading.Thread(target=drip, daemon=True).start()
    begun = time.monotonic()
    with pytest.raises(TimeoutError):
        accept(near, SECRET)
    assert time.monotonic() - begun < 3
