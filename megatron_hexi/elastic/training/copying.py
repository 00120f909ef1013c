"""The ranks' part in copies of the state in memory: written between two iterations.

A copy is written by Megatron's own way to save, into this node's memory in place of the folder of ``--save``:
so it can be loaded by any number of ranks. docs/surviving.md
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import io
import logging
import math
import os
import queue
import shutil
import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from megatron_hexi.elastic import say
from megatron_hexi.elastic.copies import COPIES_OFF, COPY_INTERVAL_VARIABLE, CopyBoard, copies_folder
from megatron_hexi.elastic.copy_files import copy_folder
from megatron_hexi.elastic.store import ROUND_VARIABLE, round_store, whole_store
from megatron_hexi.elastic.training.fencing import ask_fence
from megatron_hexi.patching import patched

#: A file system with less room than this is full.
_FULL_BYTES = 1 << 20
#: Seconds after which the log says that a copy is not on two nodes yet.
_SLOW_S = 10.0


class Copier:
    """Writes one rank's part of copies."""

    def __init__(self, args: Namespace, copies: Path) -> None:
        self._args, self._copies = args, copies
        self._every = int(os.environ[COPY_INTERVAL_VARIABLE])
        self._name = os.environ[ROUND_VARIABLE]
        self._round, self._job = round_store(), whole_store()
        self._board = CopyBoard(self._job, self._name)
        self._nodes = int(os.environ["GROUP_WORLD_SIZE"])
        self._off = self._job.check([COPIES_OFF])
        self._written_at = 0.0
        _write_without_a_server()
        #: The iteration that the newest copy was made after.
        self.copied: int | None = None

    def is_due(self, iteration: int) -> bool:
        """Return whether to copy now: not at a checkpoint, nor before the last copy is on two nodes."""
        if self._off or iteration % self._every or iteration % self._args.save_interval == 0:
            return False
        key = f"copies/{iteration}"
        if self._args.rank == 0:
            last = self._board.last()
            ready = last is None or self._board.safe() == last[0]
            if last is not None and not ready and time.monotonic() - self._written_at > _SLOW_S:
                say(
                    f"iteration {iteration}: in-memory checkpoint skipped, that of iteration {last[0]} "
                    "is not on two nodes yet"
                )
                self._written_at = math.inf  # once
            self._round.set(key, "1" if ready else "")
        return bool(self._round.get(key))

    def copy(self, iteration: int, save: Callable[[], None]) -> None:
        """Write an in-memory checkpoint of the training state; a collective of all ranks."""
        copy_folder(self._copies, self._name, iteration).mkdir(parents=True, exist_ok=True)
        try:
            with _saved_elsewhere(self._args, self._copies / self._name):
                save()
        except (OSError, RuntimeError):
            if shutil.disk_usage(self._copies).free < _FULL_BYTES:  # the next round makes no copies
                self._job.set(COPIES_OFF, f"{self._copies} on {os.uname().nodename} is full")
            raise
        if self._args.rank == 0:
            ask_fence()
            self._board.announce(iteration, self._nodes)
        self.copied = iteration
        self._written_at = time.monotonic()

    def wait_until_safe(self, iteration: int, seconds: float) -> bool:
        """Wait until a copy is on two nodes; return whether this was in time."""
        deadline = time.monotonic() + seconds
        while self._board.safe() != iteration and time.monotonic() < deadline:
            time.sleep(0.05)
        return self._board.safe() == iteration


def _write_without_a_server() -> None:
    """Gather results without Megatron's server process, which takes seconds to start."""
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    if filesystem_async._results_queue is None:
        filesystem_async._results_queue = queue.Queue()


@contextlib.contextmanager
def _saved_elsewhere(args: Namespace, folder: Path) -> Iterator[None]:
    """Redirect Megatron's ``--save`` to a folder, without its log lines or Weights & Biases."""
    from megatron.training import global_vars

    changed: dict[str, Any] = {"save": str(folder), "save_retain_interval": None, "log_progress": False}
    before = {name: getattr(args, name) for name in changed if hasattr(args, name)}
    writer = global_vars._GLOBAL_WANDB_WRITER
    # Nodes save in different folders; what is saved of the arguments must be the same on all.
    args.hexi_saved_as = {"save": args.save}
    vars(args).update({name: changed[name] for name in before})
    global_vars._GLOBAL_WANDB_WRITER = None
    logging.disable(logging.WARNING)
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            yield
    finally:
        logging.disable(logging.NOTSET)
        del args.hexi_saved_as
        vars(args).update(before)
        global_vars._GLOBAL_WANDB_WRITER = writer


_copier: Copier | None = None


def copied_last() -> int | None:
    """Return the iteration after which this round's newest copy was made."""
    return None if _copier is None else _copier.copied


def is_safe(iteration: int, seconds: float) -> bool:
    """Wait until a copy is on two nodes; return whether this was in time."""
    return _copier is not None and _copier.wait_until_safe(iteration, seconds)


_SAVED = (
    *("iteration", "model", "optimizer", "opt_param_scheduler"),
    *("num_floating_point_operations_so_far", "checkpointing_context"),
)


@patched(
    "megatron.training.training:checkpoint_and_decide_exit",
    why="keeps copies of the state in memory under megatron_hexi.elastic --copy-interval",
    parameters=(
        *("model", "optimizer", "opt_param_scheduler", "iteration"),
        *("num_floating_point_operations_so_far", "checkpointing_context", "train_data_iterator"),
    ),
)
def _copying(original: Callable[..., Any], *words: Any, **named: Any) -> Any:
    from megatron.training import get_args, training

    global _copier
    ends, copies = original(*words, **named), copies_folder()
    if ends or copies is None:
        return ends
    _copier = _copier or Copier(get_args(), copies)
    call = inspect.signature(original).bind(*words, **named).arguments
    if _copier.is_due(call["iteration"]):
        save = functools.partial(
            training.save_checkpoint_and_time,
            *(call[name] for name in _SAVED),
            train_data_iterator=call["train_data_iterator"],
        )
        _copier.copy(call["iteration"], save)
    return ends


COPY_PATCHES = (_copying,)
