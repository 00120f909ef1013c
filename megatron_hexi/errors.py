"""Errors that a user can cause. All other errors are bugs and keep their traceback."""

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

from megatron_hexi.speaker import await_end, say_error, under_torchrun

#: Exit code of every command and entry point where the user's input is wrong (0: done, 1: a bug).
EXIT_USER_ERROR = 2
#: Exit code where the input is right, but no plan fits in memory.
EXIT_NO_PLAN = 3
#: Seconds in which the other ranks of a job start and find the mistake too.
_OTHERS_S = 3.0


class HexiError(ValueError):
    """A mistake of the user, with a remedy in the message.

    The message is one line: place (file and field), value, remedy. The error passes to the entry point, which
    prints it. Docstrings name it for functions that their package exports, and where a caller handles it or
    every rank raises it.
    """

    exit_code: ClassVar[int] = EXIT_USER_ERROR


def raise_all(faults: Sequence[str], error: type[HexiError] = HexiError) -> None:
    """Raise one error with all of some messages, numbered if there are several; without any, return."""
    if len(faults) > 1:
        numbered = " ".join(f"({number}) {fault}" for number, fault in enumerate(faults, 1))
        raise error(f"{len(faults)} mistakes: {numbered}")
    if faults:
        raise error(faults[0])


class NoFlagError(HexiError):
    """A model or a job that no flags of Megatron's script say."""


class PlanError(HexiError):
    """A plan that breaks a rule, or does not fit the job."""


class ClusterError(HexiError):
    """A cluster file that breaks a rule, or an unknown GPU."""


class NothingFitsError(HexiError):
    """No plan fits in the cluster's memory; the message says what is short, and what would fit."""

    exit_code = EXIT_NO_PLAN

    def __init__(self, message: str, details: Mapping[str, Any] | None = None) -> None:
        super().__init__(message)
        self.details: Mapping[str, Any] = details or {}


class CheckpointError(HexiError):
    """A checkpoint that this job cannot continue from."""


class PatchError(HexiError):
    """A part of Megatron that differs from what its patch expects."""


class PlatformError(HexiError):
    """A platform that is not available, or lacks what the job needs."""


@contextlib.contextmanager
def user_errors() -> Iterator[None]:
    """Turn a `HexiError` into one line on standard error and its exit code; pass all other errors.

    Under torchrun or srun the line names the rank, and only the first rank of a node that finds the mistake
    prints it (`speaker`). torchrun ends all ranks as soon as one has ended, and lists those that had ended by
    then: the others wait for it.

    Raises:
        SystemExit: the user's input is wrong.
    """
    try:
        with _missing_extras():
            yield
    except HexiError as problem:
        rank = f"[rank {os.environ['RANK']}] " if "RANK" in os.environ else ""
        speaks = say_error(f"hexi: error: {rank}{printable(str(problem))}")
        if _fault_listener is not None:
            _fault_listener(str(problem), problem.exit_code)
        if under_torchrun():
            if not speaks:
                await_end()
            time.sleep(_OTHERS_S)
        raise SystemExit(problem.exit_code) from None


#: The extra of `setup.py` that installs a package which is imported only where it is needed.
_EXTRA_OF = {
    "matplotlib": "pictures",
    "megatron": "train",
    "ortools": "plan",
    "safetensors": "convert",
    "torch": "train",
}


@contextlib.contextmanager
def _missing_extras() -> Iterator[None]:
    """Turn a failed import of a package of an extra into a `HexiError` that names the extra."""
    try:
        yield
    except ModuleNotFoundError as problem:
        package = (problem.name or "").partition(".")[0]
        if package not in _EXTRA_OF:
            raise
        remedy = f"pip install 'megatron-hexi[{_EXTRA_OF[package]}]'"
        raise HexiError(f"this needs {package}, which is not installed; {remedy}") from None


def printable(text: str) -> str:
    """Return a text for one line of a terminal, with line breaks and other control characters escaped."""
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text)


def set_fault_listener(listener: Callable[[str, int], None] | None) -> None:
    """Set a function that receives message and exit code of a mistake before the process ends."""
    global _fault_listener
    _fault_listener = listener


_fault_listener: Callable[[str, int], None] | None = None
