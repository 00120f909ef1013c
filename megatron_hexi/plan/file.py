"""Plans as files: read, checked, written, digested."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from typing import Any

import yaml
from pydantic import TypeAdapter

from megatron_hexi.errors import PlanError
from megatron_hexi.plan.check import check_plan
from megatron_hexi.plan.model import FORMAT_VERSION, Plan
from megatron_hexi.text_file import write_text_atomically
from megatron_hexi.yaml_file import YamlFile, read_yaml, spell_place
from megatron_hexi.yaml_schema import Where, parse, short

_ADAPTER = TypeAdapter(Plan)

#: The parts that inform people only: two plans that differ in nothing else do the same.
_INFORMATION = ("estimate", "provenance")


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
        found = "nothing" if source.data is None else short(source.data)
        raise PlanError(
            f"{source.where(())}: not a plan: found {found}; write a mapping with workload and replicas"
        )
    if "nodes" in source.data and "workload" not in source.data:
        raise PlanError(f"{source.path}: is a cluster file; give the plan")
    version = source.data.get("version", FORMAT_VERSION)
    if type(version) is not int or version != FORMAT_VERSION:
        raise PlanError(
            f"{source.where(('version',))} is {short(version)}, this megatron-hexi reads {FORMAT_VERSION}; "
            "make the plan again"
        )
    return _checked(source.data, source.where)


def validate_plan(plan: Plan) -> None:
    """Check a plan that was made in memory, as if it had been read from a file.

    Raises:
        PlanError: a value or a rule is broken.
    """
    _checked(plan_dict(plan), spell_place)


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
    if data["exchange"]["parts"] == 1:
        del data["exchange"]["parts"]  # plans from before there were parts keep their text and their digest
    return {"version": data.pop("version"), **data}


def plan_digest(plan: Plan) -> str:
    """SHA-256 (hex) of what the plan makes ranks do; estimate and provenance are left out."""
    data = {key: value for key, value in plan_dict(plan).items() if key not in _INFORMATION}
    return hashlib.sha256(json.dumps(data, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def _checked(data: dict[str, Any], where: Where) -> Plan:
    plan = parse(_ADAPTER, data, where, PlanError)
    check_plan(plan, where)
    return plan


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

    def represent_sequence(
        self, tag: str, sequence: Any, flow_style: bool | None = None
    ) -> yaml.SequenceNode:
        flow = all(not isinstance(item, dict) for item in sequence)
        return super().represent_sequence(tag, sequence, flow_style=flow)

    def ignore_aliases(self, data: Any) -> bool:
        return True
