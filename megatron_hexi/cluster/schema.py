"""What a YAML file of this room must look like, and what is said when it does not."""

from __future__ import annotations

from typing import Any, NoReturn

from pydantic import TypeAdapter, ValidationError

from megatron_hexi.errors import ClusterError
from megatron_hexi.yaml_file import Place, YamlFile

#: What pydantic says, as we say it; its own wording where nothing shorter is known.
_REMEDIES = {
    "missing": "is missing; add it",
    "unexpected_keyword_argument": "is not a known field; remove it or mend its name",
    "extra_forbidden": "is not a known field; remove it or mend its name",
    "int_type": "is not a whole number; write one",
    "float_type": "is not a number; write one",
    "greater_than": "is too small; write a number above {gt:g}",
    "greater_than_equal": "is too small; the least is {ge:g}",
    "less_than_equal": "is too large; the most is {le:g}",
    "finite_number": "is not finite; write a number",
    "tuple_type": "is not a list; write one",
    "dict_type": "is not a mapping; write its fields below it",
    "dataclass_type": "is not a mapping; write its fields below it",
    "dataclass_exact_type": "is not a mapping; write its fields below it",
    "string_type": "is not text; put it in quotes",
    "string_too_short": "is empty; write something",
    "string_too_long": "is too long; at most {max_length} characters",
    "string_pattern_mismatch": "is no usable name; take letters, digits and _ . - (not two dots together)",
    "literal_error": "is not known; write {expected}",
    "too_short": "is empty; give at least {min_length}",
    "too_long": "has too many values; the most is {max_length}",
}


def parse[T](kind: TypeAdapter[T], source: YamlFile, shape: str) -> T:
    """The document as that type.

    Args:
        kind: the type.
        source: the document.
        shape: what such a file is, for the error about one that is nothing like it.

    Raises:
        ClusterError: the first thing that does not fit: file, line, place, value, remedy.
    """
    if not isinstance(source.data, dict):
        found = "is empty" if source.data is None else f"holds {short(source.data)}"
        raise ClusterError(f"{source.path}:1: {found}; {shape}")
    try:
        return kind.validate_python(source.data)
    except ValidationError as problems:
        problem = problems.errors(include_url=False)[0]
        # A mapping's bad key is told as (…, key, "[key]").
        place: Place = tuple(step for step in problem["loc"] if step != "[key]")
        said = _REMEDIES.get(problem["type"], problem["msg"]).format(**problem.get("ctx", {}))
        quiet = problem["type"] in ("missing", "extra_forbidden", "unexpected_keyword_argument")
        value = "" if quiet else f" = {short(problem['input'])}"
        raise ClusterError(f"{source.where(place)}{value} {said}") from None


def refuse(source: YamlFile, place: Place, problem: str, remedy: str) -> NoReturn:
    """Say where a rule is broken, and what to do about it."""
    raise ClusterError(f"{source.where(place)} {problem}; {remedy}")


def short(value: Any) -> str:
    """A value for an error message."""
    if isinstance(value, (list, tuple, dict)) and len(value) > 10:  # do not spell out what is thrown away
        return f"{type(value).__name__} of {len(value)}"
    text = repr(value)
    return text if len(text) <= 40 else text[:37] + "..."
