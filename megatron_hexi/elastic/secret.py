"""The secret that the nodes of an elastic job share, and without which nobody can connect to them."""

from __future__ import annotations

import os
import secrets
import stat
from itertools import pairwise
from pathlib import Path

from megatron_hexi.errors import HexiError
from megatron_hexi.text_file import read_text

#: The environment variable with the secret, of an agent and of its ranks.
SECRET_VARIABLE = "HEXI_SECRET"
#: The fewest characters of a secret; fewer could be guessed.
_LEAST = 16
#: The fewest distinct characters, and distances from one to the next, of a random one: 16 hexadecimal digits
#: have fewer once in 100,000.
_LEAST_DISTINCT = 5
_MAKE = "openssl rand -hex 32"


def find_secret(path: str | None, alone: bool) -> bytes:
    """Return the job's secret: from a file, else the environment, else a new one for a job of one node.

    Args:
        path: file of ``--secret-file``, if any.
    """
    text = os.environ.get(SECRET_VARIABLE, "")
    if path is not None:
        place = f"--secret-file {path}"
        text = read_text(path, 4096, f"make it: (umask 077; {_MAKE} > {path})")
        mode = stat.S_IMODE(Path(path).stat().st_mode)
        if mode & 0o077:
            raise HexiError(f"{place}: others may read or write it (mode {mode:04o}); run: chmod 600 {path}")
    elif text:
        place = SECRET_VARIABLE
    elif alone:
        return secrets.token_hex(32).encode()
    else:
        raise HexiError(
            "no secret that only this job's nodes share; give each of them --secret-file job.secret, made by "
            f"(umask 077; {_MAKE} > job.secret), or the same in the environment variable {SECRET_VARIABLE}"
        )
    try:
        secret = text.strip().encode()
    except UnicodeEncodeError:  # bytes of the environment that are no text
        raise HexiError(f"{place}: it is no text; take one from: {_MAKE}") from None
    if len(secret) < _LEAST:
        raise HexiError(
            f"{place}: {len(secret)} characters can be guessed, {_LEAST} are needed; take one from: {_MAKE}"
        )
    if _is_plain(secret):
        raise HexiError(f"{place}: it is no random one, so it can be guessed; take one from: {_MAKE}")
    return secret


def _is_plain(secret: bytes) -> bool:
    """Return whether a secret is plainly not random: of few characters, a sequence, or a part repeated."""
    steps = {after - before for before, after in pairwise(secret)}
    repeats = any(secret[part:] == secret[:-part] for part in range(1, len(secret) // 2 + 1))
    return len(set(secret)) < _LEAST_DISTINCT or len(steps) < _LEAST_DISTINCT or repeats


def secret_of_rank() -> bytes:
    """Return the secret that this rank's agent gave it."""
    return os.environ[SECRET_VARIABLE].encode()
