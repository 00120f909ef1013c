"""The plan of a round as rank 0 gets it: from the planner's process, or computed before the loss.

While a round trains, the planner looks ahead, at a low priority: a plan for each set of nodes that the loss
of one node would leave, and for each with a spare in its place. Plans are in the store that survives from one
round to the next.
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

from megatron_hexi.elastic.store import TRAINING, find_spares, round_store, whole_store
from megatron_hexi.text_file import read_text

#: How long the planner may take.
PLANNER_TIMEOUT = timedelta(seconds=300)
_COMMAND = (sys.executable, "-m", "megatron_hexi.elastic.planning")
_LEAST_NICE = 19
#: Seconds between two looks for spares that have come.
_LOOK_S = 5

#: Node in the cluster file, and number there, of each started rank.
Places = Sequence[tuple[str, int]]


def plan_for(job: dist.Store, request: dict[str, Any], present: Places) -> dict[str, Any]:
    """Return the plan for the nodes that are present.

    Args:
        request: request to `megatron_hexi.elastic.planning`, without ``present``.

    Returns:
        A dictionary with ``plan`` (YAML text), ``left_out`` (names of absent nodes) and ``ranks`` (for each
        rank of the plan, the number that the rank was started with); or with ``error`` alone.
    """
    key = _key(request, present)
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
    return {"plan": answer["plan"], "left_out": answer["left_out"], "ranks": ranks}


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
