"""Ranks of a job that share one GPU, or the CPU.

NCCL refuses two ranks of one host on one card, and takes each rank for a host of its own where `NCCL_HOSTID`
says so: messages go through sockets then.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from megatron_hexi.lab.testbed.job import free_port
from megatron_hexi.runtime.kernels.aten import torchs_cudnn

#: In place of Megatron's defaults that need apex or Transformer Engine.
PLAIN = (
    *("--transformer-impl", "local", "--no-rope-fusion", "--no-masked-softmax-fusion"),
    *("--no-persist-layer-norm", "--no-gradient-accumulation-fusion"),
)
#: Seconds that the other ranks have to end after one has failed.
GRACE_S = 5.0
_REPOSITORY = Path(__file__).parents[2]
#: What lets NCCL connect ranks of one card.
_APART = {
    "NCCL_SOCKET_IFNAME": "lo",
    "NCCL_IB_DISABLE": "1",
    "NCCL_SOCKET_NTHREADS": "4",
    "NCCL_NSOCKS_PERTHREAD": "4",
}


@dataclass(frozen=True)
class Ended:
    """Exit codes and logs of the ranks of a job.

    Args:
        codes: exit code of each; ``None`` of one that was killed because it was late.
        logs: what each printed.
    """

    codes: list[int | None]
    logs: list[str]

    @property
    def succeeded(self) -> bool:
        """Whether all ended with 0."""
        return not any(code != 0 for code in self.codes)

    def why(self, length: int = 3000) -> str:
        """The end of what the first rank to fail printed; others only say that it is gone."""
        failed = [log for log, code in zip(self.logs, self.codes, strict=True) if code not in (0, None)]
        telling = [log for log in failed if "Connection closed by peer" not in log[-2000:]]
        return f"exit codes {self.codes}:\n" + (telling or failed or self.logs)[0][-length:]


class Ranks:
    """Processes of one job, which import at once and run when told.

    Args:
        folder: their working directory, made where it is missing; logs go there.
        entry: the module whose `main` they call.
        words: its arguments.
        ranks: how many there are.
        environment: further variables of each rank.
    """

    def __init__(
        self,
        folder: Path,
        entry: str,
        words: Sequence[object],
        ranks: int = 1,
        environment: Sequence[Mapping[str, str]] | None = None,
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        shared = os.environ | _APART | {"PYTHONPATH": _first("PYTHONPATH", str(_REPOSITORY))}
        # Transformer Engine loads the system's cuDNN first, and torch refuses one that is older than its own.
        shared |= {"LD_LIBRARY_PATH": _first("LD_LIBRARY_PATH", torchs_cudnn()), "OMP_NUM_THREADS": "1"}
        # torchrun would give each rank a card of its own.
        shared |= {"CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES", "0")}
        shared |= {"CUDA_DEVICE_MAX_CONNECTIONS": "1", "LOCAL_RANK": "0", "WORLD_SIZE": str(ranks)}
        shared |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        command = [sys.executable, "-m", "benchmarks.one_gpu.standby", entry, *map(str, words)]
        self.folder = folder
        self._logs = [folder / f"rank-{rank}.log" for rank in range(ranks)]
        self._processes = []
        for rank, path in enumerate(self._logs):
            own = {"RANK": str(rank), "GROUP_RANK": str(rank), "NCCL_HOSTID": f"rank-{rank}"}
            more = environment[rank] if environment else {}
            with path.open("wb") as log:
                self._processes.append(
                    subprocess.Popen(
                        command,
                        cwd=folder,
                        env={**shared, **own, **more},
                        stdin=subprocess.PIPE,
                        stdout=log,
                        stderr=log,
                        start_new_session=True,
                    )
                )

    def run(self, timeout_s: float) -> Ended:
        """Let all ranks run, and come back however they ended.

        Args:
            timeout_s: seconds after which all are killed.
        """
        for process in self._processes:
            assert process.stdin is not None
            try:
                process.stdin.write(b"run\n")
                process.stdin.close()
            except BrokenPipeError:
                continue  # it ended while it imported; its exit code says so
        deadline = time.monotonic() + timeout_s
        while any(process.poll() is None for process in self._processes) and time.monotonic() < deadline:
            time.sleep(0.05)
            if any(process.returncode for process in self._processes):
                deadline = min(deadline, time.monotonic() + GRACE_S)
        codes = [process.poll() for process in self._processes]
        self.end()
        return Ended(codes, [log.read_text(errors="replace") for log in self._logs])

    def end(self) -> None:
        """Kill what still runs."""
        for process in self._processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def in_turn(prepared: Sequence[Callable[[], Ranks]], ahead: int) -> Iterator[Ranks]:
    """Yield jobs one after another, while the next ones import.

    Args:
        prepared: each starts the processes of a job.
        ahead: jobs that import beside the one that runs.
    """
    todo, waiting = iter(prepared), deque[Ranks]()
    try:
        while True:
            waiting.extend(prepare() for prepare in islice(todo, ahead + 1 - len(waiting)))
            if not waiting:
                return
            yield waiting.popleft()
    finally:
        for ranks in waiting:
            ranks.end()


def _first(variable: str, folder: str) -> str:
    """The value of a list of folders with one more in front."""
    return os.pathsep.join(filter(None, (folder, os.environ.get(variable))))
