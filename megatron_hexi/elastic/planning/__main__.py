"""Reads a JSON document, and answers each set of nodes in it with another: the plan, and its places.

A place is the node, and the GPU there, of one of the plan's ranks.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from megatron_hexi.cluster import read_cluster
from megatron_hexi.elastic.planning.survivors import survive
from megatron_hexi.errors import HexiError
from megatron_hexi.plan import dump_plan, plan_from_yaml
from megatron_hexi.yaml_file import yaml_from_text


def main() -> None:
    """Read the document on standard input, and print a line of JSON for each of its sets of present nodes."""
    request = json.loads(sys.stdin.read())
    for present in request["present"]:
        print(json.dumps(_answer(request, [(node, local) for node, local in present])), flush=True)


def _answer(request: dict[str, Any], present: list[tuple[str, int]]) -> dict[str, Any]:
    try:
        plan = plan_from_yaml(yaml_from_text(Path(request["path"]), request["plan"]))
        survivors = survive(plan, read_cluster(request["cluster"]), present, request["words"])
    except HexiError as problem:
        return {"error": str(problem)}
    places = [present[rank] for rank in survivors.ranks]
    return {"plan": dump_plan(survivors.plan), "places": places, "left_out": survivors.left_out}


if __name__ == "__main__":
    main()
