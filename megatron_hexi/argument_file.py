"""Files of Megatron's arguments: words of a launch script, split as a shell splits them.

Blanks and ends of lines separate words. Quotes hold a word together, a backslash takes the next character as
it is, and at the end of a line it is a blank. A ``#`` that begins a word begins a comment, to the end of the
line; inside a word it is an ordinary character. Nothing is filled in: a variable is an error.

A script's own wrapper is taken off: of ``ARGS=( … )``, ``ARGS+=( … )`` and ``ARGS="…"`` the words inside are
read. Where a file has such wrappers, nothing but comments may stand outside them.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from megatron_hexi.errors import HexiError
from megatron_hexi.text_file import read_text

#: A launch script has a few kilobytes.
MAX_BYTES = 2**18

_PIECE = r"""'[^']*'|"(?:\\.|[^"\\])*"|\\[^\n]|[^ \t\r\n'"\\]+"""
_PIECES = re.compile(_PIECE, re.DOTALL)
_TOKEN = re.compile(
    rf"""[ \t\r\n]+|\\\n|\#[^\n]*
    |(?P<opened>[A-Za-z_]\w*\+?=\()
    |[A-Za-z_]\w*\+?=(?P<string>"(?:\s|\\\n)*--(?:\\.|[^"\\])*"|'\s*--[^']*')(?=\s|$)
    |(?P<word>(?:{_PIECE})+)""",
    re.DOTALL | re.VERBOSE,
)
_VARIABLE = re.compile(r"\$[\w{(]|`")
#: A line of YAML: a key that is a flag, or a key with nothing behind it.
_YAML = re.compile(r"^\s*(?:---\s*$|-?-?[A-Za-z_][\w-]*:(?:\s|$))", re.MULTILINE)
_FLAG = re.compile(r"(?:^|\s)--\w[\w-]*(?=[\s=]|$)")


class Word(NamedTuple):
    """A word of a file of arguments.

    Attributes:
        text: the word as a shell passes it to the program.
        line: line of the file, from 1.
    """

    text: str
    line: int


def read_words(path: Path) -> list[str]:
    """Return the words of a file of arguments.

    Raises:
        HexiError: the file cannot be read, or `split_words` refuses it.
    """
    return split_words(read_text(path, MAX_BYTES), path)


def split_words(text: str, path: Path) -> list[str]:
    """Return the words of a file of arguments.

    Args:
        text: contents of the file.
        path: the file, for errors.

    Raises:
        HexiError: see `located_words`.
    """
    return [word.text for word in located_words(text, path)]


def located_words(text: str, path: Path) -> list[Word]:
    """Return the words of a file of arguments, each with its line.

    Args:
        text: contents of the file.
        path: the file, for errors.

    Raises:
        HexiError: a quote or an array is not closed, a variable stands where a shell would fill it in, words
            stand outside the arrays of a script, or the file is YAML; with file and line.
    """
    _refuse_yaml(text, path)
    inside: list[Word] = []
    outside: list[Word] = []
    opened: Word | None = None
    wrapped = False
    for token, line in _tokens(text, path):
        if token.lastgroup == "opened" and opened is None:
            opened, wrapped = Word(token[0], line), True
        elif token.lastgroup == "string":
            wrapped = True
            inside += _string(token["string"], line, path)
        else:
            # An unquoted parenthesis that closes an array may stand right behind its last word.
            word, closes = token[0], opened is not None and _closes(token[0])
            if content := word[:-1] if closes else word:
                (inside if opened else outside).extend(_split(content, line, path))
            opened = None if closes else opened
    if opened is not None:
        raise HexiError(f"{path}, line {opened.line}: {opened.text}: is not closed; close the parenthesis")
    if wrapped and outside:
        stray = outside[0]
        raise HexiError(
            f"{path}, line {stray.line}: {stray.text[:40]}: stands outside the script's arguments; keep only "
            "Megatron's arguments, as --num-layers 32, or arrays of them"
        )
    return inside if wrapped else outside


def _tokens(text: str, path: Path) -> Iterator[tuple[re.Match[str], int]]:
    """Yield words, openings of arrays, and strings of arguments, with lines; without blanks and comments."""
    reached, line = 0, 1
    while reached < len(text):
        token = _TOKEN.match(text, reached)
        if token is None:
            raise HexiError(
                f"{path}, line {line}: {text[reached:].split()[0][:40]}: is not closed; close the quotes"
            )
        if token.lastgroup is not None:
            yield token, line
        reached = token.end()
        line += token[0].count("\n")


def _split(word: str, line: int, path: Path) -> Iterator[Word]:
    if "\0" in word:
        raise HexiError(f"{path}, line {line}: a NUL byte; is it the right file?")
    if any(_VARIABLE.search(piece) for piece in _PIECES.findall(word) if piece[0] not in "'\\"):
        raise HexiError(
            f"{path}, line {line}: {word[:40]}: variables are not filled in; write the value, or put "
            "the word in single quotes"
        )
    yield from (Word(text, line) for text in shlex.split(word))


def _string(quoted: str, first: int, path: Path) -> list[Word]:
    """Return the words of a quoted string of arguments, split as a shell splits an unquoted variable."""
    list(_split(quoted, first, path))  # refuses variables
    body = quoted[1:-1]
    if quoted[0] == '"':  # as a shell reads it, but for joined lines, whose number would be lost
        body = re.sub(r'\\([$`"\\])', r"\1", body.replace("\\\n", " \n"))
    return [
        Word(word, first + number) for number, line in enumerate(body.split("\n")) for word in line.split()
    ]


def _closes(word: str) -> bool:
    """Return whether a word ends in a parenthesis that is not quoted."""
    return word.endswith(")") and _PIECES.findall(word)[-1][0] not in "'\"\\"


def _refuse_yaml(text: str, path: Path) -> None:
    """Refuse YAML: as words, its keys would be unknown arguments."""
    match = _YAML.search(text)
    if match is not None and (path.suffix in (".yaml", ".yml") or not _FLAG.search(text)):
        line = text.count("\n", 0, match.start() + len(match[0]) - len(match[0].lstrip())) + 1
        raise HexiError(
            f"{path}, line {line}: {match[0].strip().rstrip(':')}: this file is YAML; write its entries as "
            "flags on Megatron's command line, as --num-layers 32"
        )


def last_value(words: Sequence[str], flag: str, path: Path) -> str | None:
    """Return the value of a flag, given as ``--flag value`` or ``--flag=value``; the last, as in Megatron.

    Args:
        words: words of the file.
        flag: the flag, with its hyphens.
        path: the file, for errors.

    Raises:
        HexiError: the flag has no value.
    """
    result = None
    for number, word in enumerate(words):
        name, has_value, value = word.partition("=")
        if name != flag:
            continue
        if not has_value:
            if number + 1 == len(words) or words[number + 1].startswith("--"):
                raise HexiError(f"{path}: {flag} without a value; add it")
            value = words[number + 1]
        result = value
    return result


def replace_flags(words: Sequence[str], more: Sequence[str]) -> list[str]:
    """Return words in which flags of `more` replace those of the same name, and another activation."""
    replaced = {word for word in more if word.startswith("--")}
    if "--quick-geglu" in replaced:
        replaced.add("--swiglu")  # Megatron refuses two
    return [*without_flags(words, replaced), *more]


def without_flags(words: Sequence[str], flags: set[str]) -> list[str]:
    """Return words without some flags and their values."""
    remaining, leaving = [], False
    for word in words:
        if word.startswith("--"):
            leaving = word.partition("=")[0] in flags
        if not leaving:
            remaining.append(word)
    return remaining
