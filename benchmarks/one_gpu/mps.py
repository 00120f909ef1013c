"""Unequal shares of one GPU by CUDA's Multi-Process Service.

A daemon of the user's own, in a folder of its own, lets kernels of several processes run side by side, each
process on its part of the multiprocessors (``CUDA_MPS_ACTIVE_THREAD_PERCENTAGE``). Nothing of the GPU is set.
https://docs.nvidia.com/deploy/mps
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

_CONTROL = "nvidia-cuda-mps-control"
#: Where drivers that are mounted into a container lie.
_FOLDERS = ("/usr/local/nvidia/bin", "/usr/bin", "/usr/local/cuda/bin")


class NoMpsError(Exception):
    """The service cannot be had; the message says why."""


@contextmanager
def service() -> Iterator[Mapping[str, str]]:
    """Start the service, and end it on the way out.

    Yields:
        Variables with which a process becomes its client.

    Raises:
        NoMpsError: it is not installed, or does not start.
    """
    control = shutil.which(_CONTROL, path=os.pathsep.join((os.environ.get("PATH", ""), *_FOLDERS)))
    if control is None:
        raise NoMpsError(f"{_CONTROL} is not installed: it comes with NVIDIA's driver")
    # Sockets' names are short, so not below a folder of tests.
    with tempfile.TemporaryDirectory(prefix="mps") as folder:
        variables = {f"CUDA_MPS_{name}_DIRECTORY": str(Path(folder) / name) for name in ("PIPE", "LOG")}
        for path in variables.values():
            Path(path).mkdir()
        environment = os.environ | variables
        started = subprocess.run(
            [control, "-d"], env=environment, capture_output=True, text=True, timeout=30, check=False
        )
        if started.returncode:
            raise NoMpsError(f"{_CONTROL} -d: {(started.stdout + started.stderr).strip()[-500:]}")
        try:
            yield variables
        finally:
            subprocess.run(
                [control], input="quit -t 5\n", env=environment, text=True, timeout=30, check=False
            )


def shares(variables: Mapping[str, str], speeds: Sequence[float]) -> list[dict[str, str]]:
    """Variables of clients whose parts of the multiprocessors are in proportion to speeds, and all used."""
    parts = [f"{100 * speed / sum(speeds):.0f}" for speed in speeds]
    return [{**variables, "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": part} for part in parts]
