"""Parse and spell Megatron's command line without Megatron, from recorded options.

data/parser.jsonl holds the options of every supported version, one option per line. The file is written by
``python -m megatron_hexi.megatron.parser_rows``, and a test compares it with the installed Megatron.
"""

from __future__ import annotations

import argparse
import functools
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, cast

from packaging.specifiers import SpecifierSet
from packaging.version import Version

from megatron_hexi.argument_file import without_flags
from megatron_hexi.errors import HexiError, raise_all
from megatron_hexi.shell.words import Word, place_of

#: Release series of megatron-core whose options are recorded, each from its last release, oldest first.
VERSIONS = ("0.17", "0.18", "0.19")


@functools.cache
def assumed_release() -> str:
    """Return the installed release of megatron-core, or else the newest supported release.

    A pre-release counts as its release.
    """
    try:
        return Version(version("megatron-core")).base_version
    except PackageNotFoundError:
        return VERSIONS[-1]


def is_assumed(versions: str) -> bool:
    """Whether the assumed release is one of the given versions (a PEP 440 specifier)."""
    return SpecifierSet(versions).contains(assumed_release())


def series(release: str) -> str:
    """Return the release series of a version: "0.19" for "0.19.2"."""
    return ".".join(release.split(".")[:2])


def assumed_series() -> str:
    """Return the release series of the assumed release, whose options are used."""
    installed = series(assumed_release())
    return installed if installed in VERSIONS else VERSIONS[-1]


DATA = Path(__file__).parent / "data" / "parser.jsonl"


class Row(NamedTuple):
    """A recorded option of Megatron's parser.

    Attributes:
        kind: ``store``, ``true``, ``false``, or ``both`` (``--x`` and ``--no-x``).
        type: type of the option's values: int, float, str, bool, or Megatron's ``pair`` ("128,0"),
            ``pattern`` ("([1]*3+[0])*2") and ``name`` (of an enumeration).
        nargs: number of values, as argparse spells it.
        const: value of the argument if the flag is written without a value and `nargs` is ``?``.
        default: value of the argument without the option.
        versions: entries of `VERSIONS` that have exactly this option.
    """

    flags: tuple[str, ...]
    dest: str
    kind: str = "store"
    type: str = ""
    nargs: str | int | None = None
    choices: tuple[Any, ...] | None = None
    const: Any = None
    default: Any = None
    versions: tuple[str, ...] = ()

    def document(self) -> dict[str, Any]:
        """Return the option as a JSON object, without fields that have their default values."""
        usual = self._field_defaults
        return {name: value for name, value in self._asdict().items() if value != usual.get(name, ())}


class Parsed(NamedTuple):
    """Parsed arguments of Megatron.

    Attributes:
        args: all arguments, with Megatron's names and defaults, before Megatron's own checks.
    """

    args: argparse.Namespace
    given: frozenset[str]


@functools.cache
def read_rows() -> tuple[Row, ...]:
    """Return the recorded options of all versions."""
    return tuple(_row(json.loads(line)) for line in DATA.read_text(encoding="utf-8").splitlines())


def _row(document: dict[str, Any]) -> Row:
    """Return the option of a JSON object, with tuples for lists, except in a default as in Megatron."""
    lists = {name: tuple(document[name]) for name in ("flags", "choices", "versions") if name in document}
    fields: dict[str, Any] = document | lists
    return Row(**fields)


def parse_words(words: Sequence[Word], source: str) -> Parsed:
    """Parse words as Megatron's command line."""
    parsed, faults = parse_and_judge(words, source)
    raise_all(faults)
    return parsed


def parse_and_judge(words: Sequence[Word], source: str) -> tuple[Parsed, list[str]]:
    """Parse words as Megatron's command line, without those that it cannot take.

    Returns:
        The arguments, and a message for each fault: see `parse_words`.
    """
    places = {word.text.partition("=")[0]: word for word in words if word.text.startswith("--")}
    taken: list[str] = [_PlacedText(word.text, number) for number, word in enumerate(words)]
    faults = []
    while True:
        try:
            args, unknown = _parser(assumed_series()).parse_known_args(taken)
            break
        except _ParseError as problem:
            flags = [flag for flag in re.findall(r"--[\w-]+", str(problem)) if flag in places]
            place = place_of(source, [places[flag] for flag in flags[:1]])
            faults.append(f"{place}: {problem}; correct that flag")
            fewer = without_flags(taken, set(flags[:1]))
            if len(fewer) == len(taken):
                raise HexiError(faults[-1]) from None
            taken = fewer
    reasons: dict[str, list[Word]] = {}
    last = -1
    for text in cast("list[_PlacedText]", unknown):
        number = text.number
        if text.startswith("--") or number != last + 1:  # else a value of an unknown option
            reasons.setdefault(_why_unknown(text), []).append(words[number])
        last = number
    faults += [
        f"{place_of(source, found)}: "
        f"{', '.join(word.text.partition('=')[0][:60] for word in found)}: {reason}"
        for reason, found in reasons.items()
    ]
    return Parsed(args, frozenset(places)), faults


def known_flags() -> frozenset[str]:
    """Return every spelling of every option of all supported versions."""
    return frozenset(flag for row in (*read_rows(), *HEXI_ROWS) for flag in row.flags)


class _PlacedText(str):
    """A word that knows its place on the command line; argparse returns unknown words as it got them."""

    def __new__(cls, text: str, number: int) -> _PlacedText:
        placed = super().__new__(cls, text)
        placed.number = number
        return placed

    number: int


def _why_unknown(word: str) -> str:
    """Return why Megatron does not take a word, and a remedy, with similar options."""
    flag = word.partition("=")[0]
    if not flag.startswith("--"):
        return "belongs to no argument; remove it, or write the argument before it"
    if flag.replace("_", "-") in _LAUNCHER:
        return "is the launcher's; leave it out (hexi launch prints torchrun's lines)"
    in_versions = sorted({series for row in read_rows() if flag in row.flags for series in row.versions})
    if in_versions:
        return (
            f"megatron-core {assumed_series()} has no such argument ({', '.join(in_versions)} has); remove it"
        )
    from megatron_hexi.options.registry import nearest_option  # it asks the registry, which reads this

    near = nearest_option(flag)
    remedy = f"did you mean {near}?" if near else "correct or remove it"
    return f"Megatron {VERSIONS[0]} to {VERSIONS[-1]} has no such argument; {remedy}"


class _ParseError(Exception):
    """An error that argparse reports, raised instead of leaving the process."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise _ParseError(message)


@functools.cache
def _parser(version: str) -> _Parser:
    parser = _Parser(add_help=False, allow_abbrev=False)
    for row in (*read_rows(), *HEXI_ROWS):
        if version in row.versions:
            parser.add_argument(*row.flags, dest=row.dest, default=row.default, **_keywords(row))
    return parser


def _keywords(row: Row) -> dict[str, Any]:
    """Return the keyword arguments of `add_argument` for an option, without destination and default."""
    if row.kind != "store":
        return {"action": _ACTIONS[row.kind]}
    options = {"nargs": row.nargs, "choices": row.choices, "const": row.const}
    keywords: dict[str, Any] = {name: value for name, value in options.items() if value is not None}
    return keywords | ({"type": _TYPES[row.type]} if row.type else {})


#: Options of torchrun and of torch.distributed.launch that scripts write beside Megatron's.
_LAUNCHER = frozenset(
    f"--{name}"
    for name in (
        *("nproc-per-node", "nnodes", "node-rank", "master-addr", "master-port", "local-rank"),
        *("rdzv-id", "rdzv-backend", "rdzv-endpoint", "rdzv-conf", "standalone", "max-restarts", "no-python"),
    )
)
_ACTIONS: dict[str, Any] = {
    "true": "store_true",
    "false": "store_false",
    "both": argparse.BooleanOptionalAction,
}


def _pair(text: str) -> tuple[int, ...]:
    """Parse a tuple of integers as Megatron's ``tuple_type`` does: "128,0" or "(128,0)"."""
    return tuple(int(part) for part in text.strip("()").split(","))


def _pattern(text: str) -> int | str:
    """Parse a layer pattern as Megatron's ``moe_freq_type`` does: to a number, or unchanged to text."""
    if "[" not in text:
        return int(text)
    if re.search(r"[^,\d\[\]()+*]", text):
        raise ValueError(text)
    return text


_TYPES: dict[str, Callable[[str], Any]] = {
    "int": int,
    "float": float,
    "str": str,
    "bool": bool,
    "pair": _pair,
    "pattern": _pattern,
    "name": str,
}
#: The options that this package adds (`megatron_hexi.megatron.arguments`).
HEXI_ROWS = tuple(
    row._replace(versions=VERSIONS)
    for row in (
        Row(("--hexi-plan",), "hexi_plan"),
        Row(("--hexi-platform",), "hexi_platform", choices=("auto", "cpu", "cuda"), default="auto"),
        Row(("--hexi-kernel",), "hexi_kernel", type="str", default="auto"),
        Row(("--hexi-batch-shares",), "hexi_batch_shares", "true", default=False),
        Row(("--hexi-metrics",), "hexi_metrics"),
        Row(("--hexi-metrics-interval",), "hexi_metrics_interval", type="int"),
        Row(("--hexi-record",), "hexi_record"),
        Row(("--hexi-replan-interval",), "hexi_replan_interval", type="int"),
        Row(("--hexi-replan-threshold",), "hexi_replan_threshold", type="float", default=0.03),
        Row(("--hexi-cluster",), "hexi_cluster"),
    )
)


@functools.cache
def rows_by_argument() -> Mapping[str, tuple[Row, ...]]:
    """Return the rows of Megatron's options by the argument that they set, the current spelling first."""
    found: dict[str, tuple[Row, ...]] = {}
    for row in read_rows():
        if assumed_series() in row.versions:
            found[row.dest] = (*found.get(row.dest, ()), row)
    return found


def switch_of(rows: Sequence[Row], value: bool) -> str | None:
    """Return the flag that sets an argument to true or false; ``None``: no option has such a flag."""
    for row in rows:
        if row.kind == "both":
            return row.flags[0] if value else row.flags[0].replace("--", "--no-", 1)
        if row.kind == str(value).lower():
            return row.flags[0]
    return None


def value_words(value: Any, row: Row) -> Iterator[str]:
    """Yield the words that state a value on the command line."""
    if row.type == "pattern" and isinstance(value, list):
        yield str(value).replace(" ", "")
    elif row.type == "pair" and isinstance(value, list):
        yield ",".join(map(str, value))
    elif isinstance(value, list):
        yield from map(str, value)
    elif row.type == "int" and isinstance(value, float) and value.is_integer():
        yield str(int(value))
    else:
        yield str(value)
