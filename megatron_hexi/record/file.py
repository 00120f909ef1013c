"""The record as a file: a JSON line for each start and each interval, appended whole or not at all."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from megatron_hexi.errors import HexiError
from megatron_hexi.record.model import FORMAT_VERSION, Interval, Leg, RankTimes, Record, Start
from megatron_hexi.regular_file import check_output, open_private
from megatron_hexi.text_file import append_line, read_text
from megatron_hexi.yaml_file import Place, spell_place
from megatron_hexi.yaml_schema import parse, short

_START = TypeAdapter(Start)
_INTERVAL = TypeAdapter(Interval)

#: A line is a mapping with one of these keys.
_KINDS = ("start", "interval")

#: What the first line of a record begins with.
_BEGIN = b'{"start": {'

#: Seconds are kept to the microsecond: a line of a large job stays short.
_DIGITS = 6

#: A thousand ranks, logged ten thousand times.
_MAX_BYTES = 2**30


def open_record(path: Path) -> None:
    """Prepare a record for appending: create the file, or remove an incomplete last line of it.

    The last line is incomplete if the job was killed while writing it. A new file is readable by its owner
    only.

    Raises:
        HexiError: the file is no record, or cannot be written.
    """
    check_output(path)
    try:
        with open(path, "a+b", opener=open_private) as file:
            file.seek(0)
            begin = file.read(len(_BEGIN))
            if not _BEGIN.startswith(begin):
                raise HexiError(
                    f"{path}: is no run's record ({short(begin[:20])}); give --hexi-record another file"
                )
            text = begin + file.read()
            file.truncate(text.rfind(b"\n") + 1)
    except OSError as problem:
        raise HexiError(f"{path}: cannot be written ({problem.strerror}); give another file") from None


def append_to_record(path: Path, entry: Start | Interval) -> None:
    """Append a line, whole or not at all.

    Raises:
        HexiError: it cannot be written.
    """
    kind = "start" if isinstance(entry, Start) else "interval"
    append_line(path, json.dumps({kind: _rounded(dataclasses.asdict(entry))}, allow_nan=False))


def read_record(path: Path) -> Record:
    """Read a record and check it.

    Raises:
        HexiError: the file cannot be read, is no record, or ends too early; with the line.
    """
    remedy = "give the file of the run's --hexi-record"
    text = read_text(path, _MAX_BYTES, remedy=remedy, content_remedy=remedy)
    *lines, rest = text.split("\n")
    legs: list[tuple[Start, list[Interval]]] = []
    for number, line in enumerate(lines, start=1):
        entry = _entry(path, number, line)
        if isinstance(entry, Start):
            legs.append((entry, []))
        elif not legs:
            raise HexiError(f"{path}:{number}: an interval before any start; the beginning is missing")
        else:
            _check_lengths(path, number, entry, len(legs[-1][0].devices))
            legs[-1][1].append(entry)
    if rest:
        raise HexiError(
            f"{path}:{len(lines) + 1}: cut off in the middle of a line; delete it (the job does so when it "
            "goes on)"
        )
    recorded = tuple(Leg(start, tuple(intervals)) for start, intervals in legs if intervals)
    if not recorded:
        raise HexiError(
            f"{path}: holds no iteration yet; let the run go on until Megatron logs one (--log-interval)"
        )
    return Record(path, recorded)


def _entry(path: Path, number: int, line: str) -> Start | Interval:
    try:
        data = json.loads(line)
    except (ValueError, RecursionError):
        data = None
    if not isinstance(data, dict) or len(data) != 1 or next(iter(data)) not in _KINDS:
        raise HexiError(
            f"{path}:{number}: {short(line)} is no line of a run's record; give the file of its --hexi-record"
        )
    ((kind, value),) = data.items()

    def where(place: Place) -> str:
        return f"{path}:{number}: {spell_place((kind, *place))}"

    if kind == "interval":
        return parse(_INTERVAL, value, where, HexiError)
    if isinstance(value, dict) and value.get("version") != FORMAT_VERSION:
        raise HexiError(
            f"{where(('version',))} is {short(value.get('version'))}, this megatron-hexi reads "
            f"{FORMAT_VERSION}; use the one that wrote it"
        )
    return parse(_START, value, where, HexiError)


def _check_lengths(path: Path, number: int, interval: Interval, ranks: int) -> None:
    iterations = len(interval.iterations)
    lists: dict[str, tuple[int, int]] = {
        name: (len(getattr(interval, name)), iterations) for name in ("seconds", "losses")
    }
    for field in dataclasses.fields(RankTimes):
        lists[f"ranks.{field.name}"] = len(getattr(interval.ranks, field.name)), ranks
    for name, (found, wanted) in lists.items():
        if found != wanted:
            raise HexiError(
                f"{path}:{number}: interval.{name} has {found} values, there should be {wanted}; is the file "
                "damaged?"
            )


def _rounded(value: Any) -> Any:
    """Return a value of the record with its floats rounded to `_DIGITS` digits, but losses as they are."""
    if isinstance(value, dict):
        return {key: item if key == "losses" else _rounded(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_rounded(item) for item in value]
    return round(value, _DIGITS) if isinstance(value, float) else value
