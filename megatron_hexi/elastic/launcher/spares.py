"""Lets a spare node wait, with Megatron imported, until a node of the job is missing.

A spare has no part in the rounds that it waits through, not even in PyTorch's rendezvous, so it may come and
end without stopping anything.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch.distributed as dist
from torch.distributed.elastic.rendezvous import RendezvousClosedError, RendezvousTimeoutError

from megatron_hexi.elastic.fence import find_present, read_present
from megatron_hexi.elastic.launcher.life import MISSED, RoundLife
from megatron_hexi.elastic.speech import say

#: Key in a round's store: how many spares have asked for a place.
_ASKED = "asked"
_LOOK_S = 0.2


def wait_as_spare(
    store: dist.Store, job: dist.Store, most: int, is_closed: Callable[[], bool], limit_s: float
) -> None:
    """Wait until the job needs this spare node: until fewer nodes are alive than can take part.

    Args:
        store: the store of the rendezvous, without a prefix for its keys.
        limit_s: seconds within which a round must have begun.

    Raises:
        RendezvousClosedError: the job has ended.
        RendezvousTimeoutError: no round has begun within `limit_s`.
    """
    deadline = time.monotonic() + limit_s
    say(f"waits as a spare until fewer than {most} nodes are left")
    while not find_present(job):
        if time.monotonic() > deadline:
            raise RendezvousTimeoutError
        time.sleep(_LOOK_S)
    seen, life, place = "", None, 0
    while not is_closed():
        name, nodes = read_present(find_present(job))
        present = dist.PrefixStore(name, store)
        if life is None or name != seen:
            seen, life, place = name, RoundLife(present, nodes, MISSED), 0
        alive = nodes - life.count_lost()
        if alive < most:
            # Each spare asks once a round, so that no more come than are missing.
            place = place or present.add(_ASKED, 1)
            if place <= most - alive:
                say(f"takes part: {alive} of {most} nodes are left")
                return
        time.sleep(_LOOK_S)
    raise RendezvousClosedError
