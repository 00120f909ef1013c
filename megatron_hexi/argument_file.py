"""Files of Megatron's arguments, and shell scripts that start a training with them.

In a file of arguments blanks and ends of lines separate words. Quotes hold a word together, a backslash takes
the next character as it is, and at the end of a line it is a blank. A ``#`` that begins a word begins a
comment, to the end of the line; inside a word it is an ordinary character. A variable is an error, unless it
has a default: ``${NAME:-default}`` is read as the default.

Of a script the assignments are read, and nothing is run (`megatron_hexi.shell`): its arguments are those of
the training that it starts, or else, of ``ARGS=( … )`` and ``ARGS="…"`` alone, the words inside.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from megatron_hexi.errors import HexiError
from megatron_hexi.shell.cursor import Cursor
from megatron_hexi.shell.expansion import Expander
from megatron_hexi.shell.script import MAX_BYTES, Shell
from megatron_hexi.shell.training_start import find_training
from megatron_hexi.shell.words import Fields, Unknowns, Word, place_of
from megatron_hexi.text_file import read_text

#: A line of YAML: a key that is a flag, or a key with nothing behind it.
_YAML = re.compile(r"^\s*(?:---\s*$|-?-?[A-Za-z_][\w-]*:(?:\s|$))", re.MULTILINE)
_PYTHON = re.compile(r"^(?:import|from)[ \t]+[A-Za-z_][\w.]*(?:[ \t]+import\b|[ \t]*$)", re.MULTILINE)
_FLAG = re.compile(r"(?:^|\s)--\w[\w-]*(?=[\s=]|$)")
#: A command of a launch script that starts a training, or a variable, outside a comment.
_SCRIPT = re.compile(
    r"\A#!|^[^#\n]*?(?<![\w/.-])(?:torchrun|srun|mpirun|mpiexec|python3?|source)[ \t]"
    r"|^[ \t]*(?:export )?[A-Za-z_]\w*\+?="
    r"|^[ \t]*(?:ray job submit|megatron (?:sft|pt|rlhf))\b",
    re.MULTILINE,
)
#: A configuration of NeMo-RL, whose training loop knows no plan.
_NEMO_RL = re.compile(r"^[ \t]+megatron_cfg:|\brun_grpo\w*\.py\b", re.MULTILINE)


def refuse_other_files(text: str, path: Path) -> None:
    """Refuse YAML, Python and NeMo-RL's files: as words they would be unknown arguments."""
    match = _NEMO_RL.search(text)
    if match is not None:
        raise HexiError(
            f"{path}, line {_line(text, match)}: {match[0].strip()}: NeMo-RL trains under no plan yet; "
            "to plan the model alone, give its config.json, or Megatron's arguments, as --num-layers 32"
        )
    if path.suffix == ".py" or (not _FLAG.search(text) and _PYTHON.search(text)):
        match = _PYTHON.search(text)
        raise HexiError(
            f"{path}, line {_line(text, match) if match else 1}: this file is Python; of a Megatron Bridge "
            "recipe give the run_config.yaml that it writes, else Megatron's arguments, as --num-layers 32"
        )
    match = _YAML.search(text)
    if match is not None and (path.suffix in (".yaml", ".yml") or not _FLAG.search(text)):
        raise HexiError(
            f"{path}, line {_line(text, match)}: {match[0].strip().rstrip(':')}: this file is YAML; write "
            "its entries as flags on Megatron's command line, as --num-layers 32"
        )


def is_script(text: str) -> bool:
    """Return whether a file is a shell script: one that sets variables, or starts a training."""
    return _SCRIPT.search(text) is not None


def _line(text: str, match: re.Match[str]) -> int:
    """Return the line of a match, from 1; blanks and line breaks before its words do not count."""
    return text.count("\n", 0, match.start() + len(match[0]) - len(match[0].lstrip())) + 1


_BETWEEN = re.compile(r"(?:\s|\\\n|(?<!\S)#[^\n]*)+")


class Reading(NamedTuple):
    """The arguments of a file, or of the training that a script starts.

    Attributes:
        words: the arguments, in which parts may be marked that only a running shell knows.
        unknowns: these parts.
        defaults: variables in place of which their defaults are read.
        program: the script or module that a script starts; empty: the file starts none.
        where: the command that starts it.
        missing: files that a script would read, and that are not there.
        arrays: names of the arrays that hold the arguments, in a script that starts nothing.
    """

    words: list[Word]
    unknowns: Unknowns
    defaults: list[Word]
    program: str = ""
    where: Word | None = None
    missing: tuple[Word, ...] = ()
    arrays: tuple[str, ...] = ()


def read_words(path: Path) -> list[str]:
    """Return the words of a file of arguments."""
    return split_words(read_text(path, MAX_BYTES), path)


def split_words(text: str, path: Path) -> list[str]:
    """Return the words of a file of arguments."""
    return [word.text for word in located_words(text, path)]


def located_words(text: str, path: Path) -> list[Word]:
    """Return the words of a file of arguments, each with its line."""
    reading = read_arguments_file(text, path)
    lacking = [word for word in reading.words if reading.unknowns.found(word.text)]
    if lacking:
        raise HexiError(unfilled(lacking, reading, path))
    return reading.words


def unfilled(words: Sequence[Word], reading: Reading, path: Path) -> str:
    """Return the message for words that only a running shell knows."""
    parts = [part.word for word in words for part in reading.unknowns.found(word.text)]
    # In a file of arguments the word, in a script the part, which may stand on a line of its own.
    whole = [word._replace(text=reading.unknowns.shown(word.text)) for word in words]
    shown = parts if reading.where and parts else whole
    shown = list(dict.fromkeys(shown))
    listed = f"{', '.join(word.text[:40] for word in shown[:8])}{', …' * (len(shown) > 8)}"
    if reading.where is None:
        return (
            f"{place_of(str(path), shown)}: {listed}: variables are not filled in; write the value, or put "
            "the word in single quotes"
        )
    absent = ", ".join(word.text[:40] for word in reading.missing[:8])
    why = f" ({absent}, which it reads, is not there)" if absent else ""
    return (
        f"{place_of(str(path), shown)}: {listed}: only a running shell knows it{why}; write the value, or "
        f"{_run_it(path, reading.arrays)}"
    )


def _run_it(path: Path, arrays: Sequence[str] = ()) -> str:
    """Return how a script is run up to its training, or up to one with the arguments that it defines."""
    script, plan = shlex.quote(str(path)), "hexi plan CLUSTER.yaml -o plan.yaml -- bash"
    if not arrays:
        return f"run the script up to its training: {plan} {script}"
    words = " ".join(f'"${{{name}[@]}}"' for name in arrays)
    start = f"source {script}; torchrun train.py {words} --micro-batch-size 1 --seq-length 4096"
    return f"let bash fill it in: {plan} -c {shlex.quote(start)}"


@lru_cache(maxsize=4)  # a command asks for the model, the job, and what is not read
def read_arguments_file(text: str, path: Path) -> Reading:
    """Return the words of a file of arguments, or of the training that a script starts."""
    refuse_other_files(text, path)
    if "\0" in text:
        line = text[: text.index("\0")].count("\n") + 1
        raise HexiError(f"{path}, line {line}: a NUL byte; is it the right file?")
    if is_script(text):
        return _read_script(text, path)
    expander, cursor = Expander(), Cursor(text, path, "")
    words: list[Word] = []
    while cursor.take(_BETWEEN) or not cursor.is_at_end:
        words += expander.word(cursor, "file")
    return Reading(words, expander.unknowns, expander.defaults)


def _read_script(text: str, path: Path) -> Reading:
    """Return the words of the training that a script starts, or else those in its arrays of arguments."""
    shell = Shell()
    shell.read(text, path)
    starts: dict[tuple[str, ...], tuple[str, list[Word]]] = {}
    for command in shell.commands:
        found = find_training([word.text for word in command])
        if found is not None:
            program, first = found
            starts.setdefault((program, *(word.text for word in command[first:])), (program, command))
    if len(starts) > 1:
        begun = [words[0] for _, words in starts.values()]
        raise HexiError(
            f"{place_of(str(path), begun)}: starts {len(starts)} different trainings; give a script that "
            "starts one of them"
        )
    for program, words in starts.values():
        first = len(words) - len(next(iter(starts))) + 1
        missing = tuple(shell.missing)
        return Reading(words[first:], shell.unknowns, shell.defaults, program, words[0], missing)
    stray = next((command[0] for command in shell.commands if command[0].text[:2] == "--"), None)
    arrays = {tuple(_arguments_in(value)): name for name, value in shell.variables.items()}
    named = {name: array for array, name in arrays.items() if not any(_has(other, array) for other in arrays)}
    held = [word for array in named.values() for word in array]
    if stray is not None and held:
        raise HexiError(
            f"{place_of(str(path), [stray])}: {stray.text[:40]}: stands outside the script's arguments; keep "
            "only Megatron's arguments, as --num-layers 32, or arrays of them"
        )
    if not held:
        raise HexiError(
            f"{path}: is a script in which no start of a training is found (torchrun, python, srun, mpirun, "
            f"ray job submit, megatron sft); {_run_it(path)}, or give Megatron's arguments"
        )
    names = tuple(name for name, array in named.items() if array)
    return Reading(held, shell.unknowns, shell.defaults, "", held[0], arrays=names)


def _has(array: Sequence[Word], part: Sequence[Word]) -> bool:
    """Whether an array takes in another one, as in ``ALL=("${MODEL[@]}" --bf16)``."""
    starts = range(len(array) - len(part) + 1)
    return len(array) > len(part) and any(array[start : start + len(part)] == part for start in starts)


def _arguments_in(value: Word | list[Word]) -> list[Word]:
    """Return the words of a variable that holds arguments; of any other none."""
    words = value
    if isinstance(words, Word):
        fields = Fields(words.line, words.file)
        fields.split([words])
        words = fields.finish()
    return words if words and words[0].text.startswith("--") else []


def last_value(words: Sequence[str], flag: str, path: Path) -> str | None:
    """Return the value of a flag, given as ``--flag value`` or ``--flag=value``; the last, as in Megatron."""
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
