"""``python -m megatron_hexi.elastic.planning``: the planner at the start of a round, for the nodes there are.

It reads one JSON document and answers, for each set of nodes in it, with one: the plan, and on which GPU of
which node each of its ranks is. While all nodes of the job's own plan are there, that one stays.
"""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from megatron_hexi.cluster import Cluster, cluster_digest, read_cluster
from megatron_hexi.cost import Job
from megatron_hexi.cost.job import job_of_plan
from megatron_hexi.cost.megatron_arguments import model_from_arguments, terms_from_arguments
from megatron_hexi.errors import HexiError
from megatron_hexi.plan import Plan, dump_plan, plan_from_yaml
from megatron_hexi.plan.units import rank_gpus
from megatron_hexi.planner import CHOSEN, Request, find_plan
from megatron_hexi.yaml_file import yaml_from_text

_COMMAND_LINE = Path("the job's command line")


@dataclass(frozen=True)
class Survivors:
    """The plan that a job continues with after a loss.

    Args:
        plan: plan for the present nodes; `gpus` counts in the whole cluster.
        ranks: the started rank that takes each of the plan's ranks.
        left_out: names of absent nodes of the cluster file.
    """

    plan: Plan
    ranks: tuple[int, ...]
    left_out: tuple[str, ...]


def survive(
    plan: Plan, cluster: Cluster, present: Sequence[tuple[str, int]], words: Sequence[str]
) -> Survivors:
    """Return a plan for the nodes that are present.

    Args:
        plan: the job's own plan.
        cluster: the cluster that it was made for.
        present: node in the cluster file, and number there, of each started rank.
        words: Megatron's arguments.

    Raises:
        HexiError: a node that the cluster file does not have, or with another number of GPUs; two of one
            name; nothing fits in memory.
    """
    starts, job = _starts(cluster, present), _job(plan, words)
    if plan.provenance and plan.provenance.cluster_digest not in (None, cluster_digest(cluster)):
        raise HexiError(f"--hexi-plan was made for another cluster than {cluster.name}; give its own file")
    gpus = rank_gpus(plan, plan.ranks)
    numbers = sorted({cluster.ranks[gpu].node for gpu in starts})
    if not starts.keys() >= set(gpus):
        part = cluster.without(set(range(len(cluster.nodes))).difference(numbers))
        ranks = [rank for number in numbers for rank in cluster.nodes[number].ranks]
        part_plan = find_plan(
            Request(job, frozenset(CHOSEN) - {"data_parallel"}, virtual_stages=1), part
        ).plan
        gpus = tuple(ranks[gpu] for gpu in rank_gpus(part_plan, part_plan.ranks))
        plan = replace(part_plan, gpus=gpus, job=plan.job)
    absent = [node.name for number, node in enumerate(cluster.nodes) if number not in numbers]
    return Survivors(plan, tuple(starts[gpu] for gpu in gpus), tuple(absent))


def _starts(cluster: Cluster, present: Sequence[tuple[str, int]]) -> dict[int, int]:
    """Return the started rank of each GPU, by the GPU's number in the cluster."""
    starts: dict[int, int] = {}
    for rank, (name, local) in enumerate(present):
        numbers = cluster.file.find_nodes(name)
        if numbers is None or len(numbers) != 1:
            names = ", ".join(node.name for node in cluster.nodes[:8])
            raise HexiError(f"--node {name}: names no node of {cluster.name} ({names}); give one of these")
        node = cluster.nodes[numbers[0]]
        count = sum(node_name == name for node_name, _ in present)
        if count != len(node.ranks):
            raise HexiError(
                f"--node {name}: {count} ranks were started there, {node.name} has {len(node.ranks)} GPUs; "
                f"give --nproc-per-node {len(node.ranks)}, and each node's name once"
            )
        starts[node.ranks[local]] = rank
    return starts


def _job(plan: Plan, words: Sequence[str]) -> Job:
    """Return the job: the command line's, completed by the plan. The batch does not change with the ranks."""
    text = shlex.join(words)
    fields = terms_from_arguments(text, _COMMAND_LINE).fields
    ignored = ("seq_length", "tensor_parallel", "data_parallel")
    stated = {name: value for name, value in fields.items() if name not in ignored}
    model = model_from_arguments(text, _COMMAND_LINE)
    if model.experts is not None:
        raise HexiError(
            "--num-experts: experts lie in stages that have layers, which plans for the nodes that are left "
            "do not have yet; start the job without megatron_hexi.elastic"
        )
    return job_of_plan(plan, model, **stated)


def main() -> None:
    """Answer the document on standard input, with a line for each of its sets of present nodes."""
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
