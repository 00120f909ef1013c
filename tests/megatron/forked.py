"""Training in ranks that are forked from one process which has imported Megatron already.

Importing takes a rank some five seconds of a core, training a tiny model less than one. Started through
`tests.megatron.launch`, a run is what a user starts; started here it is the same entry point in the same
kind of process, several times as fast. `Forks` is used in the tests, the rest runs in the process that forks.
What starts its processes by itself (torchrun, the demo, a shell) is given `Forks.python` for its interpreter.
"""

from __future__ import annotations

import functools
import gc
import importlib
import json
import multiprocessing
import multiprocessing.connection
import os
import select
import socket
import subprocess
import sys
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from megatron_hexi.lab.testbed.job import free_port
from megatron_hexi.plan import Plan, write_plan
from tests.megatron import forked_python
from tests.megatron.launch import REPOSITORY, TrainingLog, environment, read_metrics

#: What a rank runs unless told otherwise.
ENTRY = "megatron_hexi.pretrain_gpt"

#: What is imported only while training, by Megatron's tokenizers and torch's optimizers among others, and by
#: commands.
LATER_IMPORTS = (
    "megatron.core.tokenizers.text",
    "megatron.core.models.mimo",
    "megatron.core.datasets.helpers",
    "torch._dynamo",
    "torch.distributed.run",
    "megatron_hexi.cli.main",
)

#: Seconds that the other ranks have to end after one has failed.
GRACE = 5.0


@dataclass(frozen=True)
class Outcome:
    """How the ranks of a run ended.

    Attributes:
        codes: exit code of each; `None` of one that had to be killed.
        output: what each printed.
    """

    codes: list[int | None]
    output: list[str]

    @property
    def succeeded(self) -> bool:
        return not any(code != 0 for code in self.codes)

    def why(self) -> str:
        """The end of what the first rank to fail printed; others only say that it is gone."""
        failed = [log for log, code in zip(self.output, self.codes, strict=True) if code not in (0, None)]
        telling = [log for log in failed if "Connection closed by peer" not in log[-2000:]]
        return f"exit codes {self.codes}:\n" + (telling or failed or self.output)[0][-3000:]


class Trainer(ABC):
    """Trains on some ranks, in whatever way `launch` starts them."""

    #: Arguments of every training.
    words: tuple[str, ...] = ()

    @abstractmethod
    def launch(
        self,
        folder: Path,
        *,
        ranks: int,
        args: Sequence[str | Path],
        entry: str = ENTRY,
        timeout: float = 200.0,
    ) -> Outcome:
        """Run an entry point on some ranks, and come back however they ended.

        Args:
            folder: the working directory.
            ranks: processes to start.
            args: the entry point's arguments.
            entry: the module whose `main` a rank calls.
            timeout: seconds after which all are killed.
        """

    def train(
        self,
        folder: Path,
        *,
        ranks: int,
        args: Sequence[str | Path],
        plan: Plan | None = None,
        entry: str = ENTRY,
        timeout: float = 200.0,
    ) -> TrainingLog:
        """Train and read the metrics.

        Raises:
            AssertionError: the run failed; the message holds the end of its output.
        """
        folder.mkdir(parents=True, exist_ok=True)
        metrics = folder / f"metrics-{len(list(folder.glob('metrics-*')))}.jsonl"
        metrics.touch()
        words = [*args, *self.words, "--hexi-metrics", metrics]
        if plan is not None:
            path = metrics.with_suffix(".plan.yaml")
            write_plan(plan, path)
            words += ["--hexi-plan", path]
        outcome = self.launch(folder, ranks=ranks, args=words, entry=entry, timeout=timeout)
        assert outcome.succeeded, outcome.why()
        return read_metrics(metrics, "".join(outcome.output))


class Forks(Trainer):
    """A process that has imported Megatron, and forks the ranks of one run after another.

    Attributes:
        python: a program that is called as an interpreter is, and has its process forked (`forked_python`).
    """

    def __init__(self, server: str = "tests.megatron.forked") -> None:
        """Start the process.

        Args:
            server: the module that it runs, which ends in `serve`.
        """
        self._folder = tempfile.TemporaryDirectory(prefix="forks-")
        self.python = Path(self._folder.name) / "python"
        with socket.socket(socket.AF_UNIX) as listener:
            address = self.python.with_name("socket")
            listener.bind(str(address))
            listener.listen(64)
            forked_python.write_python(self.python, address)
            self._server = subprocess.Popen(
                [sys.executable, "-m", server, str(listener.fileno()), "--hexi-platform", "cpu"],
                cwd=REPOSITORY,
                env=environment(),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                pass_fds=[listener.fileno()],
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        assert self._server.stdin is not None
        self._server.stdin.close()
        self._server.wait(timeout=30)
        self._folder.cleanup()

    def launch(
        self,
        folder: Path,
        *,
        ranks: int,
        args: Sequence[str | Path],
        entry: str = ENTRY,
        timeout: float = 200.0,
    ) -> Outcome:
        """As of `Trainer`; ranks are forked."""
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        words = [str(word) for word in args]
        job = {"folder": str(folder), "ranks": ranks, "args": words, "entry": entry}
        print(json.dumps({**job, "timeout": timeout}), file=self._server.stdin, flush=True)
        answer = self._server.stdout.readline()
        assert answer, "the process that forks is gone"
        codes = json.loads(answer)
        logs = [_log(folder, rank) for rank in range(ranks)]
        return Outcome(codes, [log.read_text() if log.exists() else "" for log in logs])


def _log(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank}.log"


def serve(adapt: Callable[[], object] = lambda: None) -> None:
    """Fork what is asked for: of each line that comes in the ranks of a job, of each connection a command.

    A job is answered with its exit codes. The first argument of the process is the file descriptor of the
    socket that listens. Returns when there is nothing more to come; a forked command ends without returning.

    Args:
        adapt: called once Megatron is imported, before the first job.
    """
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what an import prints is no answer
    overseers: list[int] = []
    with socket.socket(fileno=int(sys.argv.pop(1))) as listener:
        prepare()
        adapt()
        while True:
            ready, _, _ = select.select([sys.stdin, listener], [], [])
            if listener in ready:
                words = forked_python.answer(listener, overseers)
                if words is not None:
                    break
            elif line := sys.stdin.readline():
                print(json.dumps(run(**json.loads(line))), file=answers, flush=True)
            else:
                return
    forked_python.execute(words)


def prepare() -> None:
    """Do what ranks would spend seconds on, each for itself."""
    import megatron_hexi.adaptor
    import megatron_hexi.megatron.gpt

    for name in LATER_IMPORTS:
        importlib.import_module(name)
    megatron_hexi.megatron.gpt.read_options()
    _name_all_weights()
    # Nothing of it is garbage; collecting would copy its pages in each rank.
    gc.freeze()


def _name_all_weights() -> None:
    """Let any training end with an error if one of its weights is not in the table of units' weights."""
    from megatron.training import training

    from megatron_hexi.megatron.unit_weights import holdings

    original = training.get_model

    @functools.wraps(original)
    def get_model(*args: Any, **kwargs: Any) -> Any:
        chunks = original(*args, **kwargs)
        for chunk in chunks if isinstance(chunks, list) else [chunks]:
            holdings(chunk)
        return chunks

    training.get_model = get_model


def run(folder: str, ranks: int, args: list[str], entry: str, timeout: float) -> list[int | None]:
    """Fork the ranks of a run, and wait for them; the exit code of each, `None` if it had to be killed."""
    shared = {"WORLD_SIZE": ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    forks = multiprocessing.get_context("fork")
    processes = [
        forks.Process(
            target=_rank, args=(Path(folder), args, entry, {**shared, "RANK": rank, "LOCAL_RANK": rank})
        )
        for rank in range(ranks)
    ]
    for process in processes:
        process.start()
    deadline = time.monotonic() + timeout
    waiting: list[Any] = list(processes)
    while waiting and time.monotonic() < deadline:
        multiprocessing.connection.wait([process.sentinel for process in waiting], timeout=0.2)
        waiting = [process for process in waiting if process.is_alive()]
        if any(process.exitcode for process in processes):
            deadline = min(deadline, time.monotonic() + GRACE)
    for process in waiting:
        process.kill()
        process.join()
    return [None if process in waiting else process.exitcode for process in processes]


def _rank(folder: Path, args: list[str], entry: str, variables: dict[str, int | str]) -> None:
    """Be one rank, as torchrun would have started it."""
    with _log(folder, int(variables["RANK"])).open("wb") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    os.chdir(folder)
    os.environ |= {name: str(value) for name, value in variables.items()}
    sys.argv[:] = ["pretrain_gpt.py", *args]
    if "--save" in args:  # which spawns a process for this queue, unless there is one: seconds of imports
        from megatron.core.dist_checkpointing.strategies.filesystem_async import get_write_results_queue

        get_write_results_queue("fork")
    try:
        importlib.import_module(entry).main()
    except Exception:  # a process of its own would end by this hook; multiprocessing does not call it
        sys.excepthook(*sys.exc_info())
        sys.exit(1)


if __name__ == "__main__":
    serve()
