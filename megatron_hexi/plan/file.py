"""Read, check, write and digest plan files."""

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
from megatron_hexi.plan.shorthand import shorten, spelt_out
from megatron_hexi.text_file import write_text_atomically
from megatron_hexi.yaml_file import YamlFile, read_yaml, spell_place
from megatron_hexi.yaml_schema import Where, parse, short

_ADAPTER = TypeAdapter(Plan)

#: Fields that only inform people: two plans that differ only in these fields train alike.
_INFORMATION = ("estimate", "provenance")


def read_plan(path: str | os.PathLike[str]) -> Plan:
    """Read a plan and check all its rules.

    Raises:
        HexiError: the file cannot be read or is not YAML.
        PlanError: a field or a rule is broken; one line with file, line, place, value and remedy.
    """
    return plan_from_yaml(read_yaml(path))


def plan_from_yaml(source: YamlFile) -> Plan:
    """Return the plan of a YAML document. Raises as `read_plan` does."""
    if not isinstance(source.data, dict):
        content = "nothing" if source.data is None else short(source.data)
        raise PlanError(
            f"{source.where(())}: not a plan: found {content}; write a mapping with workload and replicas"
        )
    if "nodes" in source.data and "workload" not in source.data:
        raise PlanError(f"{source.path}: is a cluster file; give the plan")
    version = source.data.get("version")
    if type(version) is not int or version != FORMAT_VERSION:
        found = f"is {short(version)}" if "version" in source.data else "is missing"
        raise PlanError(
            f"{source.where(('version',))} {found}, this megatron-hexi reads {FORMAT_VERSION}; write "
            f"version: {FORMAT_VERSION}, or make the plan again"
        )
    return _checked(source.data, source.where)


def validate_plan(plan: Plan) -> None:
    """Check a plan that was built in memory, as if it had been read from a file.

    Raises:
        PlanError: a value or a rule is broken.
    """
    checked = _checked(plan_dict(plan), spell_place)
    if checked.workload != plan.workload:
        raise PlanError(
            f"workload.tensor_parallel is {plan.workload.tensor_parallel}, the members have "
            f"{checked.workload.tensor_parallel or 'different numbers of'} ranks; make the two equal"
        )


def write_plan(plan: Plan, path: str | os.PathLike[str]) -> None:
    """Check a plan and write it to a file atomically. Equal plans give equal bytes.

    Raises:
        PlanError: the plan breaks a rule.
        HexiError: the file cannot be written.
    """
    validate_plan(plan)
    write_text_atomically(path, dump_plan(plan))


def dump_plan(plan: Plan) -> str:
    """Return the plan as YAML text, each member and range on one line."""
    return yaml.dump(plan_dict(plan), Dumper=_PlanDumper, sort_keys=False, width=110)


def plan_dict(plan: Plan) -> dict[str, Any]:
    """Return the plan as dicts, lists and scalars in file order, without defaults and derived values."""
    data = _without_none(dataclasses.asdict(plan))
    assert isinstance(data, dict)
    del data["workload"]["tensor_parallel"]
    if not data["job"]:
        del data["job"]
    for exchange in (
        data["exchange"],
        *(s.get("exchange", {}) for r in data["replicas"] for s in r["stages"]),
    ):
        if exchange.get("parts") == 1:
            del exchange["parts"]
    for replica in data["replicas"]:
        for stage in replica["stages"]:
            stage["domains"] = [shorten(domain) for domain in stage["domains"]]
    return {"version": data.pop("version"), **data}


def plan_digest(plan: Plan) -> str:
    """Return the SHA-256 (hex) of a plan without its estimate and provenance, which no rank acts on."""
    data = {key: value for key, value in plan_dict(plan).items() if key not in _INFORMATION}
    return hashlib.sha256(json.dumps(data, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def _checked(data: dict[str, Any], where: Where) -> Plan:
    workload = data.get("workload")
    if isinstance(workload, dict) and "tensor_parallel" in workload:
        raise PlanError(
            f"{where(('workload', 'tensor_parallel'))} is not a known field; it follows from the ranks of "
            "the members"
        )
    spelt, where = spelt_out(data, where)
    plan = parse(_ADAPTER, spelt, where, PlanError)
    sizes = {len(member.ranks) for member in plan.members}
    width = sizes.pop() if len(sizes) == 1 else 0
    plan = dataclasses.replace(plan, workload=dataclasses.replace(plan.workload, tensor_parallel=width))
    check_plan(plan, where)
    return plan


def _without_none(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_none(item) for key, item in value.items() if item is not None}
    if isinstance(value, (list, tuple)):
        return [_without_none(item) for item in value]
    return value


#: Mappings with one of these fields are written on one line: members, whole domains, the exchange.
_ONE_LINE = ("ranks", "window")


class _PlanDumper(yaml.SafeDumper):
    """A YAML dumper that writes block style, but short mappings and lists in flow style."""

    def represent_mapping(self, tag: str, mapping: Any, flow_style: bool | None = None) -> yaml.MappingNode:
        flow = isinstance(mapping, dict) and not mapping.keys().isdisjoint(_ONE_LINE)
        return super().represent_mapping(tag, mapping, flow_style=flow)

    def represent_sequence(
        self, tag: str, sequence: Any, flow_style: bool | None = None
    ) -> yaml.SequenceNode:
        flow = all(not isinstance(item, dict) for item in sequence)
        return super().represent_sequence(tag, sequence, flow_style=flow)

    def ignore_aliases(self, data: Any) -> bool:
        return True
