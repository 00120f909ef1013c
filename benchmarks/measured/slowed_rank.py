"""A training script: each rank is as fast as its GPU in the cluster file; one slows while a file is there.

`megatron_hexi.elastic` runs it in place of Megatron-LM's own, in each round anew.
"""

from __future__ import annotations

import os
from pathlib import Path

from megatron_hexi import pretrain_gpt
from megatron_hexi.cluster import read_cluster
from megatron_hexi.elastic.store import NODE_VARIABLE
from megatron_hexi.lab.testbed.in_rank.charge import Charger, PacedClock, Pacing
from megatron_hexi.lab.testbed.isolation import raise_priority
from megatron_hexi.lab.testbed.lab import Throttle

#: Files of the working directory: the cluster, and one that is there while the GPU is slow. The variable
#: ``SLOWED`` has its node's number and the part of its speed that it keeps.
CLUSTER, SLOWED = Path("cluster.yaml"), Path("slowed")


class WhileThere(Throttle):
    """A throttle that is active while `SLOWED` is there."""

    def holds(self, seconds: float) -> bool:
        """Return whether the throttle is active."""
        return SLOWED.exists()


def main() -> None:
    """Train."""
    raise_priority()
    cluster = read_cluster(CLUSTER)
    node, speed = os.environ["SLOWED"].split("=")
    gpu = next(one.ranks[0] for one in cluster.nodes if one.name == os.environ[NODE_VARIABLE])
    throttles = [WhileThere(gpu, float(speed), 0.0)] if cluster.nodes[int(node)].ranks[0] == gpu else []
    with Pacing(Charger(cluster.ranks[gpu].device), PacedClock(), throttles):
        pretrain_gpt.main()


if __name__ == "__main__":
    main()
