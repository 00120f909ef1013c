"""One voice a node: the first rank that finds what is wrong says it, and the others would only repeat it.

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

#: Seconds that a rank waits for torchrun to end it, once another has said what is wrong.
ENDED_S = 30.0

#: Held by the rank that speaks, until it ends.
_claim: socket.socket | None = None
_speaks: bool | None = None


def under_torchrun() -> bool:
    """Whether torchrun started this rank, and will end it as soon as another one has ended."""
    return "TORCHELASTIC_RUN_ID" in os.environ and os.environ.get("WORLD_SIZE") != "1"


def is_speaker() -> bool:
    """Whether this rank says what is wrong: the first of its node to ask, or one that shares no screen."""
    global _claim, _speaks
    if _speaks is None:
        shares = under_torchrun() or "SLURM_STEP_ID" in os.environ
        _claim = _claimed() if shares else None
        _speaks = not shares or _claim is not None
    return _speaks


def say_error(line: str) -> bool:
    """Write an error to standard error, and where torchrun ends with it, if this rank speaks.

    Args:
        line: without a line break.

    Returns:
        Whether it does.
    """
    if not is_speaker():
        return False
    with contextlib.suppress(OSError):  # a full disk must not keep the process from ending
        print(line, file=sys.stderr, flush=True)
        _tell_torchrun(line)
    return True


def await_end() -> None:
    """Wait for torchrun to end this rank; returns where it has not in time.

    The rank ends with exit code 0 then: torchrun names all others beside the one at fault.
    """
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    time.sleep(ENDED_S)


def _claimed() -> socket.socket | None:
    """The node's claim to speak, for the ranks of one launcher; ``None`` if another rank holds it."""
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
    """Leave the line where torchrun looks for the reason of a failure, which it prints last.

    The file's form: torch/distributed/elastic/multiprocessing/errors/error_handler.py
    """
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path:
        about = {"py_callstack": line, "timestamp": str(int(time.time()))}
        with open(path, "w") as stream:
            json.dump({"message": {"message": line, "extraInfo": about}}, stream)
