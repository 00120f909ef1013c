"""Changes of the present round that many agents make at once are all made."""

from __future__ import annotations

import threading
from dataclasses import replace

import torch.distributed as dist

from megatron_hexi.elastic.store import (
    change_present,
    count_changes,
    read_present,
)


def test_changes_of_many_agents_are_all_made():
    job = dist.HashStore()

    def come(number: int) -> None:
        for _ in range(20):
            change_present(job, lambda present: replace(present, here=(*present.here, str(number))))

    agents = [threading.Thread(target=come, args=(number,)) for number in range(5)]
    for agent in agents:
        agent.start()
    for agent in agents:
        agent.join()
    assert sorted(read_present(job).here) == sorted(str(number) for number in range(5) for _ in range(20))
    assert count_changes(job) == 100
    change_present(job, lambda present: present)
    assert count_changes(job) == 100
