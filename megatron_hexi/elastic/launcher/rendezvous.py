"""The rendezvous of a job's agents, which PyTorch's agent asks for the nodes of each round of ranks.

PyTorch's own compares clocks of nodes, waits in steps of a second, and unpickles what is in the store. Here
the store lists the agents that have come (`PresentRound`); the first of them to see that the next round can
begin writes it there. `Life` tells which are alive.
"""

from __future__ import annotations

import json
import math
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch.distributed as dist
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousStoreInfo,
    RendezvousTimeoutError,
)

from megatron_hexi.elastic import say
from megatron_hexi.elastic.launcher.life import Life, give_sign
from megatron_hexi.elastic.store import (
    ROUND_IS_OVER,
    TRAINING,
    WANTED,
    PresentRound,
    change_present,
    count_changes,
    find_spares,
    read_present,
    tell_ended,
)

#: Seconds for which more nodes are waited for once the fewest that suffice have come; others join later.
_LAST_CALL_S = 1.0
#: Key of a round, with a node's number: the ranks that the node has started.
_RANKS = "ranks"
#: Seconds between two looks of an agent that waits for others.
_LOOK_S = 0.05
#: Signs of life that a node may miss before ranks that start beside it are started again. A busy machine
#: misses some; ranks would wait for each other for minutes.
_SURELY_MISSED = 12


class Rendezvous(RendezvousHandler):
    """Lets the agents of a job meet for each round, and tells when ranks are to be started again.

    Args:
        new_name: a new name for this node's agent, which others take for lost when its connection ends.
        store: the store of all jobs; `job` is this job's part.
        least: number of nodes that suffice; `most` can take part.
        wait_s: seconds for which fewer than `least` nodes are waited for.
    """

    def __init__(
        self,
        new_name: Callable[[], str],
        address: str,
        store: dist.Store,
        job: dist.Store,
        least: int,
        most: int,
        wait_s: float,
    ) -> None:
        self._new_name, self._address, self._store, self._job = new_name, address, store, job
        self._agent = new_name()
        self._least, self._most, self._wait_s = least, most, wait_s
        self._life = Life(store)
        self._present, self._changes, self._trains = PresentRound(), -1, False
        #: Name of the round that this node takes part in, and the store that ranks and agents share.
        self.name = ""
        self.round: dist.Store = job

    use_agent_store = False

    def get_backend(self) -> str:
        """See `RendezvousHandler.get_backend`."""
        return "megatron-hexi"

    def get_run_id(self) -> str:
        """See `RendezvousHandler.get_run_id`."""
        return self._agent

    def is_closed(self) -> bool:
        """See `RendezvousHandler.is_closed`."""
        return read_present(self._job).is_closed

    def set_closed(self) -> None:
        """See `RendezvousHandler.set_closed`."""
        change_present(self._job, lambda present: replace(present, is_closed=True))

    def shutdown(self) -> bool:
        """See `RendezvousHandler.shutdown`."""
        self.set_closed()
        return True

    def begin_ranks(self, number: int, ranks: Sequence[int]) -> None:
        """Record the ranks of this node, which has a number in the round, for when it is gone."""
        self.round.set(f"{_RANKS}/{number}", json.dumps(ranks))

    def tell_ended(self, ranks: Sequence[int], how: str) -> None:
        """Tell agents and ranks of the round that some of its ranks have ended, unless it is broken."""
        is_first = False

        def broken(present: PresentRound) -> PresentRound:
            nonlocal is_first
            is_first = present.round == self.name and not present.is_broken
            return replace(present, is_broken=True) if is_first else present

        change_present(self._job, broken)
        if is_first:
            tell_ended(self.round, ranks, how)

    def next_rendezvous(self) -> RendezvousInfo:
        """Wait until this node takes part in a new round.

        Raises:
            RendezvousClosedError: the job has ended.
            RendezvousTimeoutError: too few nodes have come.
        """
        before = self.name
        give_sign(self._store, self._agent)
        if self._life.silences([self._agent])[self._agent] == math.inf:  # its connection was broken
            self._agent = self._new_name()
            give_sign(self._store, self._agent)
        change_present(self._job, self._with_this_node)
        deadline, called_at = time.monotonic() + self._wait_s, math.inf
        while (present := read_present(self._job)).round == before or self._agent not in present.nodes:
            if present.is_closed:
                raise RendezvousClosedError
            if self._agent not in present.here:  # it was stopped, and others went on
                change_present(self._job, self._with_this_node)
                continue
            lost = self._life.lost((*present.nodes, *present.here))
            here, now = [name for name in present.here if name not in lost], time.monotonic()
            if len({*present.nodes, *here} - lost) >= self._least:
                deadline = now + self._wait_s
            elif now > deadline:
                change_present(self._job, self._without_this_node)
                raise RendezvousTimeoutError
            if len(here) < self._least or not {*present.nodes} <= {*here, *lost}:
                called_at = math.inf
            elif self._has_all(present, here) or now > (called_at := min(called_at, now)) + _LAST_CALL_S:
                self._begin_round(present, here)
                continue
            time.sleep(_LOOK_S)
        self.name, self._trains = present.round, False
        self.round = dist.PrefixStore(self.name, self._store)
        rank = present.nodes.index(self._agent)
        place = RendezvousStoreInfo.build(rank, self.round, self._address)
        return RendezvousInfo(self.round, rank, len(present.nodes), place)

    def _with_this_node(self, present: PresentRound) -> PresentRound:
        return replace(self._without_this_node(present), here=(*present.here, self._agent))

    def _without_this_node(self, present: PresentRound) -> PresentRound:
        return replace(present, here=tuple(name for name in present.here if name != self._agent))

    def _has_all(self, present: PresentRound, here: list[str]) -> bool:
        """Return whether no further node is to be expected for the next round."""
        if len(here) >= self._most or not present.nodes:
            return len(here) >= self._most
        return {*present.nodes} <= {*here} or not find_spares(self._job)

    def _begin_round(self, present: PresentRound, here: list[str]) -> None:
        """Begin the next round: with the nodes of the present one first, then others as they have come."""
        order = [name for name in present.nodes if name in here]
        order += [name for name in here if name not in present.nodes]
        begun = PresentRound(uuid.uuid4().hex, tuple(order[: self._most]), tuple(order[self._most :]))
        change_present(self._job, lambda now: begun if now == present else now)

    def num_nodes_waiting(self) -> int:
        """Return the number of nodes for which the ranks are to be started again now.

        It is 0 while ranks train: these are told of waiting nodes in the round's store and end after a
        checkpoint. Ranks that are still starting would wait for a node that is silent, so it counts. Ranks of
        a round that is over or broken are started again with this node, which waits.
        """
        changes = count_changes(self._job)
        if changes != self._changes:
            self._present, self._changes = read_present(self._job), changes
        present = self._present
        if present.is_closed:  # the ranks end by themselves
            return 0
        if present.round != self.name:
            say(f"{ROUND_IS_OVER}. This node's ranks end; it waits to be taken in")
            return 1
        if present.is_broken or {*present.nodes} & {*present.here}:
            return 1
        silences = self._life.silences((*present.nodes, *present.here))
        if gone := [number for number, name in enumerate(present.nodes) if silences[name] == math.inf]:
            keys = [key for number in gone if self.round.check([key := f"{_RANKS}/{number}"])]
            ranks = [rank for key in keys for rank in json.loads(self.round.get(key))]
            self.tell_ended(ranks, "has ended with its node, or the agent there")
            return len(gone)
        self._trains = self._trains or self.round.check([TRAINING])
        lost = self._life.lost(silences, _SURELY_MISSED)
        left = sum(name not in lost for name in present.nodes)
        waiting = min(self._most - left, sum(name not in lost for name in present.here))
        if not self._trains:
            return max(waiting, len(present.nodes) - left)
        if waiting:
            self.round.set(WANTED, "a node that has come")
        return 0
