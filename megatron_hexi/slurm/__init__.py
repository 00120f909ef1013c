"""Which nodes of a Slurm job are which of the cluster file's, and so where each rank runs. No torch here."""

from megatron_hexi.slurm.nodes import SlurmNode, allocated_hosts, parse_nodes
from megatron_hexi.slurm.placement import Placed, place

__all__ = ["Placed", "SlurmNode", "allocated_hosts", "parse_nodes", "place"]
