"""A training script: each matrix product and each attention takes the time of the GPU in the cluster file.

torchrun and `megatron_hexi.elastic` run it in place of Megatron-LM's own. All GPUs of the file are alike.
"""

from __future__ import annotations

import os
from pathlib import Path

from megatron_hexi import pretrain_gpt
from megatron_hexi.cluster import read_cluster
from megatron_hexi.lab.testbed.in_rank.charge import Charger, PacedClock, Pacing
from megatron_hexi.lab.testbed.isolation import raise_priority

#: Names the cluster file.
CLUSTER_VARIABLE = "GOODPUT_CLUSTER"

if __name__ == "__main__":
    raise_priority()
    cluster = read_cluster(Path(os.environ[CLUSTER_VARIABLE]))
    with Pacing(Charger(cluster.ranks[0].device), PacedClock()):
        pretrain_gpt.main()
