"""Words of a script as bash expands them: quotes, variables, arrays, integers and command substitution."""

from __future__ import annotations

import re
from bisect import bisect_right
from pathlib import Path

from megatron_hexi.errors import HexiError
from megatron_hexi.shell.words import JOINED, Fields, Unknowns, Word, arithmetic

#: Literal text of a word outside quotes, by what else may stand there.
_LITERAL = {
    "command": re.compile(r"""[^\s\\'"`$;&|<>()]+"""),
    "array": re.compile(r"""[^\s\\'"`$)]+"""),
    "file": re.compile(r"""[^\s\\'"`$]+"""),
}
_QUOTED = re.compile(r'[^\\"`$]+')
_NAME = re.compile(r"[A-Za-z_]\w*|[0-9@*#?$!]")
_PARAMETER = re.compile(
    r"(?P<sign>[#!]?)(?P<name>[A-Za-z_]\w*|[@*]|\d+)(?:\[(?P<index>[^]]*)\])?(?P<rest>.*)", re.DOTALL
)
_ENVIRONMENT = re.compile(r"[A-Za-z_]\w*|\d+")


class Cursor:
    """A place in a text that is read from its beginning to its end."""

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


class _Whole(list[Word]):
    """A value that stays whole where no quotes stand around its expansion: a default in quotes."""


class Joined(Fields):
    """Collects the value of an assignment, which is not split."""

    def add(self, text: str) -> None:
        """Add text; joined lines stay known."""
        before = self._current or Word("", *self._place)
        self._current = before._replace(text=before.text + text)

    def split(self, value: Word) -> None:
        """Add the value of an expansion whole."""
        if self._current is None:
            self._current = value
        else:
            self.add(value.text)

    def splice(self, values: list[Word]) -> None:  # type: ignore[override]
        """Add the elements of an array, separated by blanks."""
        self.add(" ".join(value.text for value in values))


class Expander:
    """Reads words and fills in what a script says of its variables."""

    def __init__(self) -> None:
        """Begin without variables."""
        self.variables: dict[str, Word | list[Word]] = {}
        self.positional: list[Word] = []
        self.unknowns = Unknowns()
        self.defaults: list[Word] = []

    def substitute(self, text: str, cursor: Cursor) -> str | None:
        """Return what a command prints; ``None``: only a running shell knows."""
        return None

    def word(self, cursor: Cursor, among: str = "command") -> list[Word]:
        """Return the fields of the word at a place, and go behind it.

        Args:
            among: where it stands: in a "command", an "array" or a "file" of nothing but arguments.
        """
        return self._read(cursor, Fields(cursor.line, cursor.file), among)

    def value(self, cursor: Cursor) -> Word:
        """Return the value of an assignment at a place, and go behind it."""
        found = self._read(cursor, Joined(cursor.line, cursor.file), "command")
        return found[0] if found else Word("", cursor.line, cursor.file)

    def _read(self, cursor: Cursor, fields: Fields, among: str) -> list[Word]:
        while not cursor.is_at_end:
            start = cursor.at
            if match := cursor.take(_LITERAL[among]):
                fields.add(match[0])
            elif cursor.take("'"):
                quoted = cursor.take(r"([^']*)'")
                if quoted is None:
                    raise cursor.error("is not closed; close the quotes", start)
                fields.add(quoted[1])
            elif cursor.take('"'):
                self._read_quoted(cursor, fields, start)
            elif cursor.sees(r"\\\n") and among == "file":
                break
            elif cursor.take(r"\\\n"):
                continue
            elif match := cursor.take(re.compile(r"\\(.)", re.DOTALL)):
                fields.add(match[1])
            elif cursor.sees(r"[$`]"):
                self._expand(cursor, fields, quoted=False)
            elif cursor.sees(r"\\"):
                raise cursor.error("is not closed; close the quotes")
            else:
                break
        return fields.finish()

    def _read_quoted(self, cursor: Cursor, fields: Fields, start: int) -> None:
        # An array alone in quotes is as many fields as it has elements, also none.
        if not cursor.sees(r'\$\{?\w*(?:\[@\]|@)\}?"'):
            fields.add("")
        while not cursor.take('"'):
            if cursor.is_at_end:
                raise cursor.error("is not closed; close the quotes", start)
            if match := cursor.take(_QUOTED):
                fields.add(match[0])
            elif cursor.take(r"\\\n"):
                fields.add(JOINED)
            elif match := cursor.take(r'\\([$`"\\])'):
                fields.add(match[1])
            elif match := cursor.take(r"\\"):
                fields.add(match[0])
            else:
                self._expand(cursor, fields, quoted=True)

    def _expand(self, cursor: Cursor, fields: Fields, *, quoted: bool) -> None:
        """Add what stands for ``$…`` or a command in backquotes."""
        start, line = cursor.at, cursor.line
        found: Word | list[Word]
        if cursor.take(r"\$\(\("):
            inner = cursor.inside("(", ")")
            cursor.take(r"\)")
            result = arithmetic(self._text(inner, cursor), self.number, self.set_number)
            found = self._known(None if result is None else str(result), cursor, start, line)
        elif cursor.take(r"\$\("):
            found = self._known(self.substitute(cursor.inside("(", ")"), cursor), cursor, start, line)
        elif cursor.take("`"):
            command = cursor.take(r"([^`]*)`")
            if command is None:
                raise cursor.error("is not closed; close the quotes", start)
            found = self._known(self.substitute(command[1], cursor), cursor, start, line)
        elif cursor.take(r"\$\{"):
            inner = cursor.inside("{", "}")
            found = self._parameter(inner, cursor.text[start : cursor.at], cursor, line)
        elif cursor.take(r"\$(?=[A-Za-z_0-9@*#?$!])"):
            name = cursor.take(_NAME)
            assert name is not None
            found = self._parameter(name[0], cursor.text[start : cursor.at], cursor, line)
        else:
            fields.add(cursor.text[cursor.at])
            cursor.at += 1
            return
        if isinstance(found, Word):
            if quoted:
                fields.add(found.text)
            else:
                fields.split(found)
        elif quoted or isinstance(found, _Whole):
            fields.splice(found)
        else:
            for number, element in enumerate(found):
                fields.split(element._replace(text=f"{' ' * (number > 0)}{element.text}"))

    def _known(self, text: str | None, cursor: Cursor, start: int, line: int) -> Word:
        """Return a text that was found, or else the mark of a part that only the shell knows."""
        if text is None:
            text = self.unknowns.mark(cursor.text[start : cursor.at], line, cursor.file)
        return Word(text, line, cursor.file)

    def _text(self, text: str, cursor: Cursor) -> str:
        """Return a text, as of a default or an expression, with its variables filled in."""
        inner = Cursor(text.replace('"', ""), cursor.path, cursor.file, cursor.line)
        fields = Joined(cursor.line, cursor.file)
        while not inner.is_at_end:
            if match := inner.take(r"[^$`\\]+"):
                fields.add(match[0])
            elif match := inner.take(re.compile(r"\\(.)", re.DOTALL)):
                fields.add(match[1])
            else:
                self._expand(inner, fields, quoted=True)
        return "".join(field.text for field in fields.finish())

    def _parameter(self, inner: str, written: str, cursor: Cursor, line: int) -> Word | list[Word]:
        """Return the value of ``${…}``."""
        here = Word("", line, cursor.file)
        match = _PARAMETER.fullmatch(inner)
        if match is None:
            simple = {"#": str(len(self.positional)), "?": "0"}.get(inner)
            return here._replace(text=simple or self.unknowns.mark(written, line, cursor.file))
        value = self._variable(match["name"], match["index"], cursor)
        if match["sign"] == "#" and value is not None:
            return here._replace(text=str(len(value if isinstance(value, list) else value.text)))
        text = (
            None
            if value is None
            else value.text
            if isinstance(value, Word)
            else " ".join(v.text for v in value)
        )
        default = re.fullmatch(r"(:?)([-=+?])(.*)", match["rest"], re.DOTALL)
        if default and not match["sign"]:
            lacks = text is None or (default[1] == ":" and self.unknowns.without_variables(text) == "")
            if default[2] in "-=" and lacks:
                if text is None:
                    self.defaults.append(here._replace(text=written))
                filled = here._replace(text=self._text(default[3].strip("'"), cursor))
                if default[2] == "=":
                    self.variables[match["name"]] = filled
                return _Whole([filled]) if re.fullmatch(r"([\"']).*\1", default[3]) else filled
            if default[2] == "+" and not lacks:
                return here._replace(text=self._text(default[3], cursor))
            if default[2] == "+" and text is not None:
                return here
        if match["rest"] in (",,", "^^") and text is not None:
            return here._replace(text=text.lower() if match["rest"] == ",," else text.upper())
        is_plain = not match["sign"] and (not match["rest"] or (default is not None and default[2] != "+"))
        if value is not None and is_plain:
            return value
        is_unset = value is None and bool(_ENVIRONMENT.fullmatch(match["name"]))
        return here._replace(text=self.unknowns.mark(written, line, cursor.file, variable=is_unset))

    def _variable(self, name: str, index: str | None, cursor: Cursor) -> Word | list[Word] | None:
        """Return the value of a variable; ``None`` if no line before gives it one."""
        here = Word("", cursor.line, cursor.file)
        if name in "@*":
            return self.positional if name == "@" else here._replace(text=self._join(self.positional))
        if name.isdigit():
            number = int(name)
            if number == 0:
                return here._replace(text=str(cursor.path))
            return self.positional[number - 1] if number <= len(self.positional) else None
        if name == "BASH_SOURCE":
            return here._replace(text=str(cursor.path))
        value = self.variables.get(name)
        if index is None or value is None:
            return value[0] if isinstance(value, list) and value else None if value == [] else value
        elements = value if isinstance(value, list) else [value]
        if index == "@":
            return elements
        if index == "*":
            return here._replace(text=self._join(elements))
        place = arithmetic(self._text(index, cursor), self.number, self.set_number)
        if place is None or not -len(elements) <= place < len(elements):
            return None
        return elements[place]

    def _join(self, values: list[Word]) -> str:
        separator = self.variables.get("IFS")
        between = separator.text[:1] if isinstance(separator, Word) else " "
        return between.join(value.text for value in values)

    def number(self, name: str) -> int | None:
        """Return the value of a variable in an expression; ``None`` if it is not known or no number."""
        value = self.variables.get(name)
        text = value.text.strip() if isinstance(value, Word) else ""
        return int(text) if re.fullmatch(r"[+-]?\d+", text) else None

    def set_number(self, name: str, value: int) -> None:
        """Give a variable the value of an expression."""
        self.variables[name] = Word(str(value), 0)
