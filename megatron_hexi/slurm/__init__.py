"""A training as a Slurm job: the placement of ranks, and their arguments. No torch here."""

from megatron_hexi.slurm.nodes import SlurmNode, allocated_hosts, parse_nodes
from megatron_hexi.slurm.placement import Placed, TrainingStart, find_gpus, place, plan_start

__all__ = [
    "Placed",
    "SlurmNode",
    "TrainingStart",
    "allocated_hosts",
    "find_gpus",
    "parse_nodes",
    "place",
    "plan_start",
]
