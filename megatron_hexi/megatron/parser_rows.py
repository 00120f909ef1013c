"""``python -m megatron_hexi.megatron.parser_rows``: record the installed Megatron's command line as data.

The options of each supported version are kept in megatron_hexi/options/data/parser.jsonl, so that planning
reads a file of arguments as training does, on a machine without torch and Megatron.
"""

from __future__ import annotations

import argparse
import enum
import json
from typing import Any

import megatron.core
from megatron.training import arguments

from megatron_hexi.options.parser import DATA, VERSIONS, Row, read_rows, series
from megatron_hexi.text_file import write_text_atomically

_KINDS = {"_StoreTrueAction": "true", "_StoreFalseAction": "false", "BooleanOptionalAction": "both"}
#: Converters that Megatron defines, by the names that `megatron_hexi.options.parser` has for them.
_TYPES = {
    "tuple_type": "pair",
    "moe_freq_type": "pattern",
    "no_rope_freq_type": "pattern",
    "la_freq_type": "pattern",
    "enum_type_handler": "name",
    "_parse_cuda_graph_modules_arg": "name",
    "<lambda>": "name",
}


def installed_rows() -> list[Row]:
    """Return the options of the installed Megatron's parser, in its order, each with Megatron's version."""
    parser = arguments.add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))
    return rows_of(parser, series(megatron.core.__version__))


def rows_of(parser: argparse.ArgumentParser, version: str) -> list[Row]:
    """Return the options of Megatron's parser, in its order, each with Megatron's `version`."""
    actions = [action for action in parser._actions if action.option_strings and action.dest != "help"]
    defaults: dict[str, Any] = {}
    for action in actions:  # of several options of one argument, argparse takes the first default
        defaults.setdefault(action.dest, action.default)
    return [_row(action, defaults[action.dest], version) for action in actions]


def _row(action: argparse.Action, default: Any, version: str) -> Row:
    kind = _KINDS.get(type(action).__name__, "store")
    converter = "" if kind != "store" or action.type is None else getattr(action.type, "__name__", "")
    return Row(
        flags=tuple(action.option_strings),
        dest=action.dest,
        kind=kind,
        type=_TYPES.get(converter, converter),
        nargs=action.nargs if kind == "store" else None,
        choices=None if action.choices is None else tuple(map(_plain, action.choices)),
        const=_plain(action.const) if kind == "store" else None,
        default=_plain(default),
        versions=(version,),
    )


def _plain(value: Any) -> Any:
    """Return a value for JSON; a member of an enumeration as its name."""
    if isinstance(value, enum.Enum):
        return value.name
    return [_plain(item) for item in value] if isinstance(value, (list, tuple)) else value


def record() -> None:
    """Write the options of the installed Megatron into the data, in place of those of its version before."""
    version = series(megatron.core.__version__)
    rows: dict[str, Row] = {}
    other_rows = [row for row in read_rows() if row.versions != (version,)] if DATA.exists() else []
    for row in (*other_rows, *installed_rows()):
        other_versions = tuple(v for v in row.versions if v != version or row.versions == (version,))
        same = json.dumps(row.document() | {"versions": None}, sort_keys=True)
        known = rows.get(same)
        versions = {*(known.versions if known else ()), *other_versions}
        rows[same] = row._replace(versions=tuple(v for v in VERSIONS if v in versions))
    ordered = sorted(rows.values(), key=lambda row: (row.flags, row.versions))
    write_text_atomically(DATA, "".join(f"{json.dumps(row.document())}\n" for row in ordered if row.versions))


if __name__ == "__main__":
    record()
