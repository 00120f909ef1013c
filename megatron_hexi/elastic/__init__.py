"""A job that survives node failures: ``python -m megatron_hexi.elastic``.

- `launcher`: PyTorch's elastic agent, one on each node, which starts the node's ranks again
- `training`: a rank's part in a round, from one start of the ranks to the next
- `planning`: the planner, run as a process by rank 0, for the nodes that are present; no torch
- `store`, `copies`: the keys, and the copies of the training's state, that outlive a round
- `channel`, `copy_files`: connections between holders of the job's secret, files sent over them
"""

from __future__ import annotations

import sys


def say(message: str) -> None:
    """Print a line about the job, whole and at once: many processes write to one screen."""
    print(f"hexi: elastic: {message}", file=sys.stderr, flush=True)
