"""Numbers and names as the page spells them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

#: The catalogue's names of the suite's own GPUs; others keep theirs.
_SHORT = {"H100-SXM-80GB": "H100", "A100-SXM-80GB": "A100", "A800-SXM-80GB": "A800", "L40S-48GB": "L40S"}


def shorten(words: str) -> str:
    """Without what the names of the suite's GPUs need not say."""
    for name, short in _SHORT.items():
        words = words.replace(name, short)
    return words


def spell_gpus(gpus: Mapping[str, int]) -> str:
    """``8 H100, 16 A100``."""
    return shorten(", ".join(f"{count} {name}" for name, count in gpus.items()))


def percent(part: float | None, digits: int = 1) -> str:
    """``95.1 %``."""
    return "-" if part is None else f"{part * 100:.{digits}f} %"


def table(heads: Sequence[str], rows: Sequence[Sequence[str]], words: Sequence[int] = ()) -> str:
    """A Markdown table, numbers to the right.

    Args:
        heads: of the columns.
        rows: as many cells each.
        words: columns that hold words.
    """
    rule = ["---" if number in words else "---:" for number in range(len(heads))]
    lines = [heads, rule, *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
