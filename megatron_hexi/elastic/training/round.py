"""A round of an elastic job: the nodes that are present, the plan for them, and the state to resume from.

Ranks start as PyTorch's agents number them. Each records its node and GPU in the round's store; rank 0 has
the planner (`megatron_hexi.elastic.planning`) plan for those nodes, and records the plan; each rank then
takes the number that the plan gives it. A rank whose GPU the plan leaves out waits for the end.
docs/surviving.md
"""

from __future__ import annotations

import json
import os
import re
import sys
import time
from argparse import Namespace
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megatron_hexi.elastic import say
from megatron_hexi.elastic.copies import COPIES_URL_VARIABLE
from megatron_hexi.elastic.store import (
    DECISION,
    NODE_VARIABLE,
    in_round,
    round_store,
    set_name,
    whole_store,
)
from megatron_hexi.elastic.training.fencing import ask_fence, take_save
from megatron_hexi.elastic.training.goodput import begin_round, round_words, set_round
from megatron_hexi.elastic.training.loading import TRACKER, fetch_copy, find_copy
from megatron_hexi.elastic.training.round_plan import PLANNER_TIMEOUT, plan_ahead, plan_for
from megatron_hexi.errors import HexiError
from megatron_hexi.options.plan_job import kind_of
from megatron_hexi.plan import Plan, plan_from_yaml
from megatron_hexi.record import Round
from megatron_hexi.runtime import meeting, start_watch, stop_watch
from megatron_hexi.text_file import read_text, write_text_atomically
from megatron_hexi.yaml_file import yaml_from_text

#: How long ranks of one round may come one after another.
_COME = timedelta(seconds=120)
_FINISHED, _ROUNDS = "finished", "rounds"


def check_surviving(args: Namespace, given: set[str], plan: Plan) -> None:
    """Refuse a job that could not go on after a node failure."""
    what = "megatron_hexi.elastic"
    if args.hexi_cluster is None:
        raise HexiError(f"{what}: re-plans for the remaining nodes; give --hexi-cluster cluster.yaml")
    if args.save is None or not args.save_interval:
        raise HexiError(f"{what}: goes on from checkpoints; give --save FOLDER and --save-interval N")
    if args.ckpt_format != "torch_dist":
        raise HexiError(
            f"{what}: --ckpt-format {args.ckpt_format} is tied to its number of ranks; give torch_dist"
        )
    if getattr(args, "async_save", False):
        raise HexiError(
            f"{what}: a node that fails while --async-save writes would go unnoticed; leave --async-save out"
        )
    if getattr(args, "non_persistent_save_interval", None):
        raise HexiError(
            f"{what}: what --non-persistent-save-interval writes is lost with a node; leave it out, and "
            "give a smaller --save-interval"
        )
    order = getattr(args, "dataloader_type", None)
    if order not in (None, "single"):
        reason = (
            "the script's own loader says which samples a replica gets"
            if order == "external"
            else "the order of samples depends on the number of replicas"
        )
        raise HexiError(
            f"{what}: --dataloader-type {order}: {reason}, which a node failure may change, so that some "
            "would come twice and others never; give --dataloader-type single"
        )
    for flag in ("--finetune", "--ckpt-step"):
        if flag in given:
            raise HexiError(f"{what}: {flag} would undo the training at every start; leave {flag} out")
    if args.load not in (None, args.save):
        raise HexiError(
            f"{what}: --load {args.load} is not --save {args.save}; to begin with other weights give "
            "--pretrained-checkpoint FOLDER and no --load"
        )
    if kind_of(plan) != "stages" and args.num_experts:
        raise HexiError(
            f"{what}: {args.hexi_plan} does not say where the experts lie, as plans for the nodes that are "
            "left do; give its stages layers: and its units experts:, or make a plan with hexi plan"
        )
    if "--context-parallel-size" in given:
        raise HexiError(
            f"{what}: --context-parallel-size changes after a node failure; leave it out, the plan says it"
        )


def take_part(args: Namespace) -> Plan:
    """Agree on the present nodes, take this rank's number in the plan for them, and return that plan.

    Does not return on a rank that the plan leaves out, but ends the process when the training has ended.

    Args:
        args: Megatron's arguments; `rank`, `world_size` and `load` are changed in place.

    Raises:
        HexiError: there is no plan for the present nodes; raised on every rank.
        RuntimeError: a rank did not come.
    """
    ask_fence()
    store = round_store()
    started, count = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    place = [os.environ[NODE_VARIABLE], int(os.environ["LOCAL_RANK"])]
    store.set(f"here/{started}", json.dumps([*place, os.environ.get(COPIES_URL_VARIABLE)]))
    if started == 0:
        keys = [f"here/{rank}" for rank in range(count)]
        store.wait(keys, _COME)
        present = [json.loads(text) for text in store.multi_get(keys)]
        store.set(DECISION, json.dumps(_lead(args, present)))
    store.wait([DECISION], _COME + PLANNER_TIMEOUT)
    answer = json.loads(store.get(DECISION))
    if "error" in answer:
        raise HexiError(answer["error"])
    copy = answer["copy"] and fetch_copy(store, answer["copy"])
    if started == 0:
        store.set("told", json.dumps(asdict(_tell(answer, in_memory=bool(copy)))))
    round_fields = json.loads(store.get("told"))
    set_round(Round(**round_fields | {"without": tuple(round_fields["without"])}))
    _take_number(args, store, answer["ranks"], started)
    if copy or answer["resumes"] is not None:
        args.load = str(copy or args.save)
    return plan_from_yaml(yaml_from_text(Path(args.hexi_plan), answer["plan"]))


def leave() -> None:
    """Record that the training has ended well, so that this rank is not missed and spare ranks may end."""
    ask_fence()
    if in_round():
        if int(os.environ["RANK"]) == 0:
            round_store().set(_FINISHED, "")
        stop_watch()


def _take_number(args: Namespace, store: dist.Store, ranks: list[int], started: int) -> None:
    if started not in ranks:
        say(f"a GPU of {os.environ[NODE_VARIABLE]} has no part in the plan")
        while not store.check([_FINISHED]):
            time.sleep(1)
        sys.stdout.flush()
        raise SystemExit(0)
    args.rank, args.world_size = ranks.index(started), len(ranks)
    os.environ |= {"RANK": str(args.rank), "WORLD_SIZE": str(args.world_size)}
    set_name(store, started, args.rank)
    if args.world_size > 1:
        start_watch(meeting(store), args.rank, args.world_size)


# Rank 0


def _lead(args: Namespace, present: list[tuple[str, int, str]]) -> dict[str, Any]:
    """Return rank 0's decision for all ranks: the plan, and the copy or the iteration to resume from."""
    begun = time.monotonic()
    job = whole_store()
    try:
        take_save(args.save, job)
        iteration = newest_checkpoint(Path(args.save))
    except HexiError as problem:
        return {"error": str(problem)}
    request = {
        "plan": read_text(args.hexi_plan),
        "path": args.hexi_plan,
        "cluster": args.hexi_cluster,
        "words": sys.argv[1:],
    }
    places = [(node, local) for node, local, _ in present]
    answer = plan_for(job, request, places)
    if "error" in answer:
        return answer
    plan_ahead(request, places)
    nodes = {node: url for node, _, url in present}
    urls = [url for url in nodes.values() if url]
    copy = find_copy(job, urls, iteration)
    found = {"resumes": iteration, "copy": copy, "nodes": list(nodes), "urls": urls}
    return answer | found | {"took": time.monotonic() - begun}


def _tell(answer: dict[str, Any], in_memory: bool) -> Round:
    """Return the round, and print how it resumes."""
    job = whole_store()
    iteration = answer["copy"]["iteration"] if in_memory else answer["resumes"]
    now = begin_round(job, job.add(_ROUNDS, 1), iteration, tuple(answer["left_out"]), in_memory)
    absent = f"; without {', '.join(now.without)}" if now.without else ""
    say(
        f"round {now.number}: {len(answer['ranks'])} ranks on {', '.join(answer['nodes'])}{absent}; "
        f"planned in {answer['took']:.1f} s; {round_words(now)}"
    )
    return now


def newest_checkpoint(folder: Path) -> int | None:
    """Return the iteration of the newest complete checkpoint, after making the tracker file name it.

    Megatron writes `metadata.json` last into a checkpoint, then the tracker, which a kill can leave empty.

    Returns:
        The iteration; ``None``: there is no complete checkpoint.
    """
    complete = []
    for path in folder.glob("iter_*"):
        number = re.fullmatch(r"iter_(\d+)", path.name)
        if number and _is_complete(path):
            complete.append(int(number[1]))
    tracker = folder / TRACKER
    newest = max(complete, default=None)
    if newest is not None and (not tracker.is_file() or tracker.read_bytes().strip() != str(newest).encode()):
        write_text_atomically(tracker, str(newest))
    return newest


def _is_complete(path: Path) -> bool:
    try:
        json.loads((path / "metadata.json").read_text())
    except (OSError, ValueError):
        return False
    return (path / ".metadata").is_file()
