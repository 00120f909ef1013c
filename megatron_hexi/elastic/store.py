"""The stores of an elastic job, hosted by its agents: one for the whole job, one for each round of ranks.

A round is one start of the ranks, by the agents of `megatron_hexi.elastic`. Torch gives each round a store of
its own, on one of the nodes; ours is on a node that the job cannot lose, so that losses are always noticed.

Where a node was cut off or stopped, the others go on without it in another round. Its ranks may still run, as
if they were the job. So whatever outlives a round (checkpoints, copies, the log and the record, the counts in
the store, the file of ``--ended``) is written only where the store names the writer's round as the present
one: the `Fence`. A node that cannot reach the store gets no answer, and writes nothing either.
"""

from __future__ import annotations

import json
import os
import time
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
#: Keys of a round: its ranks train, one of them has failed, and how many nodes wait to be taken in.
TRAINING, BROKEN, WANTED = "training", "broken", "wanted"
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
    host, _, port = os.environ[STORE_VARIABLE].rpartition(":")
    return dist.TCPStore(host, int(port), is_master=False, wait_for_workers=False, timeout=timeout)


#: Key of the job: the present round and its number of nodes.
_PRESENT = "present"


def find_present(job: dist.Store) -> str:
    """Return the present round as the store of the whole job has it; empty: none has begun."""
    return job.get(_PRESENT).decode() if job.check([_PRESENT]) else ""


def read_present(present: str) -> tuple[str, int]:
    """Return name and number of nodes of a round that `find_present` has returned."""
    name, nodes = json.loads(present)
    return name, nodes


def begin_present(job: dist.Store, name: str, nodes: int, after: str) -> None:
    """Make a round the present one, unless another has begun meanwhile.

    Args:
        after: what `find_present` returned before the nodes of this round met.
    """
    job.compare_set(_PRESENT, after, json.dumps([name, nodes]))


class Fence:
    """The fence of one round."""

    def __init__(self, job: dist.Store, name: str) -> None:
        self._job, self._name = job, name

    def why_closed(self) -> str | None:
        """Return why the round may not write any more; ``None`` while writing is allowed.

        Raises:
            RuntimeError: the store does not answer.
        """
        if read_present(self._job.get(_PRESENT).decode())[0] == self._name:
            return None
        return (
            "this round is over: while this node was cut off or stopped, the others went on without it; "
            "nothing more of it is written"
        )
