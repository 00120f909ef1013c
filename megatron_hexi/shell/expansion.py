"""Words of a script as bash expands them: quotes, variables with defaults, arrays and sums of integers."""

from __future__ import annotations

import ast
import operator
import os
import re
from collections.abc import Callable

from megatron_hexi.shell.cursor import Cursor
from megatron_hexi.shell.words import JOINED, Fields, Unknowns, Word

#: Literal text of a word outside quotes, by what else may stand there.
_LITERAL = {
    "command": re.compile(r"""[^\s\\'"`$;&|<>()]+"""),
    "array": re.compile(r"""[^\s\\'"`$)]+"""),
    "file": re.compile(r"""[^\s\\'"`$]+"""),
}
_PARAMETER = re.compile(
    r"(?P<name>[A-Za-z_]\w*|[@*#?$!]|\d+)(?:\[(?P<index>[@*]|\d+)\])?(?:(?P<colon>:?)(?P<sign>[-=])(?P<default>.*))?",
    re.DOTALL,
)
#: Commands that print the folder of the script, as ``cd "$(dirname "$0")" && pwd``, or a folder beside it.
_FOLDER = re.compile(
    r'(?:cd (?:-- )?"?\$\()?\s*dirname (?:-- )?"?\$\{?(?:0|BASH_SOURCE)[^)]*\)?"?([\w./-]*).*', re.DOTALL
)
_OPERATORS: dict[type, Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}


class Expander:
    """Reads words and fills in what a script says of its variables."""

    def __init__(self) -> None:
        """Begin without variables."""
        self.variables: dict[str, Word | list[Word]] = {}
        self.unknowns = Unknowns()
        self.defaults: list[Word] = []

    def word(self, cursor: Cursor, among: str = "command") -> list[Word]:
        """Return the fields of the word at a place, and go behind it.

        Args:
            among: where it stands: in a "command", an "array" or a "file" of nothing but arguments.
        """
        return self._read(cursor, Fields(cursor.line, cursor.file), among)

    def value(self, cursor: Cursor) -> Word:
        """Return the value, which is not split, of an assignment at a place, and go behind it."""
        fields = Fields(cursor.line, cursor.file, splits=False)
        return next(iter(self._read(cursor, fields, "command")), Word("", cursor.line, cursor.file))

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
            if match := cursor.take(r'[^\\"`$]+'):
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
        found: str | Word | list[Word] | None
        if cursor.take(r"\$\(\("):
            found = self._sum(self._text(cursor.inside("(", ")"), cursor))
            cursor.take(r"\)")
        elif cursor.take(r"\$\("):
            folder = _FOLDER.fullmatch(cursor.inside("(", ")"))
            found = os.path.join(cursor.path.parent, folder[1].strip("/")).rstrip("/") if folder else None
        elif cursor.take("`"):
            if cursor.take(r"[^`]*`") is None:
                raise cursor.error("is not closed; close the quotes", start)
            found = None
        elif cursor.take(r"\$\{"):
            found = self._parameter(cursor.inside("{", "}"), cursor, start)
        elif match := cursor.take(r"\$([A-Za-z_]\w*|[0-9@*#?$!])"):
            found = self._parameter(match[1], cursor, start)
        else:
            fields.add(cursor.text[cursor.at])
            cursor.at += 1
            return
        if found is None:
            found = self.unknowns.mark(cursor.text[start : cursor.at], line, cursor.file)
        if isinstance(found, list):
            (fields.splice if quoted else fields.split)(found)
        elif isinstance(found, str) or quoted:
            fields.add(found if isinstance(found, str) else found.text)
        else:
            fields.split([found])

    def _parameter(self, inner: str, cursor: Cursor, start: int) -> str | Word | list[Word] | None:
        """Return the value of ``${…}``, text that is not split; ``None``: only a running shell knows it."""
        match = _PARAMETER.fullmatch(inner)
        if match is None:
            return None
        value = self.variables.get(match["name"])
        if match["name"] in ("0", "BASH_SOURCE"):
            return str(cursor.path)
        if isinstance(value, list) and match["index"] == "*":
            return " ".join(element.text for element in value)
        if isinstance(value, list) and match["index"] != "@":
            value = dict(enumerate(value)).get(int(match["index"] or 0))
        is_empty = isinstance(value, Word) and self.unknowns.without_variables(value.text) == ""
        if match["sign"] and (value is None or (match["colon"] and is_empty)):
            filled = Word(cursor.text[start : cursor.at], cursor.line, cursor.file)
            self.defaults += [filled] * (value is None)
            filled = filled._replace(text=self._text(match["default"], cursor))
            if match["sign"] == "=":
                self.variables[match["name"]] = filled
            return filled.text if re.fullmatch(r"([\"']).*\1", match["default"]) else filled
        if value is None and re.match(r"\w", match["name"]):
            return self.unknowns.mark(cursor.text[start : cursor.at], cursor.line, cursor.file, variable=True)
        return value

    def _text(self, text: str, cursor: Cursor) -> str:
        """Return a text, as of a default or a sum, with its variables filled in and without its quotes."""
        inner = Cursor(re.sub("[\"']", "", text), cursor.path, cursor.file, cursor.line)
        fields = Fields(cursor.line, cursor.file, splits=False)
        while not inner.is_at_end:
            if match := inner.take(r"[^$`\\]+|\\"):
                fields.add(match[0])
            else:
                self._expand(inner, fields, quoted=True)
        return "".join(field.text for field in fields.finish())

    def _sum(self, text: str) -> str | None:
        """Return the value of ``+ - * / %`` over natural numbers; ``None`` for any other expression."""
        filled = re.sub(r"[A-Za-z_]\w*", lambda match: self._number(match[0]), text).replace("/", "//")
        if len(filled) > 200 or not re.fullmatch(r"[\d\s()+\-*/%]+", filled):
            return None
        try:
            return str(_evaluate(ast.parse(filled.strip(), mode="eval").body))
        except (SyntaxError, ValueError, ZeroDivisionError):
            return None

    def _number(self, name: str) -> str:
        value = self.variables.get(name)
        return value.text if isinstance(value, Word) else "?"


def _evaluate(node: ast.expr) -> int:
    """Return the value of a sum.

    Raises:
        ValueError: it has a power, or a negative quotient.
    """
    match node:
        case ast.Constant(value=int(number)):
            return number
        case ast.BinOp(left, kind, right) if type(kind) in _OPERATORS:
            sides = _evaluate(left), _evaluate(right)
            if min(sides) < 0 and not isinstance(kind, ast.Add | ast.Sub | ast.Mult):
                raise ValueError  # bash rounds these towards zero
            return _OPERATORS[type(kind)](*sides)
    raise ValueError
