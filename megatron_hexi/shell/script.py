"""Shell scripts read without being run: assignments, conditions, loops, and the commands they come to.

What cannot be known without running is marked, and only a mark in the words of a training is a mistake.
Variables of the environment count as not set. Commands under a condition that is not known are marked, too.
"""

from __future__ import annotations

import fnmatch
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from megatron_hexi.errors import HexiError
from megatron_hexi.shell.expansion import Cursor, Expander
from megatron_hexi.shell.words import JOINED, Word, arithmetic
from megatron_hexi.text_file import read_text

#: A launch script has a few kilobytes, and does few things before its training.
MAX_BYTES = 2**18
_MAX_STEPS = 100_000
_MAX_DEPTH = 50

#: How a statement is read: passed over, without its effects being sure, or as it runs.
_SKIP, _MAYBE, _RUN = range(3)

_BLANK = re.compile(r"(?:[ \t]|\\\n)+")
_BETWEEN = re.compile(r"(?:[ \t\r\n]|(?<!;);(?!;)|\\\n|&(?![&>])|#[^\n]*)+")
_RESERVED = re.compile(
    r"(?:if|then|elif|else|fi|for|while|until|do|done|case|esac|function|time|!|\{|\})(?=[\s;&|)]|$)|;;|\)"
)
_FUNCTION = re.compile(r"(?:function\s+)?([A-Za-z_][\w-]*)[ \t]*\(\)\s*|function\s+([A-Za-z_][\w-]*)\s*")
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(?:\[[^]]*\])?(\+?)=")
_REDIRECTION = re.compile(r"\d*(?:&>>?|>>|>&|<&|>\||<<<|<>|>|<)[ \t]*")
_HEREDOC = re.compile(r"\d*<<(-?)[ \t]*(['\"]?)(\w+)\2")
_DECLARING = ("export", "local", "declare", "typeset", "readonly")


class StartedCommand(NamedTuple):
    """A command of a script: its words, and whether it runs at all is known."""

    words: list[Word]
    is_sure: bool


class Shell(Expander):
    """Reads scripts and keeps what they set and start."""

    def __init__(self) -> None:
        """Begin with nothing set."""
        super().__init__()
        self.commands: list[StartedCommand] = []
        self.printed: list[str] | None = []
        self._functions: dict[str, tuple[Cursor, int]] = {}
        self._mode = _RUN
        self._status: bool | None = True
        self._steps = self._depth = self._nested = 0
        self._folder: str | None = None
        self._heredocs: list[tuple[bool, str]] = []

    def read(self, text: str, path: Path, file: str = "", line: int = 1) -> None:
        """Read a script, or a part of one."""
        self._depth += 1
        if self._depth > _MAX_DEPTH:
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
            if reserved and reserved[0] in (
                "then",
                "fi",
                "do",
                "done",
                "esac",
                "elif",
                "else",
                "}",
                ")",
                ";;",
            ):
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
            mode = _MAYBE if status is None else _RUN if status is wanted else _SKIP
            with self._within(mode):
                self._statement(cursor)
            self._status = status if mode == _SKIP else self._status if mode == _RUN else None

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
            with self._within(_SKIP):
                self._statement(cursor)
        else:
            self._simple(cursor)

    def _arithmetic(self, text: str, cursor: Cursor) -> int | None:
        sets = (
            self.set_number
            if self._mode == _RUN
            else lambda name, _: self._assign(name, Word("", cursor.line))
        )
        return arithmetic(self._text(text, cursor), self.number, sets)

    def _if(self, cursor: Cursor) -> None:
        left, reached = _RUN, "if"
        while reached in ("if", "elif"):
            with self._within(left):
                self._block(cursor, "then")
            status = self._status
            with self._within(min(left, _MAYBE if status is None else _RUN if status else _SKIP)):
                reached = self._block(cursor, "elif", "else", "fi")
            left = min(left, _MAYBE if status is None else _SKIP if status else _RUN)
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
            while (wanted := self._arithmetic(parts[1], cursor)) and self._mode == _RUN:
                cursor.at = body
                self._block(cursor, "done")
                self._arithmetic(parts[2], cursor)
            if cursor.at == body:
                with self._within(_MAYBE if wanted is None else _SKIP if not wanted else self._mode):
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
            with self._within(_RUN if len(known) == len(values) else _MAYBE):
                self._block(cursor, "done")
        if not values:
            with self._within(_SKIP):
                self._block(cursor, "done")

    def _while(self, cursor: Cursor) -> None:
        until = cursor.text[: cursor.at].endswith("until")
        self._block(cursor, "do")
        never = self._status is until
        with self._within(_SKIP if never else _MAYBE):
            self._block(cursor, "done")
        self._status = True

    def _case(self, cursor: Cursor) -> None:
        cursor.take(_BLANK)
        subject = self.unknowns.without_variables(" ".join(word.text for word in self.word(cursor)))
        cursor.take(r"\s*in(?=\s)")
        left, end = _RUN, ";;"
        while end == ";;":
            cursor.take(_BETWEEN)
            if cursor.take(r"esac(?=\s|;|$)"):
                return
            patterns = cursor.take(r"\(?([^)\n]*)\)")
            if patterns is None:
                raise cursor.error("is not closed; close it by esac")
            texts = [self._text(pattern.strip(), cursor) for pattern in patterns[1].split("|")]
            matches = subject is not None and any(fnmatch.fnmatchcase(subject, text) for text in texts)
            mode = min(left, _MAYBE if subject is None else _RUN if matches else _SKIP)
            with self._within(mode):
                end = self._block(cursor, ";;", "esac")
            left = _SKIP if mode == _RUN else left

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
            elif (not words or words[0].text in _DECLARING) and (match := cursor.take(_ASSIGNMENT)):
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
        if words and self._mode != _SKIP:
            self._command(words, cursor)
            if words[0].text not in _DECLARING:
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
        if self._mode == _SKIP:
            return
        before = self.variables.get(name) if append else None
        if self._mode == _MAYBE:
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

    def _test(self, words: list[Word]) -> bool | None:
        """Return whether a condition holds; ``None``: only a running shell knows."""
        texts = [self.unknowns.without_variables(word.text.replace(JOINED, "")) for word in words]
        for joint, ends in (("-o", True), ("-a", False)):
            if joint in texts:
                at = texts.index(joint)
                sides = (self._test(words[:at]), self._test(words[at + 1 :]))
                return ends if ends in sides else None if None in sides else not ends
        if texts[:1] == ["!"]:
            inner = self._test(words[1:])
            return None if inner is None else not inner
        if None in texts:
            return None
        match [text or "" for text in texts]:
            case ["-z", *value]:
                return not "".join(value)
            case ["-n", *value]:
                return bool("".join(value))
            case ["-v", name]:
                return name in self.variables
            case [a, "=" | "==", b]:
                return fnmatch.fnmatchcase(a, b)
            case [a, "!=", b]:
                return not fnmatch.fnmatchcase(a, b)
            case [a, "-eq" | "-ne" | "-lt" | "-le" | "-gt" | "-ge" as operator, b]:
                sign = {"-eq": "==", "-ne": "!=", "-lt": "<", "-le": "<=", "-gt": ">", "-ge": ">="}[operator]
                number = arithmetic(f"({a or 0}){sign}({b or 0})", self.number, self.set_number)
                return None if number is None else bool(number)
            case [value]:
                return bool(value)
        return None

    def _command(self, words: list[Word], cursor: Cursor) -> None:
        """Run a builtin or a function, or keep a command."""
        name = words[0].text
        builtins: dict[str, Callable[[list[Word], Cursor], object]] = {
            "source": self._source,
            ".": self._source,
            "printf": self._printf,
            "eval": self._eval,
            "cd": self._cd,
            "exit": self._exit,
            "shift": lambda *_: self.positional.pop(0) if self.positional else None,
            "unset": lambda words, _: [self.variables.pop(word.text, None) for word in words],
            **dict.fromkeys(_DECLARING, self._declare),
        }
        builtin = builtins.get(name)
        if builtin is not None:
            builtin(words[1:], cursor)
        elif name in self._functions:
            body, at = self._functions[name]
            before, self.positional = self.positional, words[1:]
            back, body.at = body.at, at
            self._depth += 1
            if self._depth > _MAX_DEPTH:
                raise cursor.error("calls itself too often to be read; run the script")
            self._statement(body)
            self._depth -= 1
            body.at, self.positional = back, before
        elif name in ("[", "test"):
            self._status = self._test([word for word in words[1:] if word.text != "]"])
        elif name in ("true", ":", "false"):
            self._status = name != "false"
        elif not self._print(name, [word.text for word in words[1:]], cursor):
            self._start(words, cursor)

    def _start(self, words: list[Word], cursor: Cursor) -> None:
        """Keep a command; of a shell that is given a script, or its text, what that starts."""
        names = [os.path.basename(word.text) for word in words]
        shell = next((number for number, name in enumerate(names) if name in ("bash", "sh")), None)
        rest = words[shell + 1 :] if shell is not None else []
        if rest and re.fullmatch(r"-\w*c", rest[0].text) and len(rest) > 1:
            self.read(rest[1].text, cursor.path, cursor.file, rest[1].line)
            return
        if rest and rest[0].text.endswith(".sh") and shell == 0:
            before, self.positional = self.positional, rest[1:]
            self._source(rest[:1], cursor)
            self.positional = before
            return
        self.printed = None
        self._status = None
        self.commands.append(StartedCommand(words, self._mode == _RUN))

    def _print(self, name: str, texts: list[str], cursor: Cursor) -> bool:
        """Return whether a command only prints, and print."""
        plain = [text for text in texts if not text.startswith("-")]
        folder = self._folder or os.curdir
        printers: dict[str, Callable[[], str]] = {
            "echo": lambda: " ".join(text for text in texts if text not in ("-n", "-e")),
            "pwd": lambda: folder,
            "dirname": lambda: os.path.dirname(plain[0]) or os.curdir,
            "basename": lambda: os.path.basename(plain[0]).removesuffix("".join(plain[1:2]) or "\0"),
            "realpath": lambda: plain[0],
            "readlink": lambda: plain[0],
            "seq": lambda: _sequence(plain),
        }
        if name not in printers or (name not in ("echo", "pwd") and not plain):
            return False
        if self.printed is not None:
            self.printed.append(printers[name]())
        return True

    def _source(self, words: list[Word], cursor: Cursor) -> None:
        """Read another script, where it is there; of what its absence leaves out, later words tell."""
        if not words or self.unknowns.found(words[0].text):
            return
        path = Path(words[0].text)
        if not os.path.isfile(path):
            path = cursor.path.parent / path
        if os.path.isfile(path):
            self.read(read_text(path, MAX_BYTES), path, os.path.relpath(path))

    def _printf(self, words: list[Word], cursor: Cursor) -> None:
        texts = [word.text for word in words]
        variable = texts[1] if texts[:1] == ["-v"] else None
        form, *values = texts[2 if variable else 0 :] or [""]
        printed = form.replace("\\n", "\n").replace("%d", "%s")
        count = printed.count("%s")
        if count == 0 or len(values) > count:
            return
        printed = printed.replace("%s", "\2").replace("%%", "%")
        for value in [*values, *[""] * (count - len(values))]:
            printed = printed.replace("\2", value, 1)
        if variable:
            self._assign(variable, Word(printed, words[0].line, words[0].file))
        elif self.printed is not None:
            self.printed.append(printed)

    def _eval(self, words: list[Word], cursor: Cursor) -> None:
        if words:
            self.read(" ".join(word.text for word in words), cursor.path, cursor.file, words[0].line)

    def _cd(self, words: list[Word], cursor: Cursor) -> None:
        plain = [word.text for word in words if not word.text.startswith("-")]
        self._folder = plain[0] if plain else None

    def _exit(self, words: list[Word], cursor: Cursor) -> None:
        if not self._nested:
            cursor.at = len(cursor.text)

    def _declare(self, words: list[Word], cursor: Cursor) -> None:
        for word in words:
            match = _ASSIGNMENT.match(word.text)
            if match:
                self._assign(match[1], word._replace(text=word.text[match.end() :]), append=bool(match[2]))

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


def _sequence(texts: list[str]) -> str:
    numbers = [int(text) if re.fullmatch(r"-?\d+", text) else 1 for text in texts]
    first, step, last = {1: (1, 1, numbers[-1]), 2: (numbers[0], 1, numbers[-1])}.get(
        len(numbers), tuple(numbers[:3])
    )
    return "\n".join(map(str, range(first, last + 1, step)[:10_000])) if step > 0 else ""
