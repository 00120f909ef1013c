"""Reads a JSON document, and answers each set of nodes in it with another: the plan, and its places.

A place is the node, and the GPU there, of one of the plan's ranks.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from megatron_hexi.cluster import read_cluster
from megatron_hexi.elastic.planning.survivors import survive
from megatron_hexi.errors import HexiError, user_errors
from megatron_hexi.plan import dump_plan, plan_from_yaml
from megatron_hexi.standard_output import standard_output
from megatron_hexi.yaml_file import yaml_from_text


@dataclass(frozen=True)
class PresentNodes:
    """The document: a job, and the sets of nodes to plan for.

    Args:
        present: node and local number of each started rank, for each set.
        speeds: speed of GPUs, by their numbers in the cluster, as parts of what the cluster file says.
    """

    plan: str
    path: str
    cluster: str
    words: tuple[str, ...]
    present: tuple[tuple[tuple[str, int], ...], ...]
    speeds: dict[int, float] = field(default_factory=dict)


def main() -> None:
    """Read the document on standard input, and print a line of JSON for each of its sets of present nodes."""
    with user_errors(), standard_output():
        try:
            request = TypeAdapter(PresentNodes).validate_json(sys.stdin.read())
        except (ValidationError, UnicodeDecodeError):
            raise HexiError("standard input: names no nodes of a job; start megatron_hexi.elastic") from None
        for present in request.present:
            print(json.dumps(_answer(request, present)), flush=True)


def _answer(request: PresentNodes, present: tuple[tuple[str, int], ...]) -> dict[str, Any]:
    try:
        plan = plan_from_yaml(yaml_from_text(Path(request.path), request.plan))
        cluster = read_cluster(request.cluster)
        survivors = survive(plan, cluster, present, request.words, request.speeds)
    except HexiError as problem:
        return {"error": str(problem)}
    places = [present[rank] for rank in survivors.ranks]
    return {"plan": dump_plan(survivors.plan), "places": places, "left_out": survivors.left_out}


if __name__ == "__main__":
    main()
