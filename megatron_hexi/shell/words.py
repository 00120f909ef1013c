"""Words of a shell: fields with their places, and parts of them that only a running shell knows."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

#: Stands inside a text for a part that only a running shell knows, by number; no script has a NUL byte.
_UNKNOWN = re.compile("\0(\\d+)\0")
#: Stands inside a text for a line that a backslash joined to the one before, so that lines can be counted.
JOINED = "\1"
_BLANKS = re.compile(f"([ \t\n{JOINED}]+)")


class Word(NamedTuple):
    """A word of a file of arguments or of a script.

    Attributes:
        text: the word as a shell passes it to the program.
        line: line of the file, from 1.
        file: the file, where it is not the one that is read but one that this takes in; else empty.
    """

    text: str
    line: int
    file: str = ""


def unplaced(texts: Iterable[str]) -> list[Word]:
    """Return words that stand in no file."""
    return [Word(text, 0) for text in texts]


class Unknown(NamedTuple):
    """A part of a word that only a running shell knows, as it stands in the script.

    Attributes:
        variable: it is a variable that no line before gives a value; it is empty if the environment has none.
    """

    text: str
    line: int
    file: str
    variable: bool = False

    @property
    def word(self) -> Word:
        """The part as a word."""
        return Word(self.text, self.line, self.file)


class Unknowns(list[Unknown]):
    """All parts of a script that only a running shell knows, in the order of their numbers."""

    def mark(self, text: str, line: int, file: str, *, variable: bool = False) -> str:
        """Return the text that stands for a new part."""
        self.append(Unknown(text, line, file, variable))
        return f"\0{len(self) - 1}\0"

    def found(self, text: str) -> list[Unknown]:
        """Return the parts that stand in a text."""
        return [self[int(number)] for number in _UNKNOWN.findall(text)]

    def shown(self, text: str) -> str:
        """Return a text with its unknown parts as they stand in the script."""
        return _UNKNOWN.sub(lambda match: self[int(match[1])].text, text)

    def without_variables(self, text: str) -> str | None:
        """Return a text with unset variables left empty; ``None``: other parts are unknown."""
        if any(not part.variable for part in self.found(text)):
            return None
        return _UNKNOWN.sub("", text)


class Fields:
    """Collects the fields that one word of a script becomes, as bash splits it."""

    def __init__(self, line: int, file: str, *, splits: bool = True) -> None:
        """Begin a word at a place; that of an assignment stays whole, with its joined lines known."""
        self.fields: list[Word] = []
        self._place = (line, file)
        self._splits = splits
        self._current: Word | None = None

    def add(self, text: str) -> None:
        """Add text that is not split: a literal, or what stands in quotes."""
        before = self._current or Word("", *self._place)
        self._current = before._replace(
            text=before.text + (text.replace(JOINED, "") if self._splits else text)
        )

    def split(self, values: Sequence[Word]) -> None:
        """Add the values of an unquoted expansion, which blanks separate."""
        if not self._splits:
            self.splice(values)
            return
        for number, value in enumerate(values):
            if number:
                self._end()
            line = value.line
            for piece in _BLANKS.split(value.text):
                if _BLANKS.fullmatch(piece):
                    self._end()
                    line += piece.count("\n") + piece.count(JOINED)
                elif piece:
                    before = self._current or Word("", line, value.file)
                    self._current = before._replace(text=before.text + piece)

    def splice(self, values: Sequence[Word]) -> None:
        """Add the elements of a quoted array: each a field of its own, or one text in an assignment."""
        for number, value in enumerate(values):
            if number and self._splits:
                self._end()
            before = self._current or value._replace(text="")
            blank = " " if number and not self._splits else ""
            self._current = before._replace(text=before.text + blank + value.text)

    def _end(self) -> None:
        if self._current is not None:
            self.fields.append(self._current)
            self._current = None

    def finish(self) -> list[Word]:
        """Return the fields."""
        self._end()
        return self.fields


def place_of(source: str, words: Iterable[Word]) -> str:
    """Return the place of words for a message: their file, and their lines as far as they are known."""
    found = list(words)
    file = next((word.file for word in found if word.file), source)
    lines = sorted({word.line for word in found if word.line and (word.file or source) == file})
    if not lines:
        return file
    listed = f"{', '.join(map(str, lines[:8]))}{', …' * (len(lines) > 8)}"
    return f"{file}, line{'s' * (len(lines) > 1)} {listed}"
