"""Validation of YAML documents, with pydantic's errors as ours: place, value and remedy on one line.

Only this module turns pydantic's errors into ours.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator, Sequence
from typing import Annotated, Any, ClassVar

from pydantic import AfterValidator, ConfigDict, Field, TypeAdapter, ValidationError
from pydantic_core import ErrorDetails, PydanticCustomError

from megatron_hexi.errors import HexiError
from megatron_hexi.yaml_file import Place, YamlFile

#: Returns a place as text for an error, with file name and line where there is a file.
Where = Callable[[Place], str]

#: pydantic's types of errors for an unknown field.
_UNKNOWN = ("unexpected_keyword_argument", "extra_forbidden")

#: Our messages by pydantic's types of errors; others keep pydantic's message.
_REMEDIES = {
    "missing": "is missing; add it",
    "int_type": "is not a whole number; write one",
    **dict.fromkeys(("float_type", "float_parsing"), "is not a number; write one"),
    **dict.fromkeys(("bool_type", "bool_parsing"), "is not true or false; write one of them"),
    "greater_than": "is too small; write a number above {gt}",
    "greater_than_equal": "is too small; the least is {ge}",
    "less_than_equal": "is too large; the most is {le}",
    "finite_number": "is not finite; write a number, or leave the field out",
    "tuple_type": "is not a list; write one",
    **dict.fromkeys(
        ("dict_type", "dataclass_type", "dataclass_exact_type"),
        "is not a mapping; write its fields below it",
    ),
    "string_type": "is not text; put it in quotes",
    "string_too_short": "is empty; write something",
    "string_too_long": "is too long; at most {max_length} characters",
    "string_pattern_mismatch": "is no usable name; take letters, digits and _ . - (not two dots together)",
    "duration": "is no duration; write 90s, 30m, 1h30m or 7d",
    "literal_error": "is not known; write {expected}",
    "too_short": "is empty; give at least {min_length}",
    "too_long": "has too many values; the most is {max_length}",
    "unprintable": "has characters that cannot be printed; leave them out",
}
_OR_A_NUMBER = ", or a whole number"


def _without_control_characters(text: str) -> str:
    if not text.isprintable():
        raise PydanticCustomError("unprintable", "has characters that cannot be printed")
    return text


class Strict:
    """Base of data classes that are read from a file, in which unknown fields are refused."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")


#: A name: a line of text that fits in a table and a picture.
Label = Annotated[str, Field(max_length=200), AfterValidator(_without_control_characters)]


def parse[T](kind: TypeAdapter[T], data: Any, where: Where, error: type[HexiError]) -> T:
    """Return plain values as a type."""
    try:
        return kind.validate_python(data)
    except ValidationError as problems:
        placed = [(_place(problem, data), problem) for problem in problems.errors(include_url=False)]
        # A mistyped name is two problems, an unknown and a missing field; the unknown field is in the file.
        place, problem = min(placed, key=lambda pair: pair[1]["type"] not in _UNKNOWN)
        # A list where a number would do has a problem of its own, and one of an item: the item's says more.
        inside = [pair for pair in placed if pair[0][: len(place)] == place]
        place, problem = max(inside, key=lambda pair: len(pair[0]))
        if problem["type"] in _UNKNOWN:
            raise error(f"{where(place)} is not a known field; {_nearest(kind, place)}") from None
        here = [problem for problem_place, problem in placed if problem_place == place]
        raise error(f"{where(place)}{_found(problem)} {_said(here)}") from None


def parse_file[T](kind: TypeAdapter[T], source: YamlFile, shape: str, error: type[HexiError]) -> T:
    """Return a YAML document as a type; `shape` is the remedy where it is no mapping."""
    if not isinstance(source.data, dict):
        problem = "is empty" if source.data is None else f"holds {short(source.data)}"
        raise error(f"{source.path}:1: {problem}; {shape}")
    return parse(kind, source.data, source.where, error)


def _nearest(kind: TypeAdapter[Any], place: Place) -> str:
    """Return the remedy for an unknown field: the nearest name among the fields of its mapping."""
    schema = kind.json_schema()
    found = list(_variants(schema, schema))
    for step in place[:-1]:
        inner = [
            part
            for variant in found
            for part in (
                variant.get("items"),
                variant.get("properties", {}).get(step, variant.get("additionalProperties")),
            )
            if isinstance(part, dict)
        ]
        found = [variant for part in inner for variant in _variants(part, schema)]
    names = [name for variant in found for name in variant.get("properties", {})]
    near = difflib.get_close_matches(str(place[-1]), names, n=1)
    return f"did you mean {near[0]}?" if near else "remove it or correct its name"


def _variants(part: dict[str, Any], schema: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the types, each a JSON schema, that a part of a JSON schema stands for."""
    if "$ref" in part:
        yield from _variants(schema["$defs"][part["$ref"].rpartition("/")[2]], schema)
    elif "anyOf" in part or "oneOf" in part:
        for one in part.get("anyOf") or part["oneOf"]:
            yield from _variants(one, schema)
    else:
        yield part


def _place(problem: ErrorDetails, data: Any) -> Place:
    """Return the place of a problem in the data.

    pydantic also names which of several types it tried, and marks a mapping's bad key. Neither is in the
    data, nor is a missing field.
    """
    place: list[int | str] = []
    for step in problem["loc"]:
        items = dict(enumerate(data)) if isinstance(data, (list, tuple)) else data
        if isinstance(items, dict) and step in items:
            data = items[step]
        elif problem["type"] != "missing":
            continue
        place.append(step)
    return tuple(place)


def _found(problem: ErrorDetails) -> str:
    return "" if problem["type"] in ("missing", *_UNKNOWN) else f" = {short(problem['input'])}"


def _said(problems: Sequence[ErrorDetails]) -> str:
    """Return problem and remedy for one place: of the literal where one of several types would do."""
    by_type = {problem["type"]: problem for problem in problems}
    if "literal_error" in by_type and len(by_type) > 1:
        if not isinstance(problems[0]["input"], int):
            return _remedy(by_type["literal_error"]) + _OR_A_NUMBER
        del by_type["literal_error"]
    return _remedy(next(iter(by_type.values())))


def _remedy(problem: ErrorDetails) -> str:
    known = _REMEDIES.get(problem["type"])
    limits = {name: _plain(limit) for name, limit in problem.get("ctx", {}).items()}
    return known.format(**limits) if known else f"is wrong ({problem['msg']}); correct it"


def short(value: Any) -> str:
    """Return a value for an error message, at most 40 characters long."""
    if isinstance(value, (list, tuple, dict)) and len(value) > 10:  # do not spell out what is thrown away
        return f"{type(value).__name__} of {len(value)}"
    try:
        text = repr(value)
    except ValueError:  # Python does not spell out whole numbers of more than 4300 digits
        return "a number of thousands of digits"
    return text if len(text) <= 40 else text[:37] + "..."


def _plain(limit: Any) -> Any:
    """Return 1.0 as 1, as people write limits."""
    return int(limit) if isinstance(limit, float) and limit.is_integer() else limit
