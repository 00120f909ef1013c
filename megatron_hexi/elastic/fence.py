"""The fence of an elastic job: ranks write only while the job's store names their round as the present one.

Where a node was cut off or stopped, the others go on without it in another round. Its ranks may still run, as
if they were the job. So whatever outlives a round is written only after this question: checkpoints, copies,
the log and the record, the counts in the store, the file of ``--ended``. A node that cannot reach the store
gets no answer, and writes nothing either.
"""

from __future__ import annotations

import json

import torch.distributed as dist

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
