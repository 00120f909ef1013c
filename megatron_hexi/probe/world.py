"""The ranks of a probe: how they meet, exchange results, and end together."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from megatron_hexi.doctor.gather import find_job
from megatron_hexi.errors import EXIT_USER_ERROR, HexiError
from megatron_hexi.platform.slurm import adopt_slurm_environment
from megatron_hexi.runtime.liveness import Liveness
from megatron_hexi.speaker import say_error

#: A rank that takes so long for one point that is measured is lost; one without heartbeats is much sooner.
SILENCE = timedelta(minutes=3)
LOST_AFTER_S = 60.0
_LOOK_S = 0.5
_AGAIN = "run the same command again: what was measured is kept"


class LostRankError(HexiError):
    """A rank no longer answers."""


class ElsewhereError(HexiError):
    """Another rank found the user's input wrong, and reports it."""


@dataclass(frozen=True)
class World:
    """The process group of a probe, and this rank's place in it.

    Args:
        store: the job's; ``None`` for a world of one, as for `others`.
    """

    rank: int
    size: int
    store: dist.Store | None = None
    others: Liveness | None = None

    def meet(self) -> None:
        """Wait until all ranks have called this: a barrier."""
        self.all_gather_number(0.0)

    def all_gather_number(self, local: float) -> list[float]:
        """All-gather one number."""
        if self.size == 1:
            return [local]
        gathered = [torch.zeros(1, dtype=torch.float64) for _ in range(self.size)]
        with self.lost_ranks():
            dist.all_gather(gathered, torch.tensor([local], dtype=torch.float64))
        return [float(number) for number in gathered]

    def gather(self, value: Any) -> list[Any]:
        """All-gather plain values (JSON types), in rank order."""
        text = json.dumps(value, allow_nan=False).encode()
        lengths = [int(length) for length in self.all_gather_number(len(text))]
        if self.size == 1:
            return [json.loads(text)]
        padded = torch.zeros(max(lengths), dtype=torch.uint8)
        padded[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        gathered = [torch.empty_like(padded) for _ in lengths]
        with self.lost_ranks():
            dist.all_gather(gathered, padded)
        texts = zip(gathered, lengths, strict=True)
        return [json.loads(bytes(data[:length].tolist())) for data, length in texts]

    @contextlib.contextmanager
    def all_or_none(self) -> Iterator[None]:
        """End all ranks if some find the user's input wrong; the first of them reports it.

        Raises:
            HexiError: on the first rank that found something wrong.
            ElsewhereError: on all others.
        """
        own_error: HexiError | None = None
        try:
            yield
        except HexiError as problem:
            own_error = problem
        failed = [rank for rank, fine in enumerate(self.gather(own_error is None)) if not fine]
        if failed:
            if own_error is not None and self.rank == failed[0]:
                raise own_error
            raise ElsewhereError(f"rank {failed[0]} reported the error")

    def speaks(self) -> bool:
        """Return whether this rank reports the loss of another: the first to call this does."""
        if self.store is None:
            return True
        try:
            return self.store.add("hexi-probe-said", 1) == 1
        except RuntimeError:  # the store is gone with the rank that kept it
            return True

    def data_group(self, device: torch.device) -> dist.ProcessGroup:
        """Return the group that links are measured over: NCCL's on GPUs, else gloo's. A collective call."""
        with self.lost_ranks():
            group = dist.new_group(backend="nccl" if device.type == "cuda" else "gloo", timeout=SILENCE)
        assert isinstance(group, dist.ProcessGroup)
        return group

    @contextlib.contextmanager
    def lost_ranks(self) -> Iterator[None]:
        """Turn a process group's error about a lost rank into one line, which names the rank.

        Raises:
            LostRankError: a rank died, or said nothing for `SILENCE`.
        """
        try:
            yield
        except RuntimeError as problem:  # gloo raises nothing more special
            signal.signal(signal.SIGTERM, signal.SIG_IGN)  # by which torchrun ends the ranks that are left
            fault = self.others.find_fault() if self.others else None
            known = fault.message if fault else f"a rank no longer answers ({_first_words(problem)})"
            raise LostRankError(f"{known}; {_AGAIN}") from None


def end_when_lost(others: Liveness) -> None:
    """End this process when ranks, or the store, have been silent for `LOST_AFTER_S`; runs in a thread.

    Collectives wait longer: a rank that is slow has heartbeats all the same.
    """
    since = time.monotonic()
    while (fault := others.fault) is None or time.monotonic() - since < LOST_AFTER_S:
        since = time.monotonic() if fault is None else since
        time.sleep(_LOOK_S)
    show_cursor = "\x1b[?25h" if sys.stderr.isatty() else ""  # the progress bar hides it
    say_error(f"{show_cursor}hexi: error: {fault.message}; {_AGAIN}")
    os._exit(EXIT_USER_ERROR)


@contextlib.contextmanager
def connect() -> Iterator[World]:
    """Yield the world that torchrun or srun started; a single rank where neither did.

    Raises:
        HexiError: the launcher's variables are wrong, or a rank never came.
    """
    adopt_slurm_environment(os.environ)
    if find_job(os.environ) is None:
        yield World(0, 1)
        return
    try:
        store, rank, size = next(dist.rendezvous("env://", timeout=SILENCE))
        store.set_timeout(SILENCE)
        dist.init_process_group(
            "gloo", store=dist.PrefixStore("hexi-probe", store), rank=rank, world_size=size, timeout=SILENCE
        )
    except (RuntimeError, ValueError) as problem:
        raise HexiError(
            f"the ranks did not find each other ({_first_words(problem)}); check that every node runs the "
            "same command"
        ) from None
    others = Liveness(store, rank, size)
    others.start()
    threading.Thread(target=end_when_lost, args=(others,), name="hexi-lost", daemon=True).start()
    try:
        yield World(rank, size, store, others)
    finally:
        others.leave()
        # After a failure the others may be gone, and then there is nothing left to leave in order.
        with contextlib.suppress(RuntimeError):
            dist.destroy_process_group()


def _first_words(problem: Exception) -> str:
    """Return torch's message without its place in the sources and its advice."""
    text = re.sub(r"^\[[^\]]*\.cc:\d+\]\s*", "", str(problem).strip()).splitlines() or ["no reason given"]
    return text[0].split(". ")[0][:160]
