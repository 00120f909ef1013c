"""What a YAML document must look like, and what is said when it does not.

The one place where pydantic's findings become our errors: place, value and remedy on one line.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Annotated, Any

from pydantic import AfterValidator, Field, TypeAdapter, ValidationError
from pydantic_core import ErrorDetails, PydanticCustomError

from megatron_hexi.errors import HexiError
from megatron_hexi.yaml_file import Place

#: Spells a place for an error; a file puts its name and line in front.
Where = Callable[[Place], str]

#: pydantic's words for a field that is not known.
_UNKNOWN = ("unexpected_keyword_argument", "extra_forbidden")

#: What pydantic says, as we say it; its own wording where none is given.
_REMEDIES = {
    "missing": "is missing; add it",
    **dict.fromkeys(_UNKNOWN, "is not a known field; remove it or correct its name"),
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


#: What people call something: a line of text, which fits in a table and a picture.
Label = Annotated[str, Field(max_length=200), AfterValidator(_without_control_characters)]


def parse[T](kind: TypeAdapter[T], data: Any, where: Where, error: type[HexiError]) -> T:
    """Plain values as that type.

    Args:
        kind: the type.
        data: what YAML gave.
        where: spells a place.
        error: what to raise.

    Raises:
        HexiError: an `error` about the first thing that does not fit: place, value, remedy.
    """
    try:
        return kind.validate_python(data)
    except ValidationError as problems:
        found = [(_place(problem, data), problem) for problem in problems.errors(include_url=False)]
        # A mistyped name is two problems, one unknown and one missing: the unknown one is what stands there.
        place, problem = min(found, key=lambda one: one[1]["type"] not in _UNKNOWN)
        here = [other for where_it_is, other in found if where_it_is == place]
        raise error(f"{where(place)}{_found(problem)} {_said(here)}") from None


def _place(problem: ErrorDetails, data: Any) -> Place:
    """Where in the data a problem is.

    pydantic tells which of several types it tried too, and of a mapping's bad key that it is one. Neither is
    in the data, as what is missing is not.
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
    """What is wrong in one place, and what to do: several where one of several types would do."""
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
    """A value for an error message, 40 characters at most."""
    if isinstance(value, (list, tuple, dict)) and len(value) > 10:  # do not spell out what is thrown away
        return f"{type(value).__name__} of {len(value)}"
    try:
        text = repr(value)
    except ValueError:  # Python does not spell out whole numbers of more than 4300 digits
        return "a number of thousands of digits"
    return text if len(text) <= 40 else text[:37] + "..."


def _plain(limit: Any) -> Any:
    """1.0 as 1: limits are written as people write them."""
    return int(limit) if isinstance(limit, float) and limit.is_integer() else limit
