"""Convert plans of file format version 1 to version 2.

Version 1 had one repeated stage per replica, with one domain, and gave members by their numbers and the
tensor-parallel size once: ``{rank: 3}`` with tensor-parallel size 2 is ``{ranks: [6, 7]}`` in version 2.
"""

from __future__ import annotations

import copy
from typing import Any

from megatron_hexi.errors import PlanError
from megatron_hexi.yaml_file import Place
from megatron_hexi.yaml_schema import Where, short


def converted(data: dict[str, Any], where: Where) -> dict[str, Any]:
    """Return the plain values of a version-1 plan in version 2.

    Malformed values are left unchanged, for the schema to refuse.

    Args:
        data: plain values of version 1; not changed.
        where: a function that spells a place in the plan for an error message.

    Raises:
        PlanError: the plan has a field that only version 2 has, or stages that version 1 cannot express.
    """
    data = copy.deepcopy(data) | {"version": 2}
    workload = data.get("workload")
    width = workload.pop("tensor_parallel", 1) if isinstance(workload, dict) else 1
    if type(width) is not int or width < 1:
        raise PlanError(f"{where(('workload', 'tensor_parallel'))} = {short(width)}; write a number from 1")
    for r, replica in enumerate(_entries(data, "replicas")):
        place: Place = ("replicas", r, "stages")
        stages = _entries(replica, "stages")
        if len(stages) > 1:
            raise PlanError(
                f"{where(place)} has {len(stages)} stages, in version 1 the job repeats one; write version: 2"
            )
        for stage in stages:
            if "domains" in stage:
                raise PlanError(f"{where((*place, 0, 'domains'))} is of version 2; write version: 2")
            layers = stage.pop("layers", None)
            if layers is not None and (not isinstance(workload, dict) or layers != workload.get("layers")):
                raise PlanError(
                    f"{where((*place, 0, 'layers'))} is {short(layers)}; leave it out in version 1"
                )
            domain = stage.pop("domain", None)
            stage["domains"] = [domain]
            for group in _entries(domain, "groups"):
                for member in _entries(group, "members"):
                    if "rank" in member:
                        member["ranks"] = _ranks(member.pop("rank"), width)
    return data


def place_in_version_1(place: Place) -> Place:
    """Return the place in a version-1 plan that corresponds to a place in the converted plan."""
    steps: list[str | int] = []
    for step in place:
        if steps and steps[-1] == "domains":
            steps[-1] = "domain"  # the one there is
        elif steps and steps[-1] == "rank":
            break
        else:
            steps.append("rank" if step == "ranks" else step)
    return tuple(steps)


def _ranks(number: Any, width: int) -> list[Any]:
    """Return the ranks of the unit with the given number; an invalid number is returned in a list."""
    if type(number) is not int or number < 0:
        return [number]
    return list(range(number * width, (number + 1) * width))


def _entries(holder: Any, name: str) -> list[dict[str, Any]]:
    """Return the mappings in the list `holder[name]`; an empty list if there is no such list."""
    entries = holder.get(name) if isinstance(holder, dict) else None
    return [entry for entry in entries if isinstance(entry, dict)] if isinstance(entries, list) else []
