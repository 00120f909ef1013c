"""Numbers and names as the page spells them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from benchmarks.simulation.results import Result, Rival

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


def layout_cell(words: str) -> str:
    """A layout as a table's cell."""
    return re.sub(r"\b1 groups of ", "", shorten(words)).replace("|", "/")


def times(ratio: float | None, rival: Rival | None = None) -> str:
    """``1.36x (usp)``; a dash where there is nothing to compare with."""
    if ratio is None:
        return "-"
    return f"{ratio:.2f}x" + (f" ({rival.name})" if rival else "")


def percent(part: float | None, digits: int = 1) -> str:
    """``95.1 %``."""
    return "-" if part is None else f"{part * 100:.{digits}f} %"


def count(number: float | None) -> str:
    """Tokens/s: ``12,345``."""
    return "-" if number is None else f"{number:,.0f}"


def unit(result: Result) -> str:
    """``2 x 1``: tensor- and pipeline-parallel size."""
    return f"{result.tensor_parallel} x {result.pipeline_parallel}" if result.tensor_parallel else "-"


def why_no_uniform(result: Result) -> str:
    """Why the uniform baselines have nothing; each reason once."""
    reasons: dict[str, list[str]] = {}
    for rival in result.rivals:
        if rival.uniform:
            reasons.setdefault(rival.why_not, []).append(rival.name)
    return shorten("; ".join(f"{', '.join(names)}: {why}" for why, names in reasons.items()))


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


def details(title: str, body: str) -> str:
    """What is folded away until somebody asks for it."""
    return f"<details><summary>{title}</summary>\n\n{body}\n\n</details>"
