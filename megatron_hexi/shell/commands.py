"""Commands of a script that is read: conditions, builtins, and those that start another program."""

from __future__ import annotations

import fnmatch
import os
import re
from abc import abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from megatron_hexi.shell.expansion import Cursor, Expander
from megatron_hexi.shell.words import JOINED, Word, arithmetic
from megatron_hexi.text_file import read_text

#: A launch script has a few kilobytes, and does few things before its training.
MAX_BYTES = 2**18
MAX_DEPTH = 50
DECLARING = ("export", "local", "declare", "typeset", "readonly")
ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(?:\[[^]]*\])?(\+?)=")

#: How a statement is read: passed over, without its effects being sure, or as it runs.
SKIP, MAYBE, RUN = range(3)


class StartedCommand(NamedTuple):
    """A command of a script: its words, and whether it runs at all is known."""

    words: list[Word]
    is_sure: bool


class Commands(Expander):
    """Carries out commands, as far as that is known without running them, and keeps those that start."""

    def __init__(self) -> None:
        """Begin with nothing set."""
        super().__init__()
        self.commands: list[StartedCommand] = []
        self.printed: list[str] | None = []
        self._functions: dict[str, tuple[Cursor, int]] = {}
        self._mode = RUN
        self._status: bool | None = True
        self._depth = self._nested = 0
        self._folder: str | None = None

    @abstractmethod
    def read(self, text: str, path: Path, file: str = "", line: int = 1) -> None:
        """Read a script, or a part of one."""

    @abstractmethod
    def _statement(self, cursor: Cursor) -> None:
        """Read the statement at a place."""

    @abstractmethod
    def _assign(self, name: str, value: Word | list[Word], *, append: bool = False) -> None:
        """Give a variable a value, as sure as the statement is."""

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
            **dict.fromkeys(DECLARING, self._declare),
        }
        builtin = builtins.get(name)
        if builtin is not None:
            builtin(words[1:], cursor)
        elif name in self._functions:
            body, at = self._functions[name]
            before, self.positional = self.positional, words[1:]
            back, body.at = body.at, at
            self._depth += 1
            if self._depth > MAX_DEPTH:
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
        self.commands.append(StartedCommand(words, self._mode == RUN))

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
            match = ASSIGNMENT.match(word.text)
            if match:
                self._assign(match[1], word._replace(text=word.text[match.end() :]), append=bool(match[2]))


def _sequence(texts: list[str]) -> str:
    numbers = [int(text) if re.fullmatch(r"-?\d+", text) else 1 for text in texts]
    first, step, last = {1: (1, 1, numbers[-1]), 2: (numbers[0], 1, numbers[-1])}.get(
        len(numbers), tuple(numbers[:3])
    )
    return "\n".join(map(str, range(first, last + 1, step)[:10_000])) if step > 0 else ""
