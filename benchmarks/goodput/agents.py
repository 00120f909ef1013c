"""The nodes of a job on this machine: each is an agent with its ranks, in a process group of its own."""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Self

import psutil
import torch.distributed as dist

from benchmarks.goodput.job import NODES, GoodputJob
from benchmarks.goodput.paced_rank import CLUSTER_VARIABLE
from megatron_hexi.elastic.channel import SECRET_VARIABLE
from megatron_hexi.elastic.launcher.job_store import keep_store
from megatron_hexi.lab.testbed.isolation import raise_priority
from megatron_hexi.lab.testbed.job import free_port

_SCRIPT = Path(__file__).with_name("paced_rank.py")
#: File in the working directory to which ranks write each iteration.
METRICS = "metrics.jsonl"
_RESTARTS = "100"
#: Silence of a rank that `megatron_hexi.elastic` takes for its loss, seconds.
LOST_AFTER_S = 8
#: Command of a node's agent: from the job's store's port, the node's name and its number of ranks.
Command = Callable[[int, str, int], list[str]]


def elastic(folder: Path, copy_interval: int) -> Command:
    """Return the command of `megatron_hexi.elastic`, with copies in memory."""
    memory = folder / "memory"
    memory.mkdir()

    def command(port: int, node: str, ranks: int) -> list[str]:
        return [
            *("-m", "megatron_hexi.elastic", "--nnodes", f"1:{len(NODES)}", "--nproc-per-node", str(ranks)),
            *("--rdzv-endpoint", f"localhost:{port}", "--node", node, "--local-addr", "localhost"),
            *("--copy-interval", str(copy_interval), "--copy-folder", str(memory)),
            *("--lost-after", str(LOST_AFTER_S), "--max-losses", _RESTARTS, "--script", str(_SCRIPT), "--"),
        ]

    return command


def torchrun(port: int, _node: str, ranks: int) -> list[str]:
    """Return the command of torchrun, which starts all ranks again and waits for all nodes."""
    return [
        *("-m", "torch.distributed.run", "--nnodes", str(len(NODES)), "--nproc-per-node", str(ranks)),
        *("--rdzv-backend", "c10d", "--rdzv-endpoint", f"localhost:{port}", "--rdzv-id", "goodput"),
        *("--rdzv-conf", "is_host=0", "--local-addr", "localhost", "--max-restarts", _RESTARTS),
        *("-m", "megatron_hexi.run", str(_SCRIPT)),
    ]


class Agents:
    """A job's agents, and its store, which is kept here; a context manager that ends them.

    Args:
        folder: working directory of the agents; their output goes there.
        command: command of an agent.
        job: the job.
        is_elastic: whether the store is that of `megatron_hexi.elastic`, which asks for a secret.
    """

    def __init__(self, folder: Path, command: Command, job: GoodputJob, is_elastic: bool) -> None:
        self._folder, self._command = folder, command
        self._words = (*job.words, "--hexi-metrics", str(folder / METRICS))
        if is_elastic:
            self._words += ("--hexi-cluster", str(job.cluster))
        self._port, secret = free_port(), secrets.token_hex(32)
        if is_elastic:
            self._store = keep_store("localhost", self._port, secret.encode())
        else:
            self._store = dist.TCPStore("localhost", self._port, is_master=True, wait_for_workers=False)
        # Without the last one, agents of PyTorch 2.14 share a store whose address later rounds are not told.
        self._environment = os.environ | {
            SECRET_VARIABLE: secret,
            CLUSTER_VARIABLE: str(job.cluster),
            "OMP_NUM_THREADS": "1",
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        }
        self.running: dict[str, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        for node in list(self.running):
            self.kill(node)

    def start(self, node: str) -> None:
        """Start a node, or start it again."""
        command = self._command(self._port, node, NODES[node])
        with (self._folder / f"{node}.log").open("ab") as log:
            self.running[node] = subprocess.Popen(
                [sys.executable, *command, *self._words],
                cwd=self._folder,
                env=self._environment,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        raise_priority(self.running[node].pid)

    def kill(self, node: str) -> None:
        """End a node with all that runs there, as the loss of its power does."""
        agent = self.running.pop(node)
        ranks = self.ranks(node, agent)  # torchrun's have sessions of their own
        with contextlib.suppress(ProcessLookupError):
            os.killpg(agent.pid, signal.SIGKILL)
        for rank in ranks:
            with contextlib.suppress(psutil.NoSuchProcess):
                rank.kill()
        agent.wait()

    def ranks(self, node: str, agent: subprocess.Popen[bytes] | None = None) -> list[psutil.Process]:
        """Return the processes of a node's ranks."""
        with contextlib.suppress(psutil.NoSuchProcess):
            children = psutil.Process((agent or self.running[node]).pid).children()
            servers = [child for child in children if "forkserver" in " ".join(child.cmdline())]
            trackers = [child for child in children if "resource_tracker" in " ".join(child.cmdline())]
            alone = [child for child in children if child not in trackers]
            return [rank for server in servers for rank in server.children()] if servers else alone
        return []

    def said(self, pattern: str = "*.log") -> str:
        """Return what the agents and ranks of all nodes have printed."""
        return "".join(path.read_text(errors="replace") for path in sorted(self._folder.glob(pattern)))
