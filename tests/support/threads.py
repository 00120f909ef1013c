"""Many ranks in one process: a thread a rank, joined by real gloo process groups.

The code under test is the one that runs in a job; only the ranks are threads. Setting up eight of them
takes milliseconds, so that hundreds of plans can be tried.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

from megatron_hexi.plan import Plan, build_schedule
from megatron_hexi.runtime import DomainAttention

_TIMEOUT = timedelta(seconds=60)


@functools.cache
def _device() -> Any:
    """One network loop for all groups: taking one down costs 30 ms."""
    return dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")


@dataclass
class ThreadRank:
    """What one thread needs to make process groups with the others."""

    rank: int
    store: dist.Store
    groups: list[dist.ProcessGroup] = field(default_factory=list)

    def new_group(self, name: str, ranks: Sequence[int]) -> dist.ProcessGroup:
        """A gloo group of these ranks; every one of them must ask for it."""
        options = dist.ProcessGroupGloo._Options()
        options._devices = [_device()]
        options._timeout = _TIMEOUT
        store = dist.PrefixStore(name, self.store)
        group = dist.ProcessGroupGloo(store, list(ranks).index(self.rank), len(ranks), options)
        # batch_isend_irecv looks its group up here; a group that torch did not make itself is unknown.
        distributed_c10d._world.pg_group_ranks[group] = {rank: i for i, rank in enumerate(ranks)}
        self.groups.append(group)
        return group

    def close(self) -> None:
        """Let its groups go, with their threads and sockets; hundreds of plans would use up all there are."""
        for group in self.groups:
            del distributed_c10d._world.pg_group_ranks[group]
        self.groups.clear()

    def attention(self, plan: Plan, kernel: str = "auto", replica: int = 0) -> DomainAttention:
        """This rank's part of a plan, with the groups that it needs."""
        domain = plan.replicas[replica].domain
        schedule = build_schedule(plan.workload, domain, self.rank)
        everyone = self.new_group("domain", range(len(domain.members)))
        a2a = self.new_group(f"a2a-{schedule.members}", schedule.members) if len(schedule.members) > 1 else None
        return DomainAttention(plan.workload, schedule, everyone, a2a, plan.exchange.window, kernel)


def run_ranks(count: int, work: Callable[[ThreadRank], Any]) -> list[Any]:
    """Run `work` on every rank; the results in rank order. The first rank's error is raised."""
    store = dist.HashStore()
    results: list[Any] = [None] * count
    errors: list[BaseException | None] = [None] * count
    ranks = [ThreadRank(rank, store) for rank in range(count)]

    def body(rank: int) -> None:
        try:
            results[rank] = work(ranks[rank])
        except BaseException as error:
            errors[rank] = error

    threads = [threading.Thread(target=body, args=(rank,), daemon=True) for rank in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(_TIMEOUT.total_seconds() + 10)
        assert not thread.is_alive(), "a rank hangs"
    for closing in ranks:
        closing.close()
    for error in errors:
        if error is not None:
            raise error
    return results
