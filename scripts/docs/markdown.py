"""Markdown that the generators share."""

from __future__ import annotations

import re
from collections.abc import Iterable

#: Below the title of every generated page.
GENERATED_FROM = "<!-- Made from {source}: python -m scripts.docs -->"


def definitions(rows: Iterable[tuple[str, str]]) -> str:
    """A list of terms and what each means, in Markdown."""
    return "".join(f"- {term}: {meaning}\n" for term, meaning in rows)


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
