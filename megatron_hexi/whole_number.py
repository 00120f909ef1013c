"""Whole numbers as people type them: in options, environment variables and files of other programs."""

from __future__ import annotations

import re
from collections.abc import Mapping

from megatron_hexi.errors import HexiError

#: Far above any count, and what a port, a rank or a number of GPUs may be.
_MOST = 2**31 - 1


def whole_number(text: str) -> int | None:
    """Return the number that a text spells in the digits 0 to 9; ``None`` for any other text.

    `int` also takes other alphabets' digits, blanks, underscores and a plus, and fails over 4,300 digits.
    """
    return int(text) if re.fullmatch(r"-?[0-9]{1,18}", text) else None


def variable_number(
    environment: Mapping[str, str],
    name: str,
    default: int | None = None,
    *,
    least: int = 0,
    most: int = _MOST,
) -> int:
    """Return the number in an environment variable, which a launcher sets.

    Args:
        default: the number if it is not set; ``None``: it must be.
    """
    text = environment.get(name, "" if default is None else str(default))
    number = whole_number(text)
    if number is None or not least <= number <= most:
        wrong = f"={text[:40]}: is no number from {least} to {most}; unset it, or"
        said = wrong if name in environment else " is not set;"
        raise HexiError(f"{name}{said} start with torchrun or srun, which set it")
    return number
