"""Shell scripts read without being run: assignments, conditions, loops, and the commands they come to.

What cannot be known without running is marked, and only a mark in the words of a training is a mistake.
Variables of the environment count as not set. Commands under a condition that is not known are marked, too.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from megatron_hexi.errors import HexiError
from megatron_hexi.shell.commands import ASSIGNMENT, DECLARING, MAX_DEPTH, MAYBE, RUN, SKIP, Commands
from megatron_hexi.shell.expansion import Cursor
from megatron_hexi.shell.words import Word, arithmetic

_MAX_STEPS = 100_000

_BLANK = re.compile(r"(?:[ \t]|\\\n)+")
_BETWEEN = re.compile(r"(?:[ \t\r\n]|(?<!;);(?!;)|\\\n|&(?![&>])|#[^\n]*)+")
_RESERVED = re.compile(
    r"(?:if|then|elif|else|fi|for|while|until|do|done|case|esac|function|time|!|\{|\})(?=[\s;&|)]|$)|;;|\)"
)
#: Reserved words that only go on with, or end, a statement.
_ENDS = frozenset(("then", "fi", "do", "done", "esac", "elif", "else", "}", ")", ";;"))
_FUNCTION = re.compile(r"(?:function\s+)?([A-Za-z_][\w-]*)[ \t]*\(\)\s*|function\s+([A-Za-z_][\w-]*)\s*")
_REDIRECTION = re.compile(r"\d*(?:&>>?|>>|>&|<&|>\||<<<|<>|>|<)[ \t]*")
_HEREDOC = re.compile(r"\d*<<(-?)[ \t]*(['\"]?)(\w+)\2")


class Shell(Commands):
    """Reads scripts and keeps what they set and start."""

    def __init__(self) -> None:
        """Begin with nothing set."""
        super().__init__()
        self._steps = 0
        self._heredocs: list[tuple[bool, str]] = []

    def read(self, text: str, path: Path, file: str = "", line: int = 1) -> None:
        """Read a script, or a part of one."""
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise HexiError(f"{path}: calls itself too often to be read; run it: hexi plan … -- bash {path}")
        self._block(Cursor(text.replace("\r\n", "\n"), path, file, line))
        self._depth -= 1

    @contextmanager
    def _within(self, mode: int) -> Iterator[None]:
        before, self._mode = self._mode, min(self._mode, mode)
        self._nested += 1
        try:
            yield
        finally:
            self._mode = before
            self._nested -= 1

    def _block(self, cursor: Cursor, *ends: str) -> str:
        """Read statements up to a reserved word, and return it; empty at the end."""
        while True:
            cursor.take(_BETWEEN)
            if cursor.is_at_end:
                return ""
            reserved = cursor.sees(_RESERVED)
            if reserved and reserved[0] in ends:
                cursor.at = reserved.end()
                return reserved[0]
            if reserved and reserved[0] in _ENDS:
                cursor.at = reserved.end()  # belongs to something that was not understood
                continue
            self._chain(cursor)

    def _chain(self, cursor: Cursor) -> None:
        """Read statements that are joined by ``&&``, ``||`` and ``|``."""
        self._steps += 1
        if self._steps > _MAX_STEPS:
            raise cursor.error("loops too long to be read; run the script: hexi plan … -- bash SCRIPT")
        self._statement(cursor)
        while match := cursor.take(r"(?:[ \t]|\\\n)*(&&|\|\||\|&?)\s*(?:\\\n\s*)*"):
            status, joined = self._status, match[1]
            if joined[:2] not in ("&&", "||"):
                self.printed = None
                self._statement(cursor)
                self._status = None
                continue
            wanted = joined == "&&"
            mode = MAYBE if status is None else RUN if status is wanted else SKIP
            with self._within(mode):
                self._statement(cursor)
            self._status = status if mode == SKIP else self._status if mode == RUN else None

    def _statement(self, cursor: Cursor) -> None:
        cursor.take(_BLANK)
        reserved = cursor.sees(_RESERVED)
        word = reserved[0] if reserved else ""
        if word in ("if", "for", "while", "until", "case"):
            cursor.at += len(word)
            {"if": self._if, "for": self._for, "case": self._case}.get(word, self._while)(cursor)
        elif word in ("!", "time"):
            cursor.at += len(word)
            self._statement(cursor)
            if word == "!":
                self._status = None if self._status is None else not self._status
        elif word == "{":
            cursor.at += 1
            self._block(cursor, "}")
        elif cursor.take(r"\(\("):
            inner = cursor.inside("(", ")")
            cursor.take(r"\)")
            number = self._arithmetic(inner, cursor)
            self._status = None if number is None else bool(number)
        elif cursor.take(r"\("):
            self._block(cursor, ")")
        elif cursor.take(r"\[\[(?=\s)"):
            end = cursor.take(re.compile(r"(.*?)\s\]\]", re.DOTALL))
            if end is None:
                raise cursor.error("is not closed; close it by ]]")
            inside = Cursor(
                end[1].replace("&&", " -a ").replace("||", " -o "), cursor.path, cursor.file, cursor.line
            )
            self._status = self._test(self._words_of(inside))
        elif match := cursor.take(_FUNCTION):
            self._functions[match[1] or match[2]] = (cursor, cursor.at)
            with self._within(SKIP):
                self._statement(cursor)
        else:
            self._simple(cursor)

    def _arithmetic(self, text: str, cursor: Cursor) -> int | None:
        sets = (
            self.set_number
            if self._mode == RUN
            else lambda name, _: self._assign(name, Word("", cursor.line))
        )
        return arithmetic(self._text(text, cursor), self.number, sets)

    def _if(self, cursor: Cursor) -> None:
        left, reached = RUN, "if"
        while reached in ("if", "elif"):
            with self._within(left):
                self._block(cursor, "then")
            status = self._status
            with self._within(min(left, MAYBE if status is None else RUN if status else SKIP)):
                reached = self._block(cursor, "elif", "else", "fi")
            left = min(left, MAYBE if status is None else SKIP if status else RUN)
        if reached == "else":
            with self._within(left):
                self._block(cursor, "fi")
        self._status = True

    def _for(self, cursor: Cursor) -> None:
        cursor.take(_BLANK)
        if cursor.take(r"\(\("):
            parts = [*cursor.inside("(", ")").split(";"), "", ""]
            cursor.take(r"\)")
            self._block(cursor, "do")
            self._arithmetic(parts[0], cursor)
            body = cursor.at
            while (wanted := self._arithmetic(parts[1], cursor)) and self._mode == RUN:
                cursor.at = body
                self._block(cursor, "done")
                self._arithmetic(parts[2], cursor)
            if cursor.at == body:
                with self._within(MAYBE if wanted is None else SKIP if not wanted else self._mode):
                    self._block(cursor, "done")
            return
        name = cursor.take(r"([A-Za-z_]\w*)\s*(in(?=\s))?")
        values = self._words(cursor) if name and name[2] else list(self.positional)
        self._block(cursor, "do")
        body = cursor.at
        known = [value for value in values if not self.unknowns.found(value.text)]
        for value in values:
            cursor.at = body
            self._assign(name[1] if name else "_", value)
            with self._within(RUN if len(known) == len(values) else MAYBE):
                self._block(cursor, "done")
        if not values:
            with self._within(SKIP):
                self._block(cursor, "done")

    def _while(self, cursor: Cursor) -> None:
        until = cursor.text[: cursor.at].endswith("until")
        self._block(cursor, "do")
        never = self._status is until
        with self._within(SKIP if never else MAYBE):
            self._block(cursor, "done")
        self._status = True

    def _case(self, cursor: Cursor) -> None:
        cursor.take(_BLANK)
        subject = self.unknowns.without_variables(" ".join(word.text for word in self.word(cursor)))
        cursor.take(r"\s*in(?=\s)")
        left, end = RUN, ";;"
        while end == ";;":
            cursor.take(_BETWEEN)
            if cursor.take(r"esac(?=\s|;|$)"):
                return
            patterns = cursor.take(r"\(?([^)\n]*)\)")
            if patterns is None:
                raise cursor.error("is not closed; close it by esac")
            texts = [self._text(pattern.strip(), cursor) for pattern in patterns[1].split("|")]
            matches = subject is not None and any(fnmatch.fnmatchcase(subject, text) for text in texts)
            mode = min(left, MAYBE if subject is None else RUN if matches else SKIP)
            with self._within(mode):
                end = self._block(cursor, ";;", "esac")
            left = SKIP if mode == RUN else left

    def _simple(self, cursor: Cursor) -> None:
        """Read an assignment, or a command with its redirections."""
        start, line = cursor.at, cursor.line
        before: dict[str, Word | list[Word] | None] = {}
        words: list[Word] = []
        while True:
            cursor.take(_BLANK)
            if heredoc := cursor.take(_HEREDOC):
                self._heredocs.append((bool(heredoc[1]), heredoc[3]))
                self.printed = None
            elif cursor.sees(r"[<>]\("):
                cursor.at += 2
                words.append(
                    Word(self.unknowns.mark(f"<({cursor.inside('(', ')')[:40]})", line, cursor.file), line)
                )
            elif cursor.take(_REDIRECTION):
                self.word(cursor)
            elif cursor.is_at_end or cursor.sees(r"[\n;&|)]|#"):
                break
            elif (not words or words[0].text in DECLARING) and (match := cursor.take(ASSIGNMENT)):
                before.setdefault(match[1], self.variables.get(match[1]))
                self._read_assignment(match, cursor)
            elif cursor.take(r"\("):
                cursor.inside("(", ")")
            else:
                words += self.word(cursor)
            if cursor.at == start:
                raise cursor.error("is not understood; run the script: hexi plan … -- bash SCRIPT")
        self._skip_heredocs(cursor)
        self._status = True
        if words and self._mode != SKIP:
            self._command(words, cursor)
            if words[0].text not in DECLARING:
                for name, value in before.items():
                    if value is None:
                        self.variables.pop(name, None)
                    else:
                        self.variables[name] = value

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
        if cursor.take(r"\("):
            elements: list[Word] = []
            opened = match.start()
            while not cursor.take(r"\)"):
                if cursor.take(r"(?:\s|\\\n)+") or cursor.take(r"#[^\n]*"):
                    continue
                if cursor.is_at_end:
                    cursor.at = opened
                    raise HexiError(
                        f"{cursor.file or cursor.path}, line {cursor.line}: {match[0]}(: is not closed; "
                        "close the parenthesis"
                    )
                elements += self.word(cursor, "array")
            self._assign(match[1], elements, append=bool(match[2]))
        else:
            self._assign(match[1], self.value(cursor), append=bool(match[2]))

    def _assign(self, name: str, value: Word | list[Word], *, append: bool = False) -> None:
        if self._mode == SKIP:
            return
        before = self.variables.get(name) if append else None
        if self._mode == MAYBE:
            place = value if isinstance(value, Word) else next(iter(value), Word("", 0))
            mark = Word(
                self.unknowns.mark(f"{name}{'+' * append}=… (in an if)", place.line, place.file),
                place.line,
                place.file,
            )
            value = [mark] if isinstance(value, list) else mark
        if isinstance(before, list):
            value = [*before, *(value if isinstance(value, list) else [value])]
        elif isinstance(before, Word) and isinstance(value, Word):
            value = before._replace(text=before.text + value.text)
        elif isinstance(before, Word):
            value = [before, *value]
        self.variables[name] = value

    def _words(self, cursor: Cursor) -> list[Word]:
        """Return the words up to the end of a line or a semicolon."""
        words: list[Word] = []
        while cursor.take(_BLANK) or not (cursor.is_at_end or cursor.sees(r"[\n;&|)]")):
            words += self.word(cursor) if not cursor.sees(r"[\n;&|)]|$") else []
        return words

    def _words_of(self, cursor: Cursor) -> list[Word]:
        """Return all words of a condition; empty ones stay, as ``[[`` does not split."""
        words: list[Word] = []
        while not cursor.is_at_end:
            if cursor.take(r"(?:\s|\\\n)+"):
                continue
            if match := cursor.take(r"[<>()]+|[;&|]"):
                words.append(Word(match[0], cursor.line))
                continue
            found = self.word(cursor)
            words.append(Word(" ".join(word.text for word in found), cursor.line))
        return words

    def substitute(self, text: str, cursor: Cursor) -> str | None:
        """Return what commands print; ``None``: only a running shell knows."""
        inner = Shell()
        inner.variables, inner.positional = dict(self.variables), list(self.positional)
        inner.unknowns, inner.defaults = self.unknowns, self.defaults
        inner._functions, inner._depth, inner._folder = self._functions, self._depth, self._folder
        inner._mode, inner._steps = self._mode, self._steps
        inner.read(text, cursor.path, cursor.file, cursor.line)
        if inner.printed is None or inner._status is None:
            return None
        return "\n".join(inner.printed).rstrip("\n")
