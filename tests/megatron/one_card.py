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

from megatron_hexi.plan import Plan, write_plan
from megatron_hexi.testbed.ports import free_port
from tests.megatron.forked import ENTRY, GRACE, Outcome
from tests.megatron.launch import REPOSITORY, TrainingLog, read_metrics

#: Megatron's defaults that need apex or Transformer Engine, which a GPU machine may lack.
PLAIN = (
    *("--transformer-impl", "local", "--no-rope-fusion", "--no-masked-softmax-fusion"),
    *("--no-persist-layer-norm", "--no-gradient-accumulation-fusion"),
)

#: What lets NCCL connect ranks of one card.
_APART = {"NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1", "NCCL_MAX_NCHANNELS": "1"}


class OneCard:
    """Runs all ranks of a job on the first GPU."""

    def launch(
        self,
        folder: Path,
        *,
        ranks: int,
        args: Sequence[str | Path],
        entry: str = ENTRY,
        timeout: float = 120.0,
    ) -> Outcome:
        """Run an entry point on some ranks, and come back however they ended; as `Forks.launch`."""
        folder.mkdir(parents=True, exist_ok=True)
        # torchrun would give each rank a card of its own.
        shared = {**os.environ, **_APART, "WORLD_SIZE": str(ranks), "LOCAL_RANK": "0"}
        shared |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        shared |= {"OMP_NUM_THREADS": "1", "CUDA_DEVICE_MAX_CONNECTIONS": "1", "TORCHDYNAMO_DISABLE": "1"}
        shared["PYTHONPATH"] = os.pathsep.join(filter(None, [str(REPOSITORY), os.environ.get("PYTHONPATH")]))
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

    def train(
        self,
        folder: Path,
        *,
        ranks: int,
        args: Sequence[str | Path],
        plan: Plan | None = None,
        entry: str = ENTRY,
        timeout: float = 120.0,
    ) -> TrainingLog:
        """Train and read the metrics; as `Forks.train`.

        Raises:
            AssertionError: the run failed; the message holds the end of its output.
        """
        folder.mkdir(parents=True, exist_ok=True)
        metrics = folder / f"metrics-{len(list(folder.glob('metrics-*.jsonl')))}.jsonl"
        metrics.touch()
        words = [*args, *PLAIN, "--hexi-platform", "cuda", "--hexi-metrics", metrics]
        if plan is not None:
            path = metrics.with_suffix(".plan.yaml")
            write_plan(plan, path)
            words += ["--hexi-plan", path]
        outcome = self.launch(folder, ranks=ranks, args=words, entry=entry, timeout=timeout)
        assert outcome.succeeded, outcome.why()
        return read_metrics(metrics, "".join(outcome.output))
