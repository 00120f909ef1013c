"""One error message for each node: only the first rank that finds a mistake prints it.

Ranks that torchrun or srun started write to one screen. The first of a node takes a name in Linux's abstract
namespace of sockets, which needs no file and is free again when the process has ended.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import signal
import socket
import sys
import threading
import time

#: Seconds that a rank waits for torchrun to end it, once another has printed the error.
ENDED_S = 30.0

#: Held by the rank that speaks, until it ends.
_claim: socket.socket | None = None
_speaks: bool | None = None


def under_torchrun() -> bool:
    """Return whether torchrun started this rank, and so will end it as soon as another rank has ended."""
    return "TORCHELASTIC_RUN_ID" in os.environ and os.environ.get("WORLD_SIZE") != "1"


def is_speaker() -> bool:
    """Return whether this rank prints errors: the first of its node to ask, or one with its own screen."""
    global _claim, _speaks
    if _speaks is None:
        shares = under_torchrun() or "SLURM_STEP_ID" in os.environ
        _claim = _claimed() if shares else None
        _speaks = not shares or _claim is not None
    return _speaks


def say_error(line: str) -> bool:
    """Print an error for torchrun to standard error, and return whether this rank prints errors."""
    if not is_speaker():
        return False
    with contextlib.suppress(OSError):  # a full disk must not keep the process from ending
        print(line, file=sys.stderr, flush=True)
        _tell_torchrun(line)
    return True


def await_end() -> None:
    """Wait for torchrun to end this rank; returns if it has not in time.

    The rank then ends with exit code 0, or torchrun would name it beside the rank at fault.
    """
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    time.sleep(ENDED_S)


def _claimed() -> socket.socket | None:
    """Return the node's claim to print errors, for one launcher; ``None`` if another rank holds it."""
    again = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    name = f"\0megatron-hexi-{os.getuid()}-{os.getppid()}-{again}"
    claim = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    try:
        claim.bind(name)
    except OSError as problem:
        if problem.errno == errno.EADDRINUSE:
            claim.close()
            return None
    return claim


def _tell_torchrun(line: str) -> None:
    """Write an error to the file from which torchrun prints the reason of a failure.

    Format of the file: torch/distributed/elastic/multiprocessing/errors/error_handler.py
    """
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path:
        about = {"py_callstack": line, "timestamp": str(int(time.time()))}
        with open(path, "w") as stream:
            json.dump({"message": {"message": line, "extraInfo": about}}, stream)
