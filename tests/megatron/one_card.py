"""Training of several ranks on one GPU, started like `tests.megatron.forked`'s runs on the CPU.

NCCL refuses two ranks of one host on one card, and takes each rank for a host of its own where `NCCL_HOSTID`
says so: messages go through sockets then. What is above the wire is as on a cluster; times mean nothing.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.one_gpu import PLAIN
from megatron_hexi.testbed.ports import free_port
from tests.megatron.forked import ENTRY, GRACE, Outcome, Trainer
from tests.megatron.launch import environment

#: What lets NCCL connect ranks of one card.
_APART = {"NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1", "NCCL_MAX_NCHANNELS": "1"}


class OneCard(Trainer):
    """Runs all ranks of a job on the first GPU."""

    words = (*PLAIN, "--hexi-platform", "cuda")

    def launch(
        self,
        folder: Path,
        *,
        ranks: int,
        args: Sequence[str | Path],
        entry: str = ENTRY,
        timeout: float = 200.0,
    ) -> Outcome:
        """As of `Trainer`."""
        folder.mkdir(parents=True, exist_ok=True)
        # torchrun would give each rank a card of its own.
        shared = environment() | _APART
        shared |= {"CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES", "0")}
        shared |= {"CUDA_DEVICE_MAX_CONNECTIONS": "1", "TORCHDYNAMO_DISABLE": "1", "LOCAL_RANK": "0"}
        shared |= {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        command = [sys.executable, "-m", entry, *map(str, args)]
        logs = [folder / f"rank-{rank}.log" for rank in range(ranks)]
        processes = []
        for rank, path in enumerate(logs):
            own = {"RANK": str(rank), "GROUP_RANK": str(rank), "NCCL_HOSTID": f"rank-{rank}"}
            with path.open("wb") as log:
                processes.append(
                    subprocess.Popen(command, cwd=folder, env=shared | own, stdout=log, stderr=log)
                )
        deadline = time.monotonic() + timeout
        while any(process.poll() is None for process in processes) and time.monotonic() < deadline:
            time.sleep(0.1)
            if any(process.returncode for process in processes):
                deadline = min(deadline, time.monotonic() + GRACE)
        late = [process for process in processes if process.poll() is None]
        for process in late:
            process.kill()
            process.wait()
        codes = [None if process in late else process.returncode for process in processes]
        return Outcome(codes, [log.read_text(errors="replace") for log in logs])
