"""Runs programs of the machine, and passes on what they say as they fail."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from textwrap import shorten

from megatron_hexi.errors import PlatformError

_MOST_SAID = 500


def output_of(command: Sequence[str], seconds: float | None = None) -> str:
    """Return what a program prints.

    Raises:
        FileNotFoundError: there is no such program.
    """
    name = f"`{' '.join(command)[:80]}`"
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=seconds, check=False
        )
    except subprocess.TimeoutExpired:
        raise PlatformError(f"{name} did not end within {seconds:g} s") from None
    if done.returncode:
        said = shorten(f"{done.stdout} {done.stderr}", _MOST_SAID) or "nothing was printed"
        raise PlatformError(f"{said} ({name} ended with {done.returncode})")
    return done.stdout
