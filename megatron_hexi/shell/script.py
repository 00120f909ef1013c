"""Shell scripts read without being run: their assignments, the files that they source, and their commands.

Nothing is carried out. The value of a variable is known where every run of the script gives it the same one:
below a condition, in a loop or a function it is marked as unknown, as is the output of a command. Only a mark
in the words of a training is a mistake. Variables of the environment count as not set.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from megatron_hexi.errors import HexiError
from megatron_hexi.shell.cursor import Cursor
from megatron_hexi.shell.expansion import Expander
from megatron_hexi.shell.words import Word
from megatron_hexi.text_file import read_text

#: A launch script has a few kilobytes.
MAX_BYTES = 2**18
_MAX_DEPTH = 50

_BLANK = re.compile(r"(?:[ \t]|\\\n)+")
_BETWEEN = re.compile(r"(?:[ \t\r)]|\((?!\()|\\\n|\|(?!\|)|&(?![&>])|#[^\n]*)+")
_RESERVED = re.compile(
    r"(?:if|then|elif|else|fi|for|while|until|do|done|case|esac|function|time|!|\{|\})(?=[\s;&|)]|$)"
)
_DEPTHS = {"if": 1, "for": 1, "while": 1, "until": 1, "case": 1, "fi": -1, "done": -1, "esac": -1}
_FUNCTION = re.compile(r"(?:function\s+)?[A-Za-z_][\w-]*[ \t]*\(\)\s*\{|function\s+[A-Za-z_][\w-]*\s*\{")
_TEST = re.compile(r"\[\[?\s[^\n]*?\s\]\]?(?=[\s;&|)]|$)")
_REDIRECTION = re.compile(r"\d*(?:&>>?|>>|>&|<&|>\||<<<|<>|>|<)[ \t]*")
_HEREDOC = re.compile(r"\d*<<(-?)[ \t]*(['\"]?)(\w+)\2")
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\[[^]]*\])?(\+?)=")
_DECLARING = ("export", "local", "declare", "typeset", "readonly")
#: Builtins whose words are names of variables that they set.
_SETTING = ("read", "printf", "let", "mapfile", "readarray", "getopts", "unset")
#: Names that an integer expression sets.
_SET_NUMBER = re.compile(r"([A-Za-z_]\w*)\s*(?:[-+*/%]?=(?!=)|\+\+|--)")


class Shell(Expander):
    """Reads scripts and keeps what they set and start."""

    def __init__(self) -> None:
        """Begin with nothing set."""
        super().__init__()
        self.commands: list[list[Word]] = []
        self.missing: list[Word] = []
        self._files = self._depth = 0
        self._is_sure = True
        self._function_ends: list[int] = []
        self._set_in_functions: set[str] = set()
        self._heredocs: list[tuple[bool, str]] = []

    def read(self, text: str, path: Path, file: str = "", line: int = 1) -> None:
        """Read a script, or a part of one.

        Raises:
            HexiError: quotes or an array are not closed, a statement is not understood, or files source each
                other.
        """
        self._files += 1
        if self._files > _MAX_DEPTH:
            raise HexiError(f"{path}: calls itself too often to be read; run it: hexi plan … -- bash {path}")
        cursor = Cursor(text.replace("\r\n", "\n"), path, file, line)
        while not cursor.is_at_end:
            if cursor.take(_BETWEEN):
                continue
            if joined := cursor.take(r"&&|\|\|"):
                self._is_sure &= joined[0] == "&&"
            elif cursor.take(r"[\n;]+"):
                self._is_sure = True
            else:
                self._statement(cursor)
        self._files -= 1

    def _statement(self, cursor: Cursor) -> None:
        if cursor.take(_FUNCTION):
            self._depth += 1
            self._function_ends.append(self._depth)
        elif word := cursor.take(_RESERVED):
            self._depth += _DEPTHS.get(word[0], 0) + (word[0] == "{") - (word[0] == "}")
            self._depth = max(self._depth, 0)
            if self._function_ends and self._depth < self._function_ends[-1]:
                self._function_ends.pop()
            if word[0] == "for" and (name := cursor.take(r"\s*([A-Za-z_]\w*)")):
                self._assign(name[1], Word("", cursor.line, cursor.file), is_sure=False)
        elif cursor.take(r"\(\("):
            line = cursor.line
            for name in _SET_NUMBER.findall(cursor.inside("(", ")")):
                self._assign(name, Word("", line, cursor.file), is_sure=False)
        elif cursor.take(_TEST):
            self._is_sure = False
        else:
            self._simple(cursor)

    def _simple(self, cursor: Cursor) -> None:
        """Read an assignment, or a command with its redirections."""
        start, line = cursor.at, cursor.line
        words: list[Word] = []
        while True:
            cursor.take(_BLANK)
            if heredoc := cursor.take(_HEREDOC):
                self._heredocs.append((bool(heredoc[1]), heredoc[3]))
            elif cursor.sees(r"[<>]\("):
                cursor.at += 2
                shown = f"<({cursor.inside('(', ')')[:40]})"
                words.append(Word(self.unknowns.mark(shown, line, cursor.file), line))
            elif cursor.take(_REDIRECTION):
                self.word(cursor)
            elif cursor.is_at_end or cursor.sees(r"[\n;&|()]|#"):
                break
            elif (not words or words[0].text in _DECLARING) and (match := cursor.take(_ASSIGNMENT)):
                self._read_assignment(match, cursor)
            else:
                words += self.word(cursor)
            if cursor.at == start:
                raise cursor.error("is not understood; run the script: hexi plan … -- bash SCRIPT")
        self._skip_heredocs(cursor)
        if words:
            self._command(words, cursor)

    def _command(self, words: list[Word], cursor: Cursor) -> None:
        """Read what a command brings: a file, a text, values of variables; keep any other."""
        names = [os.path.basename(word.text) for word in words]
        shell = next((number for number, name in enumerate(names) if name in ("bash", "sh")), len(names))
        rest = words[shell + 1 :]
        if names[0] in ("source", ".") and len(words) > 1:
            self._source(words[1], cursor)
        elif shell == 0 and rest and rest[0].text.endswith(".sh"):
            self._source(rest[0], cursor)
        elif names[0] == "eval":
            self.read(" ".join(word.text for word in words[1:]), cursor.path, cursor.file, words[0].line)
        elif len(rest) > 1 and re.fullmatch(r"-\w*c", rest[0].text):
            self.read(rest[1].text, cursor.path, cursor.file, rest[1].line)
        elif names[0] in _SETTING:
            for word in words[1:]:
                if name := re.match(r"[A-Za-z_]\w*", word.text):
                    self._assign(name[0], word, is_sure=False)
        else:
            self._is_sure &= names[0] != "test"
            self.commands.append(words)

    def _source(self, word: Word, cursor: Cursor) -> None:
        """Read another script, or keep its name where it is not there."""
        for path in (Path(word.text), cursor.path.parent / word.text):
            if not self.unknowns.found(word.text) and os.path.isfile(path):
                self.read(read_text(path, MAX_BYTES), path, os.path.relpath(path))
                return
        self.missing.append(word._replace(text=self.unknowns.shown(word.text)))

    def _skip_heredocs(self, cursor: Cursor) -> None:
        for tabs, end in self._heredocs:
            close = re.compile(rf"^{'\t*' if tabs else ''}{end}$", re.MULTILINE).search(
                cursor.text, cursor.at
            )
            rest = cursor.text.find("\n", cursor.at)
            if close is not None and rest >= 0:  # what stands behind it on its line is left out
                cursor.at = close.end()
        self._heredocs = []

    def _read_assignment(self, match: re.Match[str], cursor: Cursor) -> None:
        value: Word | list[Word]
        opened = match.start()
        if cursor.take(r"\("):
            value = []
            while not cursor.take(r"\)"):
                if cursor.take(r"(?:\s|\\\n)+") or cursor.take(r"#[^\n]*"):
                    continue
                if cursor.is_at_end:
                    raise cursor.error("is not closed; close the parenthesis", opened)
                value += self.word(cursor, "array")
        else:
            value = self.value(cursor)
        self._assign(match[1], value, append=bool(match[3]), is_sure=not match[2])

    def _assign(
        self, name: str, value: Word | list[Word], *, append: bool = False, is_sure: bool = True
    ) -> None:
        """Give a variable a value, which is unknown where the statement may not run."""
        before = self.variables.get(name) if append else None
        if self._function_ends:
            self._set_in_functions.add(name)
        if not is_sure or self._depth or not self._is_sure or name in self._set_in_functions:
            place = value if isinstance(value, Word) else next(iter(value), Word("", 0))
            mark = self.unknowns.mark(f"{name}{'+' * append}=…", place.line, place.file)
            value = [place._replace(text=mark)] if isinstance(value, list) else place._replace(text=mark)
        if isinstance(before, list):
            value = [*before, *(value if isinstance(value, list) else [value])]
        elif isinstance(before, Word):
            if isinstance(value, Word):
                value = before._replace(text=before.text + value.text)
            else:
                value = [before, *value]
        self.variables[name] = value
