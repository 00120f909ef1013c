"""Read, check, write and digest plan files.

A domain of one unit has a short form in files, ``{ranks: [4, 5]}``: the unit holds all tokens and heads. Most
stages of a pipeline are such domains. The data classes have groups only: the short form is expanded when a
file is read, and used when it is written.
"""

from __future__ import annotations

import copy
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
from megatron_hexi.yaml_file import Dumper, Place, YamlFile, read_yaml, spell_place
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


class _PlanDumper(Dumper):
    """A YAML dumper that writes short mappings on one line, too."""

    def represent_mapping(self, tag: str, mapping: Any, flow_style: bool | None = None) -> yaml.MappingNode:
        flow = isinstance(mapping, dict) and not mapping.keys().isdisjoint(_ONE_LINE)
        return super().represent_mapping(tag, mapping, flow_style=flow)


#: Fields of the short form.
_OF_A_UNIT = ("ranks", "state", "experts", "precision", "patches")
#: Place of the only member in a domain with groups.
_MEMBER: Place = ("groups", 0, "members", 0)


def spelt_out(data: dict[str, Any], where: Where) -> tuple[dict[str, Any], Where]:
    """Expand the short form of all domains of a plan that was read from a file.

    Args:
        data: plain values of the plan, perhaps malformed; not changed.

    Returns:
        The plain values with groups in every domain, and a function that spells a place in the expanded plan
        as the corresponding place in the file.
    """
    data = copy.deepcopy(data)
    workload = data.get("workload")
    sizes = workload if isinstance(workload, dict) else {}
    shortened: set[Place] = set()
    for place, domain in _domains(data):
        if "ranks" not in domain or "groups" in domain:
            continue
        shortened.add(place)
        member: dict[str, Any] = {key: domain.pop(key) for key in _OF_A_UNIT if key in domain}
        width = len(member["ranks"]) if isinstance(member["ranks"], list) else 1
        heads = sizes.get("heads", 0)
        heads = heads // max(1, width) if type(heads) is int else 0
        member |= {"tokens": sizes.get("seq_length", 0), "heads": [0, heads]}
        domain["groups"] = [{"segments": [[0, sizes.get("seq_length", 0)]], "members": [member]}]

    def in_file(place: Place) -> str:
        for compact in shortened:
            if place[: len(compact) + 1] == (*compact, "groups"):
                inner = place[len(compact) :]
                return where((*compact, *inner[len(_MEMBER) :]))
        return where(place)

    return data, in_file


def shorten(domain: dict[str, Any]) -> dict[str, Any]:
    """Return a domain's plain values for a plan file: in short form if possible, without default values."""
    for group in domain["groups"]:
        for member in group["members"]:
            if member["state"] == 1:
                del member["state"]
            if len(member.get("experts", ())) == 1:
                (member["experts"],) = member["experts"]
    members = [member for group in domain["groups"] for member in group["members"]]
    first = domain["groups"][0]
    if len(members) > 1 or len(domain["groups"]) > 1 or len(first["segments"]) > 1 or first["name"]:
        return domain
    member = members[0]
    others = {key: value for key, value in domain.items() if key != "groups"}
    return {**{key: member[key] for key in _OF_A_UNIT if key in member}, **others}


def _domains(data: dict[str, Any]) -> list[tuple[Place, dict[str, Any]]]:
    """Return all domains of a plan's plain values that are mappings, each with its place in the plan."""
    domains: list[tuple[Place, dict[str, Any]]] = []
    for r, replica in _entries(data.get("replicas")):
        for s, stage in _entries(replica.get("stages")):
            for d, domain in _entries(stage.get("domains")):
                domains.append((("replicas", r, "stages", s, "domains", d), domain))
    return domains


def _entries(values: Any) -> list[tuple[int, dict[str, Any]]]:
    if not isinstance(values, list):
        return []
    return [(number, value) for number, value in enumerate(values) if isinstance(value, dict)]
