"""Words of Megatron's command line for an argument of a given value."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from megatron_hexi.options.parser import Row, read_rows
from megatron_hexi.options.release import assumed_series


@functools.cache
def rows_by_argument() -> Mapping[str, tuple[Row, ...]]:
    """Return the rows of Megatron's options by the argument that they set, the current spelling first."""
    found: dict[str, tuple[Row, ...]] = {}
    for row in read_rows():
        if assumed_series() in row.versions:
            found[row.dest] = (*found.get(row.dest, ()), row)
    return found


def switch_of(rows: Sequence[Row], value: bool) -> str | None:
    """Return the flag that sets an argument to true or false; ``None``: no option has such a flag."""
    for row in rows:
        if row.kind == "both":
            return row.flags[0] if value else row.flags[0].replace("--", "--no-", 1)
        if row.kind == str(value).lower():
            return row.flags[0]
    return None


def value_words(value: Any, row: Row) -> Iterator[str]:
    """Yield the words that state a value on the command line."""
    if row.type == "pattern" and isinstance(value, list):
        yield str(value).replace(" ", "")
    elif row.type == "pair" and isinstance(value, list):
        yield ",".join(map(str, value))
    elif isinstance(value, list):
        yield from map(str, value)
    elif row.type == "int" and isinstance(value, float) and value.is_integer():
        yield str(int(value))
    else:
        yield str(value)
