"""Tells the ranks of a round which of them have ended, as soon as an agent, or the store's gate, sees it."""

from __future__ import annotations

import json
import time
from collections.abc import Collection
from dataclasses import astuple

import torch.distributed as dist

from megatron_hexi.elastic.launcher.presence import AgentName, ended_agents
from megatron_hexi.elastic.store import DECIDED, watch_store
from megatron_hexi.runtime.heartbeats import tell_ended

_LOOK_S = 0.2


class RoundLosses:
    """The losses of one round, as one of its agents sees them.

    Args:
        job: the job's store.
        round_: store of the round.
        own: name of this agent.
        number: number of this agent in the round.
        agents: number of agents in the round.
        started: numbers of this agent's ranks, as they are started.
    """

    def __init__(
        self,
        job: dist.Store,
        round_: dist.Store,
        own: AgentName,
        number: int,
        agents: int,
        started: range,
    ) -> None:
        self._job, self._round, self._agents, self._started = job, round_, agents, started
        self._told: frozenset[AgentName] = frozenset()
        self._looked_at = 0.0
        round_.set(f"agent/{number}", json.dumps([astuple(own), started.start, started.stop]))

    def tell_own(self, places: Collection[int]) -> None:
        """Tell all ranks that ranks of this agent were killed.

        Args:
            places: number of each among the agent's ranks.
        """
        self._tell({self._started[place] for place in places})

    def look(self) -> None:
        """Tell all ranks of those whose agents have ended."""
        if time.monotonic() < self._looked_at + _LOOK_S:
            return
        self._looked_at = time.monotonic()
        if not (new := ended_agents(self._job) - self._told):
            return
        keys = [key for key in (f"agent/{n}" for n in range(self._agents)) if self._round.check([key])]
        members = [json.loads(self._round.get(key)) for key in keys]
        if self._tell(
            {rank for name, *ranks in members if AgentName(*name) in new for rank in range(*ranks)}
        ):
            self._told |= new

    def _tell(self, started: Collection[int]) -> bool:
        """Tell all ranks of those started with some numbers; return whether nothing is left to tell."""
        if not started:
            return True
        if not self._round.check([DECIDED]):
            return False
        ranks = json.loads(self._round.get(DECIDED)).get("ranks", [])
        ended = [rank for rank, number in enumerate(ranks) if number in started]
        return tell_ended(watch_store(self._round), ended)
