"""The errors that a user can cause. Everything else is a bug of ours and keeps its traceback."""

import contextlib
import os
import sys
from collections.abc import Iterator

#: Exit code of every command and entry point where the user's input is wrong (0: done, 1: our fault).
EXIT_USER_ERROR = 2


class HexiError(ValueError):
    """Something the user wrote or asked for cannot be done; the message says how to mend it.

    The message is one line: where (file and place), what was found, what to do about it.
    """


class PlanError(HexiError):
    """A plan that breaks one of its own rules, or does not fit the job it is used for."""


class ClusterError(HexiError):
    """A cluster file that breaks a rule, or a GPU that nothing is known of."""


class PatchError(HexiError):
    """A part of Megatron does not look as the patch for it expects."""


class PlatformError(HexiError):
    """The platform asked for is not there, or lacks what the job needs."""


@contextlib.contextmanager
def user_errors() -> Iterator[None]:
    """Turn a `HexiError` into one line on standard error and exit code 2; let everything else through.

    Under torchrun or srun the line names the rank.

    Raises:
        SystemExit: the user's input is wrong.
    """
    try:
        yield
    except HexiError as problem:
        rank = f"[rank {os.environ['RANK']}] " if "RANK" in os.environ else ""
        print(f"hexi: error: {rank}{problem}", file=sys.stderr, flush=True)
        raise SystemExit(EXIT_USER_ERROR) from None
