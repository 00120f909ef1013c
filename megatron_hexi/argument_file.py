"""Files of Megatron's arguments: words of a launch script, split as a shell splits them.

Blanks and ends of lines separate words. Quotes hold a word together, a backslash takes the next character as
it is, and at the end of a line it is a blank. A ``#`` that begins a word begins a comment, to the end of the
line; inside a word it is an ordinary character. A variable is an error, unless it has a literal default:
``${NAME:-default}`` is read as the default.

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
from megatron_hexi.other_files import is_launch_script, refuse_other_files, script_error
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
_DEFAULT = re.compile(r"\$\{[A-Za-z_]\w*:?-([^${}`'\"\\]*)\}")


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

    Raises:
        HexiError: see `located_words`.
    """
    return [word.text for word in located_words(text, path)]


def located_words(text: str, path: Path) -> list[Word]:
    """Return the words of a file of arguments, each with its line.

    Raises:
        HexiError: a quote or an array is not closed, variables stand where a shell would fill them in, words
            stand outside the arrays of a script, or the file is of another kind; with file and lines.
    """
    return _read(text, path).words


def literal_defaults(text: str, path: Path) -> list[Word]:
    """Return the variables of a file of arguments in place of which their defaults are read, with lines.

    Raises:
        HexiError: see `located_words`.
    """
    return _read(text, path).defaults


class _Reading(NamedTuple):
    """Words of a file: all that a shell passes on, and those with variables: defaults, and without."""

    words: list[Word]
    defaults: list[Word]
    variables: list[Word]


def _read(text: str, path: Path) -> _Reading:
    """Return the words of a file of arguments. For arguments and errors see `located_words`."""
    refuse_other_files(text, path)
    try:
        reading, stray = _read_words(text, path)
    except HexiError as problem:
        if is_launch_script(text):
            raise script_error(path, str(problem).removeprefix(f"{path}, ")) from None
        raise
    refused = sorted([*reading.variables, *stray[:1]], key=lambda word: word.line)
    if not refused:
        return reading
    lines = sorted({word.line for word in refused})
    place = f"line{'s' * (len(lines) > 1)} {', '.join(map(str, lines[:8]))}{', …' * (len(lines) > 8)}"
    if is_launch_script(text):
        raise script_error(path, f"{place}: {refused[0].text[:40]}")
    if reading.variables:
        words = ", ".join(word.text[:40] for word in reading.variables[:8])
        raise HexiError(
            f"{path}, {place}: {words}: variables are not filled in; write the value, or put the word in "
            "single quotes"
        )
    raise HexiError(
        f"{path}, line {stray[0].line}: {stray[0].text[:40]}: stands outside the script's arguments; keep "
        "only Megatron's arguments, as --num-layers 32, or arrays of them"
    )


def _read_words(text: str, path: Path) -> tuple[_Reading, list[Word]]:
    """Return the words of a file, and those outside the arrays of a script.

    Raises:
        HexiError: a quote or an array is not closed, or a NUL byte.
    """
    inside, outside = _Reading([], [], []), _Reading([], [], [])
    opened: Word | None = None
    wrapped = False
    for token, line in _tokens(text, path):
        if token.lastgroup == "opened" and opened is None:
            opened, wrapped = Word(token[0], line), True
        elif token.lastgroup == "string":
            wrapped = True
            _split_string(token["string"], line, path, inside)
        else:
            # An unquoted parenthesis that closes an array may stand right behind its last word.
            word, closes = token[0], opened is not None and _closes(token[0])
            if content := word[:-1] if closes else word:
                _split(content, line, path, inside if opened else outside)
            opened = None if closes else opened
    if opened is not None:
        raise HexiError(f"{path}, line {opened.line}: {opened.text}: is not closed; close the parenthesis")
    if not wrapped:
        return outside, []
    return inside, sorted((*outside.words, *outside.variables), key=lambda word: word.line)


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


def _split(word: str, line: int, path: Path, reading: _Reading) -> None:
    """Add a word to a reading, as a shell splits it and takes its quotes off."""
    filled = _filled(word, line, path, reading)
    if filled is not None:
        reading.words.extend(Word(text, line) for text in shlex.split(filled))


def _filled(word: str, line: int, path: Path, reading: _Reading) -> str | None:
    """Return a word with literal defaults for variables; ``None`` if others remain."""
    if "\0" in word:
        raise HexiError(f"{path}, line {line}: a NUL byte; is it the right file?")
    pieces = _PIECES.findall(word)
    for number, piece in enumerate(pieces):
        if piece[0] not in "'\\":
            reading.defaults.extend(Word(match[0], line) for match in _DEFAULT.finditer(piece))
            pieces[number] = _DEFAULT.sub(r"\1", piece)
            if _VARIABLE.search(pieces[number]):
                reading.variables.append(Word(word, line))
                return None
    return "".join(pieces)


def _split_string(quoted: str, first: int, path: Path, reading: _Reading) -> None:
    """Add the words of a quoted string of arguments, split as a shell splits an unquoted variable."""
    filled = _filled(quoted, first, path, reading)
    if filled is None:
        return
    body = filled[1:-1]
    if filled[0] == '"':  # as a shell reads it, but for joined lines, whose number would be lost
        body = re.sub(r'\\([$`"\\])', r"\1", body.replace("\\\n", " \n"))
    reading.words.extend(
        Word(word, first + number) for number, line in enumerate(body.split("\n")) for word in line.split()
    )


def _closes(word: str) -> bool:
    """Return whether a word ends in a parenthesis that is not quoted."""
    return word.endswith(")") and _PIECES.findall(word)[-1][0] not in "'\"\\"


def last_value(words: Sequence[str], flag: str, path: Path) -> str | None:
    """Return the value of a flag, given as ``--flag value`` or ``--flag=value``; the last, as in Megatron.

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
