"""Convert domains of one unit between groups and the short form of plan files, ``{ranks: [4, 5]}``.

The only unit of such a domain holds all tokens and heads. Most stages of a pipeline are such domains. The
data classes have groups only: the short form is expanded when a file is read, and used when it is written.
"""

from __future__ import annotations

import copy
from typing import Any

from megatron_hexi.yaml_file import Place
from megatron_hexi.yaml_schema import Where

#: Fields of the short form.
_OF_A_UNIT = ("ranks", "state", "experts")
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
        for short in shortened:
            if place[: len(short) + 1] == (*short, "groups"):
                inner = place[len(short) :]
                return where((*short, *inner[len(_MEMBER) :]))
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
