"""The command line of ``python -m megatron_hexi.elastic``, one call a node."""

from __future__ import annotations

import argparse
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, NoReturn

import torch.distributed as dist

from megatron_hexi.elastic.channel import find_secret
from megatron_hexi.elastic.entrance import listen
from megatron_hexi.elastic.launcher.agent import AgentSettings, run_agent
from megatron_hexi.elastic.launcher.job_store import keep_store
from megatron_hexi.elastic.launcher.ranks import ENTRY
from megatron_hexi.elastic.store import SPARE
from megatron_hexi.errors import HexiError, printable, user_errors
from megatron_hexi.text_file import check_output, read_text
from megatron_hexi.whole_number import whole_number

_MOST_NODES, _MEMORY = 100_000, "/dev/shm"
#: Options that have an effect beside --keep-store.
_OF_THE_STORE = ("--keep-store", "--rdzv-endpoint", "--secret-file", "--bind")

_EXAMPLE = """\
Example, on each of four nodes; two of them suffice. The first line, once, makes the job's secret:
  (umask 077; openssl rand -hex 32 > job.secret)
  python -m megatron_hexi.elastic --nnodes 2:4 --nproc-per-node 8 --rdzv-endpoint head:29400 \\
    --secret-file job.secret -- \\
    --hexi-plan plan.yaml --hexi-cluster cluster.yaml --save checkpoints --save-interval 50 …
"""


class _OneLineParser(argparse.ArgumentParser):
    """A parser whose errors are one line."""

    def error(self, message: str) -> NoReturn:
        """Raise a `HexiError`."""
        raise HexiError(f"{printable(message.removeprefix('argument '))[:300]}; see {self.prog} --help")


@dataclass(frozen=True)
class _ValueKind:
    """A kind of option values: name in the help, what to give, and a parser; ``None``: invalid text."""

    metavar: str
    wanted: str
    value: Callable[[str], object]

    def __call__(self, text: str) -> object:
        value = self.value(text)
        if value is None:
            raise argparse.ArgumentTypeError(f"{text[:40]!r}: give {self.wanted}")
        return value


def _whole(least: int, most: int) -> _ValueKind:
    def value(text: str) -> int | None:
        number = whole_number(text)
        return number if number is not None and least <= number <= most else None

    return _ValueKind("N", f"a whole number from {least} to {most}", value)


def _seconds(least: int, most: int) -> _ValueKind:
    def value(text: str) -> float | None:
        number = float(text) if re.fullmatch(r"[0-9]{1,12}(\.[0-9]{1,12})?", text) else -1.0
        return number if least <= number <= most else None

    return _ValueKind("SECONDS", f"{least} to {most} seconds", value)


def _text(metavar: str, pattern: str, wanted: str) -> _ValueKind:
    return _ValueKind(
        metavar, wanted, lambda text: text if text.isprintable() and re.fullmatch(pattern, text) else None
    )


def _endpoint(text: str) -> tuple[str, int] | None:
    name, _, digits = text.rpartition(":")
    host, port = name.removeprefix("[").removesuffix("]"), whole_number(digits)
    return (host, port) if re.fullmatch(_HOST, host) and port is not None and 0 < port < 2**16 else None


def _nodes(text: str) -> tuple[int, int] | None:
    first, colon, last = text.partition(":")
    least, most = whole_number(first), whole_number(last if colon else first)
    if least is None or most is None or not 0 < least <= most <= _MOST_NODES:
        return None
    return least, most


_HOST = r"[A-Za-z0-9_.:%-]{1,253}"
_ADDRESS = _text("ADDRESS", _HOST, "a host's name or address")
_PATH = _text("PATH", r".{1,4096}", "a path, or leave the option out")
_JOB = _text("NAME", r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}", "a name of letters, digits, dots and dashes")
_NODE = _text("NAME", r"\S{1,253}", "the node's name in the cluster file")
_NODES = _ValueKind("MIN:MAX", "MIN:MAX, for example 2:4", _nodes)
_ENDPOINT = _ValueKind("HOST:PORT", "HOST:PORT, for example head:29400", _endpoint)


def _parser() -> argparse.ArgumentParser:
    """Return the parser; its results have the names of `AgentSettings`."""
    parser = _OneLineParser(
        prog="python -m megatron_hexi.elastic",
        description="Train on the nodes that are present. Lost nodes are left out and new ones taken in, "
        "each time with a plan for those present, from the last checkpoint.",
        epilog=_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )

    def add(flag: str, kind: _ValueKind | None, text: str, **more: Any) -> None:
        shown = {"action": "store_true"} if kind is None else {"type": kind, "metavar": kind.metavar}
        parser.add_argument(flag, help=text, **shown, **more)

    add("--nnodes", _NODES, "the fewest and the most nodes that train")
    add("--nproc-per-node", _whole(1, 1024), "ranks of this node, one per GPU", dest="ranks")
    add("--nodes", _PATH, "HOSTS.nodes of hexi place: a host's --node, --nproc-per-node and --spare")
    add("--spare", None, "wait, with Megatron imported, until fewer than MAX nodes are left")
    store = "the job's store, which the first node on HOST serves unless --keep-store does"
    add("--rdzv-endpoint", _ENDPOINT, store, required=True)
    secret = "a secret of this job's nodes, in a file that only you may read (default: the variable "
    add("--secret-file", _PATH, secret + "HEXI_SECRET; a job of one node makes its own)")
    at = "this node's address to serve the store and copies at (default: that of HOST, and of --local-addr)"
    add("--bind", _ADDRESS, at)
    add("--rdzv-id", _JOB, "the job's name in the store (default: hexi)", dest="job", default="hexi")
    add("--keep-store", None, "serve the store at --rdzv-endpoint, and nothing else")
    add("--node", _NODE, "this node in the cluster file (default: the host's name)")
    address = "where other nodes reach this one (default: the host's full name)"
    add("--local-addr", _ADDRESS, address, dest="address", default=socket.getfqdn())
    add("--max-losses", _whole(0, 10**6), "end after so many losses (default: 100)", default=100)
    lost = "silence after which a rank counts as lost (default: 20); an ended process counts at once"
    add("--lost-after", _seconds(5, 86400), lost, dest="lost_after_s", default=20.0)  # beats twice a second
    copies = "every N iterations keep a copy of the state in the memory of two nodes (default: never)"
    add("--copy-interval", _whole(1, 10**9), copies)
    add("--copy-folder", _PATH, f"a file system in memory for copies (default: {_MEMORY})", default=_MEMORY)
    wait = "ends where fewer than MIN nodes are there for so long (default: a day)"
    add("--wait-for-nodes", _seconds(1, 366 * 86400), wait, dest="wait_s", default=86400.0)
    add("--ended", _PATH, "makes this file when the training has ended well, for scripts")
    add("--when-store-lost", _PATH, "a script that bash runs when the store is gone")
    add("--log-dir", _PATH, "write each rank's output below this folder")
    parser.add_argument(
        "--start-method",
        choices=("forkserver", "spawn"),
        default="forkserver",
        help="forkserver: ranks are forked from a process that has imported Megatron; spawn: each imports it",
    )
    script = "a training script, such as Megatron-LM's pretrain_gpt.py (default: megatron_hexi.pretrain_gpt)"
    add("--script", _PATH, script)
    arguments = "Megatron's arguments, and --hexi ones"
    parser.add_argument("words", nargs="*", metavar="-- ARGUMENTS", help=arguments)
    return parser


def _this_node(path: Path) -> tuple[str, int, bool]:
    """Return this host's node in the cluster file, its number of GPUs, and whether the node is a spare."""
    host = os.environ.get("SLURMD_NODENAME") or socket.gethostname()
    for number, line in enumerate(read_text(path).splitlines(), start=1):
        match line.split():
            case [name, node, gpus, *more] if (whole_number(gpus) or 0) > 0 and more in ([], [SPARE]):
                if name == host:
                    return node, int(gpus), more == [SPARE]
            case _:
                raise HexiError(
                    f"--nodes {path}, line {number}: {line[:80]!r} is not HOST NODE GPUS, as hexi place "
                    "writes it; write the file with hexi place"
                )
    raise HexiError(f"--nodes {path}: has no line for {host}; give what hexi place wrote for this job")


def _check_spare(options: argparse.Namespace) -> None:
    """Refuse a spare that the job could not use, which would show only in the round after a node failure."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--hexi-cluster")
    path = parser.parse_known_args(options.words)[0].hexi_cluster
    if path is None:
        raise HexiError("--spare: add --hexi-cluster cluster.yaml behind --, as on the other nodes")
    check = [sys.executable, "-m", "megatron_hexi.elastic.planning.node"]
    code = subprocess.run([*check, path, options.node, str(options.ranks)], check=False).returncode
    if code != 0:  # it has said why
        sys.exit(code)


def _check_node(options: argparse.Namespace) -> None:
    """Check that this node can listen, read and write where it is to, before anything starts."""
    for flag, path in (("--script", options.script), ("--when-store-lost", options.when_store_lost)):
        if path is not None and not os.path.isfile(path):
            raise HexiError(f"{flag} {path}: no such file; give the path of a script, or leave {flag} out")
    needs_copies = options.copy_interval is not None or options.copy_folder != _MEMORY
    for flag, path in (
        ("--ended", options.ended),
        ("--copy-folder", needs_copies and os.path.join(options.copy_folder, "copy")),
        ("--log-dir", options.log_dir and os.path.join(options.log_dir, "log")),
    ):
        if path:
            try:
                if flag == "--log-dir":
                    os.makedirs(options.log_dir, exist_ok=True)
                check_output(path)
            except OSError as problem:
                raise HexiError(
                    f"{flag} {options.log_dir}: cannot be made ({problem.strerror}); choose another folder"
                ) from None
            except HexiError as problem:
                raise HexiError(f"{flag} {problem}") from None
    if options.bind is not None:
        try:
            listen("", 0, options.bind).close()
        except OSError as problem:
            reason = (problem.strerror or "").partition(" (")[0]
            raise HexiError(
                f"--bind {options.bind}: cannot be listened at here ({reason}); give an address of this "
                "node: ip addr lists them"
            ) from None


def _read(words: list[str]) -> tuple[argparse.Namespace, AgentSettings | None]:
    options = _parser().parse_args(words)
    options.host, options.port = options.rdzv_endpoint
    if options.keep_store:
        for word in words:
            if word.startswith("--") and word.partition("=")[0] not in _OF_THE_STORE:
                raise HexiError(f"--keep-store: {word} has no effect on the store; leave {word} out")
        _check_node(options)
        options.secret = find_secret(options.secret_file, alone=False)
        return options, None
    if options.words and "--" not in words:
        raise HexiError(
            f"{options.words[0][:80]!r}: Megatron's arguments come behind --; give a script by --script"
        )
    if options.nnodes is None:
        raise HexiError("--nnodes: is missing; give MIN:MAX, for example 2:4")
    options.least, options.most = options.nnodes
    if options.nodes is not None:
        if options.node is not None or options.ranks is not None or options.spare:
            raise HexiError(
                "--nodes: its file says --node, --nproc-per-node and --spare; leave these three out"
            )
        options.node, options.ranks, options.spare = _this_node(Path(options.nodes))
    if options.ranks is None:
        raise HexiError("--nproc-per-node: is missing; give the number of GPUs of this node")
    options.node = options.node or socket.gethostname()
    _check_node(options)
    if options.spare:
        _check_spare(options)
    options.secret = find_secret(options.secret_file, alone=options.most == 1)
    options.entry, options.words = options.script or ENTRY, tuple(options.words)
    return options, AgentSettings(
        **{field.name: getattr(options, field.name) for field in fields(AgentSettings)}
    )


def _keep_store(options: argparse.Namespace) -> dist.TCPStore:
    try:
        return keep_store(options.host, options.port, options.secret, options.bind)
    except OSError:
        raise HexiError(
            f"--rdzv-endpoint {options.host}:{options.port}: the port is taken; choose another"
        ) from None


def main() -> None:
    """Run the agent of this node, or the store.

    Raises:
        SystemExit: with 2 where the input is wrong, here or on a rank; 1 where the job could not go on.
    """
    with user_errors():
        options, launch = _read(sys.argv[1:])
        if launch is None:
            store = _keep_store(options)
            print(f"hexi: keeps the store at {options.host}:{options.port}", file=sys.stderr, flush=True)
            while store is not None:
                time.sleep(3600)
        else:
            sys.exit(run_agent(launch))


# Ranks, and their helpers, import this module again.
if __name__ == "__main__":
    main()
