"""Markdown that the generators share."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

#: Below the title of every generated page.
GENERATED_FROM = "<!-- Made from {source}: python -m scripts.docs -->"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table; cells are Markdown, in which bars are escaped."""
    first, *others = (
        f"| {' | '.join(cell.replace('|', '\\|') for cell in cells)} |\n" for cells in (head, *rows)
    )
    return "".join([first, "|---" * len(head), "|\n", *others])


def code(text: str) -> str:
    """The text as code; nothing stays nothing."""
    return f"`{text}`" if text else ""


def slug(heading: str) -> str:
    """The anchor that GitHub and Sphinx give a heading."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def one_line(text: str) -> str:
    """Text that was wrapped, in one line."""
    return " ".join(text.split())


def paragraphs(text: str) -> str:
    """Text in paragraphs, each in one line."""
    return "\n\n".join(one_line(part) for part in re.split(r"\n\s*\n", text.strip()))
