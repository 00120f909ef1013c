"""The plan of a round as rank 0 gets it: chosen in a round before, from the planner's process, or made ahead.

While a round trains, the planner looks ahead, at a low priority: a plan for each set of nodes that the loss
of one node would leave, and for each with a spare in its place. Plans are in the store that survives from one
round to the next. What re-planning (`replan.training`) has measured and chosen is kept there, too.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence, Set
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from megatron_hexi.elastic.store import (
    DECISION,
    TRAINING,
    WANTED,
    find_spares,
    round_store,
    whole_store,
)
from megatron_hexi.elastic.training.fencing import ask_fence
from megatron_hexi.text_file import read_text

#: How long the planner may take.
PLANNER_TIMEOUT = timedelta(seconds=300)
_COMMAND = (sys.executable, "-m", "megatron_hexi.elastic.planning")
_LEAST_NICE = 19
#: Seconds between two looks for spares that have come.
_LOOK_S = 5

#: Keys of the job: seconds without training that the newest round has begun with, and the speeds of GPUs.
START_S, _SPEEDS = "start s", "speeds"

#: Node in the cluster file, and number there, of each started rank.
Places = Sequence[tuple[str, int]]


def plan_for(job: dist.Store, request: dict[str, Any], present: Places) -> dict[str, Any]:
    """Return the plan for the nodes that are present.

    Args:
        request: request to `megatron_hexi.elastic.planning`, without ``present`` and ``speeds``.

    Returns:
        A dictionary with ``plan`` (YAML text), ``left_out`` (names of absent nodes), ``ranks`` (for each
        rank of the plan, the number that the rank was started with), and what `choose_plan` needs; or with
        ``error`` alone.
    """
    chosen = _key(request | {"chosen": True}, present)
    request = _with_speeds(job, request)
    key = chosen if job.check([chosen]) else _key(request, present)
    if job.check([key]):
        answer = json.loads(job.get(key))
    else:
        document = json.dumps(request | {"present": [present]})
        limit = PLANNER_TIMEOUT.total_seconds()
        try:
            process = subprocess.run(_COMMAND, input=document, capture_output=True, text=True, timeout=limit)
        except subprocess.TimeoutExpired:
            return {
                "error": f"the planner took more than {PLANNER_TIMEOUT} for the nodes that are there; give "
                "fewer nodes"
            }
        if process.returncode != 0:
            why = (process.stderr.strip().splitlines() or ["no reason given"])[-1]
            return {"error": f"the planner failed ({why}); is megatron-hexi[plan] installed on every node?"}
        answer = json.loads(process.stdout)
        if "error" in answer:
            return answer
        job.set(key, json.dumps(answer))
    started = {(node, local): rank for rank, (node, local) in enumerate(present)}
    ranks = [started[node, local] for node, local in answer["places"]]
    return {**answer, "ranks": ranks, "chosen": chosen}


def _with_speeds(job: dist.Store, request: dict[str, Any]) -> dict[str, Any]:
    return request | {"speeds": json.loads(job.get(_SPEEDS)) if job.check([_SPEEDS]) else {}}


def choose_plan(plan: str, wanted: str = "") -> None:
    """Let later rounds of the nodes that are present train by a plan for the same GPUs; called by rank 0.

    Args:
        plan: YAML text.
        wanted: why the next round is to begin as soon as the state is saved; empty: it is not.
    """
    ask_fence()
    decision = json.loads(round_store().get(DECISION))
    answer = {"plan": plan, "left_out": decision["left_out"], "places": decision["places"]}
    whole_store().set(decision["chosen"], json.dumps(answer))
    if wanted:
        round_store().set(WANTED, wanted)


def tell_speeds(speeds: Mapping[str, float]) -> None:
    """Let the planner take GPUs, by their numbers in the cluster, for slower than the cluster file says."""
    ask_fence()
    whole_store().set(_SPEEDS, json.dumps(speeds))


def start_s() -> float:
    """Return the seconds between the last iteration before this round and its first one."""
    return float(whole_store().get(START_S))


def plan_ahead(request: dict[str, Any], present: Places) -> None:
    """Plan for the loss of each node, in the background of the training; returns at once."""
    threading.Thread(target=_plan_ahead, args=(request, present), name="hexi-ahead", daemon=True).start()


def _plan_ahead(request: dict[str, Any], present: Places) -> None:
    # A failure here is reported by the next round's planner.
    with suppress(OSError, RuntimeError, ValueError):
        job, now = whole_store(), round_store()
        while not now.check([TRAINING]):
            time.sleep(0.5)
        planned: set[str] = set()
        while True:
            planned |= _plan_losses(job, request, present, planned)
            time.sleep(_LOOK_S)


def _plan_losses(job: dist.Store, request: dict[str, Any], present: Places, planned: Set[str]) -> Set[str]:
    """Plan for the loss of each node, unless that is among the keys in `planned`; return all of the keys."""
    request = _with_speeds(job, request)
    sets = {_key(request, places): places for places in _after_a_loss(present, find_spares(job))}
    new = {key: places for key, places in sets.items() if key not in planned and not job.check([key])}
    if new:
        _plan_sets(job, request, new)
    return sets.keys()


def _after_a_loss(present: Places, waiting: Mapping[str, int]) -> list[Places]:
    """Return the sets of places after the loss of one node: those with a spare in its place first."""
    nodes = list(dict.fromkeys(node for node, _ in present))
    left = [[place for place in present if place[0] != lost] for lost in nodes]
    coming = {name: ranks for name, ranks in waiting.items() if name not in nodes}
    joined = [[(name, local) for local in range(ranks)] for name, ranks in coming.items()]
    return [*(places + spare for places in left for spare in joined), *filter(None, left)]


def _plan_sets(job: dist.Store, request: dict[str, Any], sets: Mapping[str, Places]) -> None:
    """Plan for sets of places, and store each plan under the set's key."""
    with subprocess.Popen(
        ["nice", "-n", str(_LEAST_NICE), *_COMMAND],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as planner:
        assert planner.stdin is not None
        assert planner.stdout is not None
        planner.stdin.write(json.dumps(request | {"present": list(sets.values())}))
        planner.stdin.close()
        for key, line in zip(sets, planner.stdout, strict=False):
            if "error" not in json.loads(line):
                job.set(key, line)


def _key(request: dict[str, Any], present: Places) -> str:
    """Return the key of the plan for these nodes in the job's store."""
    text = json.dumps([request, read_text(request["cluster"]), sorted(map(list, present))], sort_keys=True)
    return f"plans/{hashlib.sha256(text.encode()).hexdigest()}"
