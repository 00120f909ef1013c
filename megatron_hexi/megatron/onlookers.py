"""What only watches a training cannot stop it: where it fails, it says so once, and the training goes on.

Metrics, the record, and Megatron's TensorBoard and Weights & Biases writers all write to disks that fill up
and mounts that get lost. What was missed is missing; writing is tried again each time.
"""

from __future__ import annotations

import contextlib
import fnmatch
import functools
import os
import sys
from collections.abc import Callable
from typing import Any

from megatron_hexi.patching import Patch


class Onlooker:
    """Something that only watches.

    Args:
        name: what the user knows it by; a flag.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._told = False

    def attempt[**P](self, write: Callable[P, object], *args: P.args, **kwargs: P.kwargs) -> None:
        """Write, and go on if that fails, however it does: a disk, a mount, a library's thread.

        No collective may be inside: the other ranks would wait for it.
        """
        try:
            write(*args, **kwargs)
        except Exception as problem:
            self.tell(problem)

    def tell(self, problem: Exception) -> None:
        """Say what failed, the first time."""
        if self._told:
            return
        self._told = True
        rank = os.environ.get("RANK", "0")
        # Standard error may be a file on the same full disk.
        with contextlib.suppress(OSError):
            print(
                f"hexi: warning: [rank {rank}] the training goes on without {self._name}, until that can be "
                f"written again: {problem or type(problem).__name__}",
                file=sys.stderr,
                flush=True,
            )


class SparedWriter:
    """A writer of Megatron's whose failures end nothing.

    Args:
        writer: TensorBoard's `SummaryWriter`, or the module `wandb`.
        onlooker: says that it failed.
        methods: patterns of those that write, and return nothing that anybody needs.
    """

    def __init__(self, writer: Any, onlooker: Onlooker, methods: tuple[str, ...]) -> None:
        self._writer = writer
        self._onlooker = onlooker
        self._methods = methods

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._writer, name)
        writes = any(fnmatch.fnmatchcase(name, pattern) for pattern in self._methods)
        return functools.partial(self._onlooker.attempt, found) if writes else found


def _spare(
    original: Callable[[Any], None], variable: str, flag: str, methods: tuple[str, ...]
) -> Callable[[Any], None]:
    from megatron.training import global_vars

    @functools.wraps(original)
    def set_writer(args: Any) -> None:
        onlooker = Onlooker(flag)
        try:
            original(args)
        except OSError as problem:  # Megatron goes on without a writer where its library is missing, too
            onlooker.tell(problem)
        writer = getattr(global_vars, variable)
        if writer is not None:
            setattr(global_vars, variable, SparedWriter(writer, onlooker, methods))

    return set_writer


WRITER_PATCHES = (
    Patch(
        target="megatron.training.global_vars:_set_tensorboard_writer",
        why="lets the training go on where TensorBoard's files cannot be written",
        build=functools.partial(
            _spare,
            variable="_GLOBAL_TENSORBOARD_WRITER",
            flag="--tensorboard-dir",
            methods=("add_*", "flush", "close"),
        ),
        parameters=("args",),
    ),
    Patch(
        target="megatron.training.global_vars:_set_wandb_writer",
        why="lets the training go on where Weights & Biases cannot write",
        build=functools.partial(
            _spare, variable="_GLOBAL_WANDB_WRITER", flag="--wandb-project", methods=("log", "finish")
        ),
        parameters=("args",),
    ),
)
