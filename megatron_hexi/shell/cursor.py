"""A place in a text that is read from its beginning to its end."""

from __future__ import annotations

import re
from bisect import bisect_right
from pathlib import Path

from megatron_hexi.errors import HexiError


class Cursor:
    """A place in a text, by which patterns are matched and errors name their line."""

    def __init__(self, text: str, path: Path, file: str, line: int = 1) -> None:
        """Begin at the beginning of a text, which starts at a line of a file."""
        self.text, self.path, self.file, self.at = text, path, file, 0
        self._first = line
        self._ends = [match.end() for match in re.finditer("\n", text)]

    @property
    def line(self) -> int:
        """The line of the place, from 1."""
        return self._first + bisect_right(self._ends, self.at)

    @property
    def is_at_end(self) -> bool:
        """Whether all of the text was read."""
        return self.at >= len(self.text)

    def sees(self, pattern: str | re.Pattern[str]) -> re.Match[str] | None:
        """Return the match of a pattern at this place."""
        return re.compile(pattern).match(self.text, self.at)

    def take(self, pattern: str | re.Pattern[str]) -> re.Match[str] | None:
        """Return the match of a pattern at this place, and go behind it."""
        match = self.sees(pattern)
        if match is not None:
            self.at = match.end()
        return match

    def error(self, what: str, at: int | None = None) -> HexiError:
        """Return an error about this place, or an earlier one."""
        self.at = self.at if at is None else at
        shown = self.text[self.at :].split()[0][:40] if self.text[self.at :].split() else "the end"
        return HexiError(f"{self.file or self.path}, line {self.line}: {shown}: {what}")

    def inside(self, opened: str, closed: str) -> str:
        """Return the text up to the end of a parenthesis, or the like, that was opened, and go behind it."""
        start, depth = self.at, 1
        while self.at < len(self.text):
            if self.take(r"\\.|'[^']*'") or self.take(re.compile(r'"(?:\\.|[^"\\])*"', re.DOTALL)):
                continue
            depth += self.text.startswith(opened, self.at) - self.text.startswith(closed, self.at)
            self.at += 1
            if depth == 0:
                return self.text[start : self.at - 1]
        raise self.error(f"is not closed; close it by {closed}", start)
