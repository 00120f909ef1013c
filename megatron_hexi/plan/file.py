"""Plans as files: read, checked, written, digested."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from typing import Any

import yaml
from pydantic import TypeAdapter, ValidationError

from megatron_hexi.errors import PlanError
from megatron_hexi.plan.check import check_plan
from megatron_hexi.plan.model import FORMAT_VERSION, Plan
from megatron_hexi.yaml_file import Place, YamlFile, read_yaml, spell_place, write_text_atomically

_ADAPTER = TypeAdapter(Plan)

#: The parts that inform people only: two plans that differ in nothing else do the same.
_INFORMATION = ("estimate", "provenance")

#: What pydantic says, as we say it. {} is its own wording where nothing shorter is known.
_REMEDIES = {
    "missing": "is missing; add it",
    "extra_forbidden": "is not a field of a plan; remove it or mend its name",
    "int_type": "is not a whole number; write one",
    "float_type": "is not a number; write one",
    "bool_type": "is not true or false; write one of them",
    "bool_parsing": "is not true or false; write one of them",
    "greater_than_equal": "is too small; the least is {ge}",
    "less_than_equal": "is too large; the most is {le}",
    "finite_number": "is not finite; write a number",
    "tuple_type": "is not a list; write one",
    "too_long": "has too many values; a range is [start, stop]",
    "dataclass_type": "is not a mapping; write its fields below it",
    "dataclass_exact_type": "is not a mapping; write its fields below it",
    "string_type": "is not text; put it in quotes",
    "dict_type": "is not a mapping; write its fields below it",
}


def read_plan(path: str | os.PathLike[str]) -> Plan:
    """Read a plan and check every rule that it must keep.

    Raises:
        HexiError: the file cannot be read or is not YAML.
        PlanError: a field or a rule is broken; one line with file, line, place, value and remedy.
    """
    return plan_from_yaml(read_yaml(path))


def plan_from_yaml(source: YamlFile) -> Plan:
    """The plan in a document that was read already. Raises as `read_plan` does."""
    if not isinstance(source.data, dict):
        raise PlanError(f"{source.path}:1: not a plan: a plan is a mapping with workload and replicas")
    found = source.data.get("version", FORMAT_VERSION)
    if found != FORMAT_VERSION:
        raise PlanError(
            f"{source.where(('version',))} is {found!r}; this megatron-hexi reads version {FORMAT_VERSION}"
        )
    try:
        plan = _ADAPTER.validate_python(source.data)
    except ValidationError as problems:
        raise PlanError(_first_problem(source, problems)) from None
    check_plan(plan, source.where)
    return plan


def validate_plan(plan: Plan) -> None:
    """Check the rules of a plan that was made in memory.

    Raises:
        PlanError: a rule is broken.
    """
    check_plan(plan, spell_place)


def write_plan(plan: Plan, path: str | os.PathLike[str]) -> None:
    """Check a plan and write it, whole or not at all. The same plan gives the same bytes.

    Raises:
        PlanError: the plan breaks a rule.
        HexiError: the file cannot be written.
    """
    validate_plan(plan)
    write_text_atomically(path, dump_plan(plan))


def dump_plan(plan: Plan) -> str:
    """The plan as YAML text, members and ranges on one line each."""
    return yaml.dump(plan_dict(plan), Dumper=_Dumper, sort_keys=False, width=110)


def plan_dict(plan: Plan) -> dict[str, Any]:
    """The plan as plain values, in the order of the file, without fields that are not set."""
    data = _without_none(dataclasses.asdict(plan))
    assert isinstance(data, dict)
    return {"version": data.pop("version"), **data}


def plan_digest(plan: Plan) -> str:
    """SHA-256 (hex) of what the plan makes ranks do; estimate and provenance are left out."""
    data = {key: value for key, value in plan_dict(plan).items() if key not in _INFORMATION}
    return hashlib.sha256(json.dumps(data, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def _first_problem(source: YamlFile, problems: ValidationError) -> str:
    problem = problems.errors(include_url=False)[0]
    place: Place = tuple(problem["loc"])
    said = _REMEDIES.get(problem["type"], problem["msg"]).format(**problem.get("ctx", {}))
    value = "" if problem["type"] in ("missing", "extra_forbidden") else f" = {_short(problem['input'])}"
    return f"{source.where(place)}{value} {said}"


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else text[:37] + "..."


def _without_none(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_none(item) for key, item in value.items() if item is not None}
    if isinstance(value, (list, tuple)):
        return [_without_none(item) for item in value]
    return value


class _Dumper(yaml.SafeDumper):
    """Block style above, flow style for members and lists of numbers: one line a rank."""

    def represent_mapping(self, tag: str, mapping: Any, flow_style: bool | None = None) -> yaml.MappingNode:
        flow = isinstance(mapping, dict) and "rank" in mapping
        return super().represent_mapping(tag, mapping, flow_style=flow)

    def represent_sequence(self, tag: str, sequence: Any, flow_style: bool | None = None) -> yaml.SequenceNode:
        flow = all(not isinstance(item, dict) for item in sequence)
        return super().represent_sequence(tag, sequence, flow_style=flow)

    def ignore_aliases(self, data: Any) -> bool:
        return True
