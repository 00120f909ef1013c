"""Slurm's host lists, which name many hosts in one word."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator

from megatron_hexi.errors import PlatformError

#: Slurm's own limit of a list (its MAX_RANGE).
_MOST = 2**16


def expand_hostlist(hostlist: str) -> list[str]:
    """Return the hosts of a Slurm host list, in its order.

    >>> expand_hostlist("a[1-3,05],b")
    ['a1', 'a2', 'a3', 'a05', 'b']
    >>> expand_hostlist("r[1-2]n[08-10]")
    ['r1n08', 'r1n09', 'r1n10', 'r2n08', 'r2n09', 'r2n10']
    """
    return [host for entry in _split(hostlist) for host in _expand(entry)]


def _split(hostlist: str) -> Iterator[str]:
    """Return the entries between commas outside brackets."""
    if re.fullmatch(r"(?:[^\[\],]|\[[^\[\]]+\]|,)*", hostlist) is None:
        raise PlatformError(
            f"SLURM host list {hostlist[:80]}: the brackets do not match; check SLURM_JOB_NODELIST"
        )
    return (match.group() for match in re.finditer(r"(?:[^\[\],]|\[[^\[\]]+\])+", hostlist))


def _expand(entry: str) -> Iterator[str]:
    """Return the hosts of an entry: all combinations of its bracketed ranges, the last varying fastest."""
    parts = re.split(r"(\[[^\]]+\])", entry)
    choices = [_numbers(part[1:-1]) if part.startswith("[") else [part] for part in parts]
    _check_count(math.prod(map(len, choices)))
    return ("".join(combination) for combination in itertools.product(*choices))


def _check_count(hosts: int) -> None:
    if hosts > _MOST:
        raise PlatformError(f"SLURM host list: names more than {_MOST} hosts; check SLURM_JOB_NODELIST")


def _numbers(ranges: str) -> list[str]:
    """Return the numbers of ranges such as ``"1-3,05"`` as strings, with leading zeros."""
    numbers: list[str] = []
    for item in ranges.split(","):
        match = re.fullmatch(r"([0-9]{1,18})(?:-([0-9]{1,18}))?", item)
        if match is None or int(match[2] or match[1]) < int(match[1]):
            raise PlatformError(
                f"SLURM host list: {item[:40]} is not a number or a range, as 1-3; check SLURM_JOB_NODELIST"
            )
        first, last = match[1], match[2] or match[1]
        _check_count(int(last) - int(first))
        numbers += [str(number).zfill(len(first)) for number in range(int(first), int(last) + 1)]
    return numbers
