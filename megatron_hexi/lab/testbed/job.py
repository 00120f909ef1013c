"""A job in the lab: one torchrun a node, followed to its end."""

from __future__ import annotations

import json
import os
import random
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_hexi.cluster import Cluster
from megatron_hexi.lab.testbed.isolation import command_prefix, within
from megatron_hexi.lab.testbed.lab import Lab
from megatron_hexi.lab.testbed.network import node_address, node_namespace

#: Below those that Linux hands out to whoever asks for any (`ip_local_port_range`, from 32768): between
#: choosing a port and listening at it, sockets of other jobs cannot take one of these.
_PORTS = range(20000, 32768)


def free_port() -> int:
    """Return a port of this machine that nobody listens at."""
    choose = random.SystemRandom()  # seeds of a test or a job must not give two jobs the same
    while True:
        port = choose.choice(_PORTS)
        try:
            with socket.create_server(("127.0.0.1", port)):
                return port
        except OSError:
            continue


_POLL_S = 0.1
_GRACE_S = 5.0
_TAIL_LINES = 20

_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",  # a rank is a device; several threads would fight for the cores
    "CUDA_VISIBLE_DEVICES": "",
    "PYTHONUNBUFFERED": "1",
    # Keep freed memory: giving megabytes back to the system at every step costs more than computing on them.
    "MALLOC_TRIM_THRESHOLD_": "1000000000",
    "MALLOC_MMAP_THRESHOLD_": "1000000000",
}


@dataclass(frozen=True)
class Ended:
    """The outcome of a job.

    Args:
        code: the exit code of the rank that failed first, torchrun's if no rank has said why, or 0.
        records: record of each rank; ``None`` for a rank that was killed.
    """

    code: int
    records: list[dict[str, Any] | None]
    failure: str = ""


def run_job(lab: Lab, cluster: Cluster, name: str, program: Sequence[str], *, show: bool) -> Ended:
    """Run a program on all ranks of the lab."""
    count = len(lab.gpus)
    logs = [lab.log(name, rank) for rank in sorted({0, count - 1})] if show else []
    port = 29500 if lab.links else free_port()
    with _started(lab, cluster, name, program, port) as nodes, _followed(logs) as follow:
        while (codes := [node.poll() for node in nodes]).count(None) and not any(codes):
            follow()
            time.sleep(_POLL_S)
    code = next((code for code in codes if code), 0)
    paths = [lab.record(name, rank) for rank in range(count)]
    records = [json.loads(path.read_text()) if path.exists() else None for path in paths]
    return _explain(lab, cluster, name, records, shown=logs) if code else Ended(0, records)


@contextmanager
def _started(
    lab: Lab, cluster: Cluster, name: str, program: Sequence[str], port: int
) -> Iterator[list[subprocess.Popen[bytes]]]:
    nodes: list[subprocess.Popen[bytes]] = []
    try:
        for place in range(len(_used_nodes(lab, cluster))):
            nodes.append(_start_node(lab, cluster, name, program, port, place))
        yield nodes
    finally:
        for node in nodes:
            node.terminate()
        deadline = time.monotonic() + _GRACE_S
        for node in nodes:
            try:
                node.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                node.kill()
                node.wait()


def _start_node(
    lab: Lab, cluster: Cluster, name: str, program: Sequence[str], port: int, place: int
) -> subprocess.Popen[bytes]:
    used = _used_nodes(lab, cluster)
    number, first = list(used)[place], next(iter(used))
    address, master = (node_address(number), node_address(first)) if lab.links else ("127.0.0.1",) * 2
    options = {
        "--nnodes": len(used),
        "--node-rank": place,
        "--nproc-per-node": used[number],
        "--master-addr": master,
        "--master-port": port,
        "--local-addr": address,
    }
    words = [str(word) for option in options.items() for word in option]
    rank = ("-m", "megatron_hexi.lab.testbed.in_rank.rank", str(lab.folder), name)
    # Where the lab has no namespaces, nothing but its parent's death ends a process with the lab.
    prefix = command_prefix("none") if lab.isolation == "none" else []
    command = [*prefix, sys.executable, "-m", "torch.distributed.run", *words, *rank, *program]
    interface = {"GLOO_SOCKET_IFNAME": "eth0" if lab.links else "lo"}

    def start() -> subprocess.Popen[bytes]:
        with (lab.folder / f"{name}-node-{number}.log").open("wb") as log:
            return subprocess.Popen(
                command,
                env=os.environ | _ENVIRONMENT | interface,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    return within(node_namespace(number), start) if lab.links else start()


def _used_nodes(lab: Lab, cluster: Cluster) -> Counter[int]:
    """Return the number of the job's ranks on each node, in order; without nodes that have none."""
    return Counter(cluster.ranks[gpu].node for gpu in lab.gpus)


@contextmanager
def _followed(logs: Sequence[Path]) -> Iterator[Any]:
    """Yield a function that prints what was appended to these files, called once more at the end."""
    read = dict.fromkeys(logs, 0)

    def follow() -> None:
        for path in logs:
            if path.exists():
                with path.open("rb") as file:
                    file.seek(read[path])
                    new = file.read()
                whole = new[: new.rfind(b"\n") + 1]
                read[path] += len(whole)
                sys.stdout.buffer.write(whole)
        sys.stdout.flush()

    try:
        yield follow
    finally:
        follow()


def _explain(
    lab: Lab, cluster: Cluster, name: str, records: list[dict[str, Any] | None], shown: Sequence[Path]
) -> Ended:
    """Return the rank that failed first, with the end of its log if that was not shown yet."""
    failed = [(rank, record) for rank, record in enumerate(records) if record and record["exit_code"]]
    if not failed:
        logs = ", ".join(str(lab.folder / f"{name}-node-{n}.log") for n in _used_nodes(lab, cluster))
        return Ended(1, records, f"the job failed, and no rank has said why; see {logs}")
    rank, first = min(failed, key=lambda item: item[1]["ended"])
    gpu, code = lab.gpus[rank], first["exit_code"]
    device = cluster.ranks[gpu].device
    log = lab.log(name, rank)
    who = f"rank {rank} ({cluster.rank_name(gpu)})"
    if first.get("out_of_memory"):
        limit = f"{device.name} has {device.usable_gib:g} GiB (RLIMIT_DATA {first['memory_limit']} bytes)"
        return Ended(code, records, f"{who} is out of memory: {limit}; see {log}, or plan for less memory")
    if log in shown:
        return Ended(code, records, f"{who} ended with exit code {code}; see above and {log}")
    tail = "\n".join(log.read_text(errors="replace").splitlines()[-_TAIL_LINES:])
    return Ended(code, records, f"{who} ended with exit code {code}; the end of {log}:\n{tail}")
