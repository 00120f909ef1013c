"""The lines that agents and ranks of an elastic job print."""

from __future__ import annotations

import sys


def say(message: str) -> None:
    """Print a line about the job, whole and at once: many processes write to one screen."""
    print(f"hexi: elastic: {message}", file=sys.stderr, flush=True)
