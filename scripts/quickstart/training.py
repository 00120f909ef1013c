"""Trainings as processes: started, followed through their metrics files, and stopped without remains."""

from __future__ import annotations

import ctypes
import json
import os
import re
import shlex
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import psutil

import megatron_hexi
from scripts.quickstart.job import Launch

_POLL_S = 0.2
_GRACE_S = 5.0
_LAST_LINES = 20
_RANK_FAILED = re.compile(r"failed \(exitcode: .*local_rank")
_PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h

_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",  # a rank is a device; several would fight for the cores
    "GLOO_SOCKET_IFNAME": "lo",  # also where the host's name resolves to nothing
    # Keep freed memory: giving megabytes back to the system at every step costs more than computing on them.
    "MALLOC_TRIM_THRESHOLD_": "1000000000",
    "MALLOC_MMAP_THRESHOLD_": "1000000000",
    "PYTHONPATH": str(Path(megatron_hexi.__file__).parents[1]),
    "PYTHONUNBUFFERED": "1",
    "PYTHONWARNINGS": "ignore::UserWarning",  # Megatron warns dozens of times that a GPU would be faster
}


class TrainingFailed(Exception):
    """A training ended before its time; the message holds the end of its log."""


class Training:
    """A started training.

    Args:
        launch: what to start.
        folder: its run folder; it runs there.
    """

    def __init__(self, launch: Launch, folder: Path) -> None:
        self.launch = launch
        #: Losses so far, one an iteration.
        self.losses: list[float] = []
        self._log = folder / f"{launch.name}.log"
        self._metrics = folder / launch.metrics_of(launch.ranks - 1)
        self._read = 0
        with self._log.open("w") as log:
            log.write(shlex.join(launch.command) + "\n")
            log.flush()
            # In a session of its own, so that the terminal's Ctrl-C reaches us alone, and we end it in order.
            self._process = subprocess.Popen(
                launch.command,
                cwd=folder,
                env={**os.environ, **_ENVIRONMENT},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def poll(self) -> bool:
        """Read what is new.

        Returns:
            Whether the training goes on.

        Raises:
            TrainingFailed: it ended with an error.
        """
        code = self._process.poll()  # first: what was written before the end is then there to be read
        self._read_metrics()
        if code:
            raise TrainingFailed(self._failure(f"ended with exit code {code}"))
        if code == 0 and len(self.losses) < self.launch.iterations:
            raise TrainingFailed(self._failure(f"ended after {len(self.losses)} iterations"))
        return code is None

    def _read_metrics(self) -> None:
        if not self._metrics.exists():
            return
        with self._metrics.open("rb") as file:
            file.seek(self._read)
            new = file.read()
        whole = new[: new.rfind(b"\n") + 1]
        self._read += len(whole)
        self.losses += [json.loads(line)["loss"] for line in whole.splitlines()]

    def _failure(self, what: str) -> str:
        lines = self._log.read_text(errors="replace").splitlines()
        # What torchrun says of a failed rank comes last and is long; its first line tells which, and how.
        end = next((number for number, line in enumerate(lines, start=1) if _RANK_FAILED.search(line)), None)
        tail = "\n".join(lines[:end][-_LAST_LINES:])
        return f"training {self.launch.name!r} {what}. The end of {self._log}:\n\n{tail}"


def follow(launches: Sequence[Launch], folder: Path, progress: Callable[[Training], None]) -> None:
    """Start trainings side by side and wait until all are done.

    Args:
        launches: what to start.
        folder: their run folder.
        progress: told of each training several times a second.

    Raises:
        TrainingFailed: one of them failed; the others are stopped.
    """
    with _no_process_left():
        running = [Training(launch, folder) for launch in launches]
        while running:
            time.sleep(_POLL_S)
            for training in list(running):
                if not training.poll():
                    running.remove(training)
                progress(training)


@contextmanager
def _no_process_left() -> Iterator[None]:
    """End whatever was started inside and still runs: ranks too, also those whose torchrun is dead."""
    # The ranks have sessions of their own, torchrun's doing, so there is no one process group to kill. As the
    # "subreaper" we inherit whoever loses their parent: all of them stay our descendants.
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        yield
    finally:
        before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # an impatient second Ctrl-C
        for end in (psutil.Process.terminate, psutil.Process.kill):
            left = psutil.Process().children(recursive=True)
            for process in left:
                try:
                    end(process)
                except psutil.NoSuchProcess:
                    continue
            psutil.wait_procs(left, timeout=_GRACE_S)
        signal.signal(signal.SIGINT, before)
