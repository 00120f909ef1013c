"""Mistakes on the command line of a node are one line with a remedy, before anything starts."""

from __future__ import annotations

import os
import secrets
import socket
import subprocess
import sys

import pytest

from megatron_hexi.elastic.__main__ import _read
from megatron_hexi.elastic.channel import SECRET_VARIABLE, find_secret
from megatron_hexi.errors import HexiError
from tests.megatron.launch import environment

GOOD = {"--nnodes": "1:2", "--nproc-per-node": "1", "--rdzv-endpoint": "head:29400", "--node": "n0"}
DIGITS = "9" * 5000
NUMBERS = ("", "x", "٣", "1_0", " 1", "1 ", "+1", "-1", "1.5", "nan", DIGITS)
TEXTS = ("", " ", "a b", "a\nb", "x" * 5000)
FILES = ("", "folder", "fifo", "/dev/null")
BAD = {
    "--lost-after": ("", "x", "٢٠", "2_0", "20 ", "4", "nan", "inf", "-inf", "1e999", "1e300", "-20"),
    "--wait-for-nodes": ("", "x", "nan", "inf", "-1", "0", "1e300", "1e999", "٢٠"),
    "--nnodes": (*NUMBERS, "0:2", "2:1", "1:", ":2", "1:2:3", "٢:٣", f"1:{DIGITS}", "1:1000000000", "1.0:2"),
    "--nproc-per-node": (*NUMBERS, "0", "1000000000"),
    "--max-losses": (*NUMBERS, "-5"),
    "--copy-interval": (*NUMBERS, "0"),
    "--rdzv-endpoint": (
        *("", "head", "head:", ":29400", "head:0", "head:65536", "head:٣", "head:+1", f"head:{DIGITS}"),
        *("he ad:1", "head\n:1", "h/x:1", "head: 1", "head:1x"),
    ),
    "--bind": (*TEXTS, "192.0.2.1", "nope.invalid", "127.0.0.1 ", "127.0.0.1:5"),
    "--node": TEXTS,
    "--local-addr": (*TEXTS, "a/b"),
    "--rdzv-id": (*TEXTS, "a/b", "../x"),
    "--ended": (*FILES, "/missing/x", "/proc/x", "file/x"),
    "--log-dir": ("", "file", "fifo", "/dev/null", "/proc/x", "file/x"),
    "--when-store-lost": (*FILES, "nope"),
    "--script": (*FILES, "nope"),
    "--copy-folder": ("", "nope", "file", "/proc", "/dev/null"),
    "--secret-file": (*FILES, "nope"),
    "--start-method": ("", "x"),
    "--unknown": ("x",),
}


@pytest.fixture(autouse=True)
def folder(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(SECRET_VARIABLE, secrets.token_hex(32))
    (tmp_path / "file").touch()
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "fifo")


def words(*more: str, without: str = "") -> list[str]:
    given = {flag: value for flag, value in GOOD.items() if flag != without}
    return [*(f"{flag}={value}" for flag, value in given.items()), *more, "--", "--hexi-cluster", "c.yaml"]


def refusal(line: list[str]) -> str:
    with pytest.raises(HexiError) as raised:
        _read(line)
    message = str(raised.value)
    assert message.isprintable()
    assert len(message) < 400
    return message


@pytest.mark.parametrize("flag", BAD)
def test_a_bad_value_is_refused_by_name(flag):
    for value in BAD[flag]:
        message = refusal(words(f"{flag}={value}", without=flag))
        assert flag in message or value in message
        assert "; " in message or ": give " in message


@pytest.mark.parametrize(
    ("line", "why"),
    [
        (words(without="--nnodes"), "--nnodes: is missing; give MIN:MAX"),
        (words(without="--nproc-per-node"), "--nproc-per-node: is missing; give the number of GPUs"),
        (words(without="--rdzv-endpoint"), "required: --rdzv-endpoint; see python -m megatron_hexi.elastic"),
        (words("--nodes=file"), "--nodes: its file says --node, --nproc-per-node and --spare"),
        (["--keep-store", *words()], "--keep-store: --nnodes=1:2 has no effect on the store; leave --nnodes"),
        (
            [*words()[:4], "pretrain.py"],
            "'pretrain.py': Megatron's arguments come behind --; give a script by",
        ),
    ],
)
def test_what_is_missing_or_has_no_effect_is_refused(line, why):
    assert why in refusal(line)


@pytest.mark.parametrize("gpus", ["", "0", "-1", "٣", "1_0", DIGITS, "2 more"])
def test_a_file_of_nodes_that_hexi_place_did_not_write_is_refused(tmp_path, gpus):
    (tmp_path / "nodes").write_text(f"{socket.gethostname()} n0 {gpus}\n")
    line = [word for word in words(without="--node") if not word.startswith("--nproc")]
    assert "--nodes nodes, line 1" in refusal(["--nodes=nodes", *line])


def test_a_good_line_is_read(tmp_path):
    options = (
        "--bind=127.0.0.1",
        "--ended=done",
        "--log-dir=logs",
        "--copy-interval=5",
        "--copy-folder=folder",
    )
    _, settings = _read(words(*options, "--lost-after=7.5", "--max-losses=0", "--rdzv-id=12"))
    assert settings is not None
    assert (settings.least, settings.most, settings.ranks, settings.node) == (1, 2, 1, "n0")
    assert (settings.host, settings.port, settings.bind) == ("head", 29400, "127.0.0.1")
    assert (settings.lost_after_s, settings.max_losses, settings.job) == (7.5, 0, "12")
    assert settings.words == ("--hexi-cluster", "c.yaml")
    assert not (tmp_path / "done").exists()
    _, settings = _read(["--nnodes=2", "--nproc-per-node=8", "--rdzv-endpoint=[::1]:29400"])
    assert settings is not None
    assert (settings.least, settings.most, settings.host) == (2, 2, "::1")
    assert settings.node == socket.gethostname()
    assert _read(["--keep-store", "--rdzv-endpoint", "head:29400"])[1] is None


def test_a_command_with_a_bad_value_ends_with_2_and_one_line():
    command = [sys.executable, "-m", "megatron_hexi.elastic", *words("--lost-after=nan")]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    remedy = "give 5 to 86400 seconds; see python -m megatron_hexi.elastic --help"
    assert done.stderr.splitlines() == [f"hexi: error: --lost-after: 'nan': {remedy}"]


@pytest.mark.parametrize(
    "secret",
    [
        *(
            "a" * 16,
            "ab" * 8,
            "0" * 64,
            "aaaabbbbccccdddd",
            "passwordpassword",
            "changemechangeme",
            "secret" * 4,
        ),
        *("1234567890123456", "0123456789abcdef", "abcdefghijklmnop"),
    ],
)
def test_a_secret_that_is_plainly_not_random_is_refused(monkeypatch, secret):
    monkeypatch.setenv(SECRET_VARIABLE, secret)
    with pytest.raises(
        HexiError, match="the secret is not random, it can be guessed; make one by: openssl rand"
    ):
        find_secret(None, alone=False)


def test_random_secrets_are_taken(monkeypatch):
    for make in (secrets.token_hex, secrets.token_urlsafe):
        for _ in range(500):
            monkeypatch.setenv(SECRET_VARIABLE, make(16))
            find_secret(None, alone=False)
