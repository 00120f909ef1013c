"""The stores of an elastic job, hosted by its agents: one for the whole job, one for each round of ranks.

A round is one start of the ranks, by the agents of `megatron_hexi.elastic`. Torch gives each round a store of
its own, on one of the nodes; ours is on a node that the job cannot lose, so that losses are always noticed.

Where a node was cut off or stopped, the others go on without it in another round. Its ranks may still run, as
if they were the job. So whatever outlives a round (checkpoints, copies, the log and the record, the counts in
the store, the file of ``--ended``) is written only where the store names the writer's round as the present
one: the fence (`training.fencing`). A node that cannot reach the store gets no answer, and writes nothing.
"""

from __future__ import annotations

import functools
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from datetime import timedelta

import torch.distributed as dist

#: Variables of a rank's environment: HOST:PORT of the store's door on this node and of its gate
#: (--rdzv-endpoint), the job's and the round's beginnings of keys, this node in the cluster file, and the
#: silence (s) of a rank that counts as its loss.
GATE_VARIABLE = "HEXI_RENDEZVOUS"
STORE_VARIABLE, JOB_VARIABLE, ROUND_VARIABLE = "HEXI_STORE", "HEXI_JOB", "HEXI_ROUND"
NODE_VARIABLE, LOST_AFTER_VARIABLE = "HEXI_NODE", "HEXI_LOST_AFTER"
#: Variable with the job's time less this node's clock that is never set, in seconds.
CLOCK_VARIABLE = "HEXI_CLOCK"
#: Keys of a round: rank 0's decision on plan and state; its ranks train; for what the next round is to begin
#: as soon as the state is saved; it ends for that.
DECISION, TRAINING, WANTED, IN_ORDER = "round", "training", "wanted", "in order"
#: Exit code of ranks that are to be started again, with other nodes.
START_AGAIN = 75
#: The word behind a spare's line in HOSTS.nodes of hexi place.
SPARE = "spare"
#: Keys of the job: the number of spares that have come, and the beginning of each one's key.
_SPARES, _SPARE = "spares", "spare"
#: How long the store may take to answer a rank.
_TIMEOUT = timedelta(seconds=60)


def in_round() -> bool:
    """Return whether this process is a rank of an elastic job."""
    return ROUND_VARIABLE in os.environ


def round_store(timeout: timedelta = _TIMEOUT) -> dist.Store:
    """Return the store of this round's ranks alone.

    Raises:
        RuntimeError: the store cannot be reached.
    """
    return dist.PrefixStore(os.environ[ROUND_VARIABLE], _store(timeout))


def whole_store(timeout: timedelta = _TIMEOUT) -> dist.Store:
    """Return the store that survives from one elastic round to the next.

    Raises:
        RuntimeError: the store cannot be reached.
    """
    return dist.PrefixStore(f"hexi.{os.environ[JOB_VARIABLE]}", _store(timeout))


def job_time() -> float:
    """Return the seconds since the epoch by the clock of the store's host, as it was when this node joined.

    It goes on whatever this node's clock is set to.
    """
    return time.monotonic() + float(os.environ[CLOCK_VARIABLE])


def add_spare(job: dist.Store, node: str, ranks: int) -> None:
    """Record a node that waits until it is needed, so that plans with it are made before."""
    job.set(f"{_SPARE}/{job.add(_SPARES, 1)}", json.dumps([node, ranks]))


def find_spares(job: dist.Store) -> dict[str, int]:
    """Return the number of ranks of each node that has come as a spare, by its name."""
    keys = [f"{_SPARE}/{number}" for number in range(1, job.add(_SPARES, 0) + 1)]
    return dict(json.loads(job.get(key)) for key in keys)


def store_gate() -> str | None:
    """Return HOST:PORT of the store of an elastic job, as ``--rdzv-endpoint`` says; ``None``: no such job."""
    return os.environ.get(GATE_VARIABLE)


def lost_after_s() -> float | None:
    """Return the seconds of silence after which a rank counts as lost; ``None``: silence ends nothing."""
    return float(os.environ[LOST_AFTER_VARIABLE]) if in_round() else None


def _store(timeout: timedelta) -> dist.Store:
    return _client(os.environ[STORE_VARIABLE], timeout, threading.get_ident())


@functools.cache
def _client(address: str, timeout: timedelta, thread: int) -> dist.TCPStore:
    """Return the store's client of a thread: others would wait while it waits, and a new one takes 50 ms."""
    host, _, port = address.rpartition(":")
    return dist.TCPStore(host, int(port), is_master=False, wait_for_workers=False, timeout=timeout)


#: Keys of the job: the present round, and how often it has changed.
_PRESENT, _CHANGES = "present", "changes"


@dataclass(frozen=True)
class PresentRound:
    """The present round of a job, and the agents that wait for the next one; agents have names.

    Args:
        round: name of the round; empty: none has begun.
        nodes: agents of the round, in the order of their ranks.
        here: agents that have come for the next round, in this order.
        is_broken: a rank of the round has ended, or a node of it.
        is_closed: the job has ended.
    """

    round: str = ""
    nodes: tuple[str, ...] = ()
    here: tuple[str, ...] = ()
    is_broken: bool = False
    is_closed: bool = False


def read_present(job: dist.Store) -> PresentRound:
    """Return the present round as the store of the whole job has it."""
    return _present_of(job.get(_PRESENT)) if job.check([_PRESENT]) else PresentRound()


def count_changes(job: dist.Store) -> int:
    """Return how often the present round has changed: much less to read than the round."""
    return int(job.add(_CHANGES, 0))


def change_present(job: dist.Store, change: Callable[[PresentRound], PresentRound]) -> None:
    """Replace the present round by what `change` returns, which is called again if others were faster."""
    begin = json.dumps(asdict(PresentRound()))
    before = job.compare_set(_PRESENT, "", begin)
    while (after := json.dumps(asdict(change(_present_of(before)))).encode()) != before:
        now = job.compare_set(_PRESENT, before.decode(), after.decode())
        if now == after:
            job.add(_CHANGES, 1)
            return
        before = now


def _present_of(text: bytes) -> PresentRound:
    fields = json.loads(text)
    return PresentRound(**fields | {name: tuple(fields[name]) for name in ("nodes", "here")})


#: Keys of a round: words on the ranks that have ended, and on a rank with a number.
_ENDED, _WHO = "ended", "who"


def set_name(round_: dist.Store, started: int, rank: int) -> None:
    """Record the number that a rank has in the plan, by the one that it was started with."""
    who = f"rank {rank} on host {socket.gethostname()} (process {os.getpid()})"
    round_.set(f"{_WHO}/{started}", who)


def tell_ended(round_: dist.Store, started: Iterable[int], how: str) -> None:
    """Tell the ranks of a round that some, by the numbers that they were started with, have ended."""
    keys = [key for number in started if round_.check([key := f"{_WHO}/{number}"])]
    who = [round_.get(key).decode() for key in keys] or ["a rank that was starting"]
    round_.set(_ENDED, json.dumps([f"{words}, which {how}" for words in who]))


def find_ended(round_: dist.Store) -> list[str]:
    """Return words on each rank that has ended, as far as agents have told."""
    return json.loads(round_.get(_ENDED)) if round_.check([_ENDED]) else []


ROUND_IS_OVER = (
    "this round is over: while this node was cut off or stopped, the others went on without it; nothing more "
    "of it is written"
)
