"""The command line of ``python -m megatron_hexi.elastic``, one call a node."""

from __future__ import annotations

import argparse
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import torch.distributed as dist

from megatron_hexi.elastic.launcher.agent import AgentSettings, run_agent
from megatron_hexi.elastic.launcher.job_store import keep_store
from megatron_hexi.elastic.launcher.ranks import ENTRY
from megatron_hexi.elastic.secret import find_secret
from megatron_hexi.elastic.store import SPARE
from megatron_hexi.errors import HexiError, user_errors
from megatron_hexi.text_file import read_text

_EXAMPLE = """\
Example, on each of four nodes; two of them suffice. The first line, once, makes the job's secret:
  (umask 077; openssl rand -hex 32 > job.secret)
  python -m megatron_hexi.elastic --nnodes 2:4 --nproc-per-node 8 --rdzv-endpoint head:29400 \\
    --secret-file job.secret -- \\
    --hexi-plan plan.yaml --hexi-cluster cluster.yaml --save checkpoints --save-interval 50 …
"""


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m megatron_hexi.elastic",
        description="Train on the nodes that are present. Lost nodes are left out and new ones taken in, "
        "each time with a plan for those present, from the last checkpoint.",
        epilog=_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--nnodes", metavar="MIN:MAX", help="the fewest and the most nodes that train")
    parser.add_argument("--nproc-per-node", type=int, metavar="N", help="ranks of this node, one a GPU")
    parser.add_argument(
        "--nodes",
        metavar="PATH",
        help="HOSTS.nodes of hexi place: says --node, --nproc-per-node and --spare of each host",
    )
    parser.add_argument(
        "--spare",
        action="store_true",
        help="wait, with Megatron imported, until fewer than MAX nodes are left",
    )
    parser.add_argument(
        "--rdzv-endpoint",
        required=True,
        metavar="HOST:PORT",
        help="the job's store, which the first node on HOST serves unless --keep-store does",
    )
    parser.add_argument(
        "--secret-file",
        metavar="PATH",
        help="a secret of this job's nodes, in a file that only you may read (default: the variable "
        "HEXI_SECRET; a job of one node makes its own)",
    )
    parser.add_argument(
        "--bind",
        metavar="ADDRESS",
        help="this node's address to serve the store and copies at (default: that of HOST, and of "
        "--local-addr)",
    )
    parser.add_argument(
        "--rdzv-id", default="hexi", metavar="NAME", help="the job's name in the store (default: hexi)"
    )
    parser.add_argument(
        "--keep-store", action="store_true", help="serve the store at --rdzv-endpoint, and nothing else"
    )
    parser.add_argument(
        "--node",
        default=socket.gethostname(),
        metavar="NAME",
        help="this node in the cluster file (default: the host's name)",
    )
    parser.add_argument(
        "--local-addr",
        default=socket.getfqdn(),
        metavar="ADDRESS",
        help="where other nodes reach this one (default: the host's full name)",
    )
    parser.add_argument(
        "--max-losses", type=int, default=100, metavar="N", help="end after so many losses (default: 100)"
    )
    parser.add_argument(
        "--lost-after",
        type=float,
        default=20.0,
        metavar="SECONDS",
        help="silence after which a rank counts as lost (default: 20); an ended process counts at once",
    )
    parser.add_argument(
        "--copy-interval",
        type=int,
        metavar="N",
        help="every N iterations keep a copy of the state in the memory of two nodes (default: never)",
    )
    parser.add_argument(
        "--copy-folder",
        default="/dev/shm",
        metavar="PATH",
        help="a file system in memory for copies (default: /dev/shm)",
    )
    parser.add_argument(
        "--wait-for-nodes",
        type=float,
        default=86400.0,
        metavar="SECONDS",
        help="ends where fewer than MIN nodes are there for so long (default: a day)",
    )
    parser.add_argument(
        "--ended", metavar="PATH", help="makes this file when the training has ended well, for scripts"
    )
    parser.add_argument(
        "--when-store-lost", metavar="PATH", help="a script that bash runs when the store is gone"
    )
    parser.add_argument("--log-dir", metavar="PATH", help="write each rank's output below this folder")
    parser.add_argument(
        "--start-method",
        choices=("forkserver", "spawn"),
        default="forkserver",
        help="forkserver: ranks are forked from a process that has imported Megatron; spawn: each imports it",
    )
    parser.add_argument(
        "--script",
        metavar="PATH",
        help="a training script, such as Megatron-LM's pretrain_gpt.py (default: megatron_hexi.pretrain_gpt)",
    )
    parser.add_argument(
        "words", nargs="*", metavar="-- ARGUMENTS", help="Megatron's arguments, and --hexi ones"
    )
    return parser


def _this_node(path: Path) -> tuple[str, int, bool]:
    """Return this host's node in the cluster file, its number of GPUs, and whether it is a spare."""
    host = os.environ.get("SLURMD_NODENAME") or socket.gethostname()
    for number, line in enumerate(read_text(path).splitlines(), start=1):
        match line.split():
            case [name, node, gpus, *more] if gpus.isdecimal() and more in ([], [SPARE]):
                if name == host:
                    return node, int(gpus), more == [SPARE]
            case _:
                raise HexiError(f"--nodes {path}, line {number}: {line[:80]!r} is no line of hexi place")
    raise HexiError(f"--nodes {path}: has no line for {host}; give what hexi place wrote for this job")


def _check_spare(options: argparse.Namespace) -> None:
    """Refuse a spare that the job could not use, which would show in no earlier round than a loss's."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--hexi-cluster")
    path = parser.parse_known_args(options.words)[0].hexi_cluster
    if path is None:
        raise HexiError("--spare: add --hexi-cluster cluster.yaml behind --, as on the other nodes")
    check = [sys.executable, "-m", "megatron_hexi.elastic.planning.node"]
    code = subprocess.run([*check, path, options.node, str(options.nproc_per_node)], check=False).returncode
    if code != 0:  # it has said why
        sys.exit(code)


def _read(words: list[str]) -> tuple[argparse.Namespace, AgentSettings | None]:
    options = _parser().parse_args(words)
    host, _, port = options.rdzv_endpoint.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 2**16:
        raise HexiError(f"--rdzv-endpoint {options.rdzv_endpoint}: give HOST:PORT, for example head:29400")
    options.host, options.port = host, int(port)
    if options.keep_store:
        options.secret = find_secret(options.secret_file, alone=False)
        return options, None
    least, _, most = (options.nnodes or "").partition(":")
    most = most or least
    if not (least.isdecimal() and most.isdecimal() and 0 < int(least) <= int(most)):
        raise HexiError(f"--nnodes {options.nnodes}: give MIN:MAX, for example 2:4")
    if options.nodes is not None:
        options.node, options.nproc_per_node, options.spare = _this_node(Path(options.nodes))
    if options.nproc_per_node is None or options.nproc_per_node < 1:
        raise HexiError(f"--nproc-per-node {options.nproc_per_node}: give the number of GPUs of this node")
    if options.lost_after < 5:
        raise HexiError(
            f"--lost-after {options.lost_after:g}: heartbeats come twice a second; give 5 or more"
        )
    if options.copy_interval is not None and options.copy_interval < 1:
        raise HexiError(f"--copy-interval {options.copy_interval}: give 1 or more iterations")
    if not os.access(options.copy_folder, os.W_OK):
        raise HexiError(f"--copy-folder {options.copy_folder}: no folder that can be written in")
    if options.script is not None and not os.path.isfile(options.script):
        raise HexiError(f"--script {options.script}: no such training script")
    if options.spare:
        _check_spare(options)
    return options, AgentSettings(
        least=int(least),
        most=int(most),
        spare=options.spare,
        ranks=options.nproc_per_node,
        host=host,
        port=int(port),
        secret=find_secret(options.secret_file, alone=int(most) == 1),
        bind=options.bind,
        job=options.rdzv_id,
        node=options.node,
        address=options.local_addr,
        max_losses=options.max_losses,
        lost_after_s=options.lost_after,
        wait_s=options.wait_for_nodes,
        ended=options.ended,
        when_store_lost=options.when_store_lost,
        copy_interval=options.copy_interval,
        copy_folder=options.copy_folder,
        log_dir=options.log_dir,
        start_method=options.start_method,
        entry=options.script or ENTRY,
        words=tuple(options.words),
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
