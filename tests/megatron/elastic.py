"""Nodes of an elastic job on this machine: each is an agent with its ranks, started and killed by itself."""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import psutil
import torch.distributed as dist

from megatron_hexi.elastic.channel import SECRET_VARIABLE
from megatron_hexi.elastic.copies import CopyBoard
from megatron_hexi.elastic.launcher.job_store import keep_store
from megatron_hexi.elastic.store import DECISION, read_present
from megatron_hexi.lab.testbed.job import free_port
from tests.megatron.launch import environment, read_metrics
from tests.support.clocks import Clock
from tests.support.links import HERE, Links


class ElasticJob:
    """A job whose store is kept here.

    Args:
        folder: the working directory, with the files that the arguments name.
        nodes: MIN:MAX.
        args: of the training.
        ranks: of each node that has more than one.
        launcher: more options of the launcher.
        links: of the nodes; without, all are this machine.
        spares: names of the nodes that wait until others are lost.
        clocks: of the nodes whose clock is not this machine's.
    """

    def __init__(
        self,
        folder: Path,
        nodes: str,
        args: Sequence[str | Path],
        ranks: Mapping[str, int] | None = None,
        launcher: Sequence[str] = (),
        links: Links | None = None,
        spares: Sequence[str] = (),
        clocks: Mapping[str, Clock] | None = None,
    ) -> None:
        self._folder, self._nodes, self._ranks, self._launcher = folder, nodes, ranks or {}, launcher
        self._links, self._spares, self._clocks = links, spares, clocks or {}
        self._metrics = folder / "metrics.jsonl"
        self._metrics.touch()
        self._args = [*map(str, args), "--hexi-metrics", str(self._metrics)]
        port = free_port()
        self.secret = secrets.token_hex(32)
        self._store = keep_store(HERE if links else "localhost", port, self.secret.encode())
        self.port = port
        self._memory = folder / "memory"
        self._memory.mkdir()
        self.agents: dict[str, subprocess.Popen] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        for name in list(self.agents):
            self.kill(name)

    def start(self, *names: str) -> None:
        """Start nodes, or start them again."""
        for name in names:
            ranks = str(self._ranks.get(name, 1))
            words = ["--nnodes", self._nodes, "--nproc-per-node", ranks, "--node", name]
            within, here, there = [], "localhost", "localhost"
            own = environment() | {SECRET_VARIABLE: self.secret}
            if self._links is not None:
                within, here, there = self._links.within(name), HERE, self._links.address(name)
                own |= {"GLOO_SOCKET_IFNAME": "eth0"}
            if name in self._clocks:
                own |= self._clocks[name].environment
            words += [
                "--rdzv-endpoint",
                f"{here}:{self.port}",
                "--local-addr",
                there,
                "--copy-folder",
                str(self._memory),
                *self._launcher,
                *(("--spare",) if name in self._spares else ()),
            ]
            with self._log(name).open("ab") as log:
                self.agents[name] = subprocess.Popen(
                    [*within, sys.executable, "-m", "megatron_hexi.elastic", *words, "--", *self._args],
                    cwd=self._folder,
                    env=own,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )

    def rank(self, name: str) -> psutil.Process:
        """The process of a node's first rank: a child of the fork server."""
        process = self.rank_or_none(name)
        assert process is not None
        return process

    def rank_or_none(self, name: str) -> psutil.Process | None:
        """The process of a node's first rank; ``None`` between two rounds."""
        with contextlib.suppress(psutil.NoSuchProcess):  # one of them has just ended
            agent = psutil.Process(self.agents[name].pid)
            servers = [child for child in agent.children() if "forkserver" in " ".join(child.cmdline())]
            return next((child for server in servers for child in server.children()), None)
        return None

    def kill(self, name: str) -> None:
        """End a node with all that runs there, as the loss of its power does."""
        agent = self.agents.pop(name)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(agent.pid, signal.SIGKILL)
        agent.wait()

    def said(self, *names: str) -> str:
        """What nodes printed; all that were ever started without names."""
        logs = [self._log(name) for name in names] or sorted(self._folder.glob("node-*.log"))
        return "".join(log.read_text(errors="replace") for log in logs if log.exists())

    def told(self, what: str, *names: str) -> list[str]:
        """The lines of ours that match."""
        return [line for line in self.said(*names).splitlines() if re.search(f"hexi: .*{what}", line)]

    def rounds(self) -> list[str]:
        """What was said of each round, in their order."""
        lines = self.told(r"elastic: round \d+:")
        return sorted(lines, key=lambda line: int(re.findall(r"round (\d+)", line)[0]))

    def lines(self) -> int:
        """Iterations done by now, those that were done again included."""
        return self._metrics.read_bytes().count(b"\n")

    def losses(self) -> list[tuple[int, float]]:
        """Of every iteration that was done, in the order of their doing."""
        log = read_metrics(self._metrics, "")
        return list(zip(log.iterations, log.losses, strict=True))

    def wait(self, until: Callable[[], object], timeout: float = 240) -> float:
        """Wait for something; says how long it took, in seconds."""
        begun = time.monotonic()
        while not until():
            assert time.monotonic() - begun < timeout, self.said()[-4000:]
            assert any(agent.poll() is None for agent in self.agents.values()), self.said()[-4000:]
            time.sleep(0.05)
        return time.monotonic() - begun

    def wait_for_end(self, timeout: float = 240) -> dict[str, int]:
        """The exit code of each node."""
        return {name: agent.wait(timeout) for name, agent in self.agents.items()}

    def safe_copy(self) -> int:
        """The iteration of the newest copy that is on two nodes each; 0: there is none."""
        store = dist.PrefixStore("hexi.hexi", self._store)
        if not store.check(["copies/round"]):
            return 0
        return CopyBoard(store, store.get("copies/round").decode()).safe() or 0

    def decisions(self) -> list[dict[str, Any]]:
        """Return rank 0's decisions for the rounds up to the present one whose copies were loaded, in order.

        Each has the nodes, the plan, the places of its ranks, and the copy that was loaded.
        """
        found: list[dict[str, Any]] = []
        name = read_present(dist.PrefixStore("hexi.hexi", self._store)).round
        while name:
            found.insert(0, json.loads(dist.PrefixStore(name, self._store).get(DECISION)))
            name = (found[0]["copy"] or {}).get("name", "")
        return found

    def moved(self) -> list[tuple[float, float]]:
        """MB that came from other nodes to load each round's copy, and the least that had to."""
        pattern = r"iteration (\d+) begins .*; ([\d.]+) MB of the state came from other nodes, of ([\d.]+) MB"
        lines = sorted(
            (int(begin), float(came), float(least)) for begin, came, least in re.findall(pattern, self.said())
        )
        return [(came, least) for _, came, least in lines]

    def folders_in_memory(self) -> list[Path]:
        """The folders for copies of all nodes, those that were killed included until another one starts."""
        return list(self._memory.iterdir())

    def _log(self, name: str) -> Path:
        return self._folder / f"node-{name}.log"


def whole(save: Path) -> list[Path]:
    """The complete checkpoints, oldest first."""
    return sorted(path for path in save.glob("iter_*") if (path / "metadata.json").exists())


def tear(save: Path) -> int:
    """Leave the newest checkpoint as a kill in the middle of saving does; says which iteration it was."""
    newest = whole(save)[-1]
    (newest / "metadata.json").unlink()
    (newest / ".metadata").write_bytes(b"")
    (save / "latest_checkpointed_iteration.txt").write_text("")
    return int(newest.name.removeprefix("iter_"))
