"""Megatron's arguments in the YAML of its functional tests: flags with their values under MODEL_ARGS."""

from __future__ import annotations

import re
from pathlib import Path

from megatron_hexi.argument_file import Reading
from megatron_hexi.errors import HexiError
from megatron_hexi.shell.cursor import Cursor
from megatron_hexi.shell.expansion import Expander
from megatron_hexi.shell.words import Word

_SECTION = re.compile(r"^MODEL_ARGS:[ \t]*$", re.MULTILINE)
_FLAG = re.compile(r"\s+['\"]?(--[\w-]+)['\"]?:\s*(.*)")


def has_yaml_arguments(text: str) -> bool:
    """Whether a text is the YAML of a functional test of Megatron's."""
    return _SECTION.search(text) is not None


def read_yaml_arguments(text: str, path: Path) -> Reading:
    """Return the words of a YAML file with MODEL_ARGS; the last of a repeated flag counts.

    Raises:
        HexiError: an entry of MODEL_ARGS is not a flag with a value.
    """
    section = _SECTION.search(text)
    start = section.start() if section else 0
    first = text[:start].count("\n") + 2
    expander = Expander()
    words: list[Word] = []
    for line, content in enumerate(text[start:].splitlines()[1:], first):
        if re.match(r"\S", content) and not content.startswith("#"):
            break
        if not content.strip() or content.strip().startswith("#"):
            continue
        match = _FLAG.fullmatch(content)
        if match is None and words and ":" not in content:  # the value of the flag above
            match = _FLAG.fullmatch(f" {words.pop().text}: {content.strip()}")
        if match is None:
            raise HexiError(
                f"{path}, line {line}: {content.strip()[:40]}: is no flag with a value; write --name: value"
            )
        cursor = Cursor(match[2], path, "", line)
        values: list[Word] = []
        while cursor.take(r"(?:\s+|#.*)+") or not cursor.is_at_end:
            values += expander.word(cursor, "file")
        switch = [value.text.lower() for value in values]
        if switch != ["false"]:
            words += [Word(match[1], line), *([] if switch == ["true"] else values)]
    return Reading(words, expander.unknowns, expander.defaults)
