"""Words of a shell: fields with their places, and parts of them that only a running shell knows."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

#: Stands inside a text for a part that only a running shell knows, by number; no script has a NUL byte.
_UNKNOWN = re.compile("\0(\\d+)\0")
#: Stands inside a text for a line that a backslash joined to the one before, so that lines can be counted.
JOINED = "\1"
_BLANKS = re.compile(f"[ \t\n{JOINED}]+")


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

    def __init__(self, line: int, file: str) -> None:
        """Begin a word at a place."""
        self.fields: list[Word] = []
        self._place = (line, file)
        self._current: Word | None = None

    def add(self, text: str) -> None:
        """Add text that is not split: a literal, or what stands in quotes."""
        before = self._current or Word("", *self._place)
        self._current = before._replace(text=before.text + text.replace(JOINED, ""))

    def split(self, value: Word) -> None:
        """Add the value of an unquoted expansion, which blanks separate."""
        line = value.line
        rest = value.text
        while rest:
            match = _BLANKS.search(rest)
            piece = rest if match is None else rest[: match.start()]
            if piece:
                before = self._current or Word("", line, value.file)
                self._current = before._replace(text=before.text + piece)
            if match is None:
                return
            self._end()
            line += match[0].count("\n") + match[0].count(JOINED)
            rest = rest[match.end() :]

    def splice(self, values: Sequence[Word]) -> None:
        """Add the elements of a quoted array, each a field of its own."""
        for number, value in enumerate(values):
            if number:
                self._end()
            before = self._current or value._replace(text="")
            self._current = before._replace(text=before.text + value.text)

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


def arithmetic(
    text: str, value: Callable[[str], int | None], assign: Callable[[str, int], None]
) -> int | None:
    """Return the value of a shell's integer expression; ``None``: a part of it is not known.

    Args:
        value: returns the value of a variable.
        assign: gives a variable a value.
    """
    text = text.strip()
    step = re.fullmatch(r"(\w+)(\+\+|--)|(\+\+|--)(\w+)", text)
    if step:
        text = f"{step[1] or step[4]}{(step[2] or step[3])[0]}=1"
    given = re.fullmatch(r"([A-Za-z_]\w*)\s*([-+*/%]?)=(?!=)(.*)", text, re.DOTALL)
    if given:
        name, operator, rest = given.groups()
        result = arithmetic(f"{name}{operator}({rest})" if operator else rest, value, assign)
        if result is not None:
            assign(name, result)
        return result
    return _Expression(text, value).result()


class _Expression:
    """An integer expression, by precedence climbing."""

    _LEVELS = (("||",), ("&&",), ("==", "!="), ("<=", ">=", "<", ">"), ("+", "-"), ("*", "/", "%"), ("**",))

    def __init__(self, text: str, value: Callable[[str], int | None]) -> None:
        self._tokens = re.findall(r"\d+|\$?\{?[A-Za-z_]\w*\}?|\*\*|[|&=!<>]=|\|\||&&|\S", text)
        self._value = value
        self._known = bool(self._tokens)

    def result(self) -> int | None:
        """Return the value, ``None`` if it is not known or the expression is of another kind."""
        found = self._level(0)
        return found if self._known and not self._tokens else None

    def _level(self, number: int) -> int:
        if number == len(self._LEVELS):
            return self._operand()
        left = self._level(number + 1)
        while self._tokens and self._tokens[0] in self._LEVELS[number]:
            left = self._combine(self._tokens.pop(0), left, self._level(number + 1))
        return left

    def _combine(self, operator: str, left: int, right: int) -> int:
        if operator in ("/", "%", "**") and (right < 1 or (operator == "**" and right > 62)):
            self._known = False
            return 0
        found = {
            "||": lambda: bool(left or right),
            "&&": lambda: bool(left and right),
            "==": lambda: left == right,
            "!=": lambda: left != right,
            "<=": lambda: left <= right,
            ">=": lambda: left >= right,
            "<": lambda: left < right,
            ">": lambda: left > right,
            "+": lambda: left + right,
            "-": lambda: left - right,
            "*": lambda: left * right,
            "/": lambda: int(left / right),
            "%": lambda: left - right * int(left / right),
            "**": lambda: left**right,
        }
        return int(found[operator]())

    def _operand(self) -> int:
        token = self._tokens.pop(0) if self._tokens else ""
        if token in ("-", "+", "!"):
            operand = self._operand()
            return {"-": -operand, "+": operand, "!": int(not operand)}[token]
        if token == "(":
            inner = self._level(0)
            self._known &= bool(self._tokens) and self._tokens.pop(0) == ")"
            return inner
        if token.isdigit():
            return int(token)
        name = token.strip("${}")
        found = self._value(name) if name.isidentifier() else None
        self._known &= found is not None
        return found or 0
