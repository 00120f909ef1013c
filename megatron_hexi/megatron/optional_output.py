"""Writers of metrics and logs whose failures do not stop training.

Metrics, the record, and Megatron's TensorBoard and Weights & Biases writers write to disks that fill up and
mounts that get lost. A failure is printed once and leaves a gap; writing is tried again each time.
"""

from __future__ import annotations

import contextlib
import fnmatch
import functools
import importlib.util
import os
import sys
from collections.abc import Callable
from typing import Any

from megatron_hexi.errors import HexiError
from megatron_hexi.patching import Patch


class OptionalOutput:
    """An output of training, which continues without it if writing fails."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._has_warned = False

    def attempt[**P](self, write: Callable[P, object], *args: P.args, **kwargs: P.kwargs) -> None:
        """Call `write`, and go on if it fails in any way: a disk, a mount, a library's thread.

        `write` must not contain a collective: the other ranks would wait for it.
        """
        try:
            write(*args, **kwargs)
        except Exception as problem:
            self.warn(problem)

    def warn(self, problem: Exception) -> None:
        """Print a warning about a failure, for the first failure only."""
        if self._has_warned:
            return
        self._has_warned = True
        rank = os.environ.get("RANK", "0")
        # Standard error may be a file on the same full disk.
        with contextlib.suppress(OSError):
            print(
                f"hexi: warning: [rank {rank}] the training goes on without {self._name}, until that can be "
                f"written again: {problem or type(problem).__name__}",
                file=sys.stderr,
                flush=True,
            )


class GuardedWriter:
    """A writer of Megatron whose failures do not stop the training.

    Args:
        writer: TensorBoard's `SummaryWriter`, or the module `wandb`.
        methods: patterns of the names of methods that write, whose results are not used.
    """

    def __init__(self, writer: Any, output: OptionalOutput, methods: tuple[str, ...]) -> None:
        self._writer = writer
        self._output = output
        self._methods = methods

    def __getattr__(self, name: str) -> Any:
        attribute = getattr(self._writer, name)
        writes = any(fnmatch.fnmatchcase(name, pattern) for pattern in self._methods)
        return functools.partial(self._output.attempt, attribute) if writes else attribute


def _spare(
    original: Callable[[Any], None], variable: str, flag: str, methods: tuple[str, ...]
) -> Callable[[Any], None]:
    from megatron.training import global_vars

    @functools.wraps(original)
    def set_writer(args: Any) -> None:
        output = OptionalOutput(flag)
        try:
            original(args)
        except OSError as problem:
            output.warn(problem)
        except ModuleNotFoundError as problem:
            raise HexiError(
                f"{flag} needs {problem.name}, which is not installed; pip install {problem.name}"
            ) from None
        writer = getattr(global_vars, variable)
        lacks = writer is None and importlib.util.find_spec("tensorboard") is None
        asked = flag == "--tensorboard-dir" and args.tensorboard_dir
        if lacks and asked and args.rank == args.world_size - 1:  # Megatron goes on
            print(
                f"hexi: warning: [rank {args.rank}] {flag} {args.tensorboard_dir}: nothing is written, "
                "tensorboard is not installed; pip install tensorboard",
                file=sys.stderr,
                flush=True,
            )
        if writer is not None:
            setattr(global_vars, variable, GuardedWriter(writer, output, methods))

    return set_writer


WRITER_PATCHES = (
    Patch(
        target="megatron.training.global_vars:_set_tensorboard_writer",
        why="lets the training continue where TensorBoard's files cannot be written",
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
        why="lets the training continue where Weights & Biases cannot write",
        build=functools.partial(
            _spare, variable="_GLOBAL_WANDB_WRITER", flag="--wandb-project", methods=("log", "finish")
        ),
        parameters=("args",),
    ),
)
