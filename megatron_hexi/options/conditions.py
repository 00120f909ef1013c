"""Conditions on Megatron's arguments, written as text, so that rules of options are data.

A condition names flags as on the command line, and alternatives are joined by ``or``::

    --swiglu                                   the flag is given
    no --swiglu                                it is not given
    --recompute-granularity full|selective     its value, or one of its values, is one of these
    --position-embedding-type not rope|none    its value is none of these
    --min-lr > --lr, --log-interval < 1        its number is above, or below, another's or a constant
    --log-memory-interval % --log-interval     its number is no multiple of the other's
"""

from __future__ import annotations

import functools
import operator
from argparse import Namespace
from collections.abc import Callable, Mapping
from typing import Any

from megatron_hexi.options.parser import Row, read_rows

_COMPARED: Mapping[str, tuple[Callable[[Any, Any], bool], str]] = {
    "<": (operator.lt, "below {}"),
    ">": (operator.gt, "above {}"),
    "%": (lambda number, divisor: divisor == 0 or number % divisor != 0, "that is no multiple of {}"),
}


def is_given(args: Namespace, flag: str) -> bool:
    """Return whether a job uses an option; 0 where Megatron's default is a number, and off, are no use."""
    row = row_of(flag)
    value = value_of(args, flag)
    if row.kind == "false":
        return value is False
    return bool(value) or (value is not None and value is not False and row.default is None)


def value_of(args: Namespace, flag: str) -> Any:
    """Return the argument that a flag sets; ``None`` where it is not given, or another version lacks it."""
    return getattr(args, row_of(flag).dest, None)


def holds(condition: str, args: Namespace) -> bool:
    """Whether a condition holds for the arguments of a job."""
    return any(_holds(alternative.split(), args) for alternative in condition.split(" or "))


def _holds(words: list[str], args: Namespace) -> bool:
    if words[0] == "no":
        return not is_given(args, words[1])
    flag, *rest = words
    if not rest:
        return is_given(args, flag)
    value = value_of(args, flag)
    if rest[0] in _COMPARED:
        other = value_of(args, rest[1]) if rest[1].startswith("--") else float(rest[1])
        are_numbers = isinstance(value, (int, float)) and isinstance(other, (int, float))
        return are_numbers and _COMPARED[rest[0]][0](value, other)
    # Megatron parses some names to members of an enumeration.
    values = {str(getattr(item, "name", item)) for item in (value if isinstance(value, list) else [value])}
    return values.isdisjoint(rest[-1].split("|")) == (rest[0] == "not")


def describe(condition: str, option: str) -> str:
    """Return a condition in words that follow "with"; empty where it is only that `option` is given."""
    return " or ".join(filter(None, (_words(text.split(), option) for text in condition.split(" or "))))


def _words(words: list[str], option: str) -> str:
    if words[0] == "no":
        return f"{words[1]} left out"
    flag, *rest = words
    flag = "" if flag == option else flag
    if not rest:
        return flag
    values = rest[-1].replace("|", " or ")
    if rest[0] in _COMPARED:
        if not flag and rest == [">", "0"]:
            return ""
        return f"{flag or 'a number'} {_COMPARED[rest[0]][1].format(values)}"
    if rest[0] == "not":
        return f"{flag} other than {values}" if flag else f"another value than {values}"
    return f"{flag or 'the value'} {values}"


@functools.cache
def _rows() -> Mapping[str, Row]:
    return {flag: row for row in read_rows() for flag in row.flags}


def row_of(flag: str) -> Row:
    """Return the recorded option of a flag, as the newest version that has it."""
    return _rows()[flag]
