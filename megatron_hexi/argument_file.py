"""Files of Megatron's arguments: the words of a launch script as text, split as a shell splits them.

Blanks and ends of lines separate words. Quotes hold a word together, a backslash takes the next character as
it is, and at the end of a line it is a blank. A ``#`` that begins a word begins a comment, to the end of the
line; inside a word it is an ordinary character. Nothing is filled in: a variable is an error.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path

from megatron_hexi.errors import HexiError
from megatron_hexi.text_file import read_text

#: A launch script has a few kilobytes.
MAX_BYTES = 2**18

_PIECE = r"""'[^']*'|"(?:\\.|[^"\\])*"|\\[^\n]|[^ \t\r\n'"\\]+"""
_PIECES = re.compile(_PIECE, re.DOTALL)
_TOKEN = re.compile(rf"[ \t\r\n]+|\\\n|#[^\n]*|(?P<word>(?:{_PIECE})+)", re.DOTALL)
_VARIABLE = re.compile(r"\$[\w{(]|`")


def read_words(path: Path) -> list[str]:
    """The words of a file of arguments.

    Raises:
        HexiError: the file cannot be read, or `split_words` refuses it.
    """
    return split_words(read_text(path, MAX_BYTES), path)


def split_words(text: str, path: Path) -> list[str]:
    """The words of a file of arguments.

    Args:
        text: what the file holds.
        path: the file, for errors.

    Raises:
        HexiError: a quote is not closed, or a variable stands where a shell would fill it in.
    """
    return list(_words(text, path))


def _words(text: str, path: Path) -> Iterator[str]:
    reached = 0
    while reached < len(text):
        token = _TOKEN.match(text, reached)
        if token is None:
            begin = text[reached:].split()[0][:40]
            raise _wrong(path, text, reached, f"{begin}: is not closed; close the quotes")
        word = token["word"]
        if word is not None:
            if "\0" in word:
                raise _wrong(path, text, reached, "a NUL byte; is it the right file?")
            if any(_VARIABLE.search(piece) for piece in _PIECES.findall(word) if piece[0] not in "'\\"):
                problem = "variables are not filled in; write the value, or put the word in single quotes"
                raise _wrong(path, text, reached, f"{word[:40]}: {problem}")
            yield from shlex.split(word)
        reached = token.end()


def _wrong(path: Path, text: str, place: int, problem: str) -> HexiError:
    line = text.count("\n", 0, place) + 1
    return HexiError(f"{path}, line {line}: {problem}")


def last_value(words: Sequence[str], flag: str, path: Path) -> str | None:
    """What a flag says, as ``--flag value`` or ``--flag=value``; of several the last, as Megatron reads them.

    Args:
        words: of the file.
        flag: with its hyphens.
        path: the file, for errors.

    Raises:
        HexiError: the flag has no value.
    """
    found = None
    for number, word in enumerate(words):
        name, has_value, value = word.partition("=")
        if name != flag:
            continue
        if not has_value:
            if number + 1 == len(words) or words[number + 1].startswith("--"):
                raise HexiError(f"{path}: {flag} without a value; add it")
            value = words[number + 1]
        found = value
    return found
