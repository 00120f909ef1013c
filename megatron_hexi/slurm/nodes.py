"""Slurm's nodes, and the hosts of a job."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from megatron_hexi.errors import PlatformError
from megatron_hexi.hostlist import expand_hostlist
from megatron_hexi.slurm.gres import gpus_of, names_gpu, resources_of
from megatron_hexi.whole_number import variable_number

#: What `parse_nodes` reads: a line for each node and partition.
SINFO = ("sinfo", "--all", "--Node", "--noheader", "--format=%N|%R|%f|%G")


@dataclass(frozen=True)
class SlurmNode:
    """A node as Slurm describes it. Nodes with equal descriptions are taken to be alike.

    Args:
        features: features that an administrator gave it.
        gres: its generic resources in one order, ``gpu:h100:8,nvme:1``.
    """

    partitions: frozenset[str]
    features: frozenset[str]
    gres: str

    def is_called(self, name: str) -> bool:
        """Return whether the node has a feature, or is in a partition, of this name."""
        return name in self.features or name in self.partitions

    def types_of(self, gpu: str, count: int) -> set[str]:
        """Return the types of which the node has at least `count` GPUs that a cluster file may call `gpu`."""
        types = gpus_of(self.gres).items()
        return {kind for kind, available in types if available >= count and names_gpu(kind, gpu)}


def parse_nodes(text: str) -> dict[str, SlurmNode]:
    """Parse the output of `SINFO` into nodes by name.

    Raises:
        PlatformError: a line has other fields, or there is none.
    """
    nodes: dict[str, SlurmNode] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        fields = line.strip().split("|")
        if len(fields) != 4 or not fields[0]:
            raise PlatformError(
                f"standard input, line {number}: {line[:80]!r} is not what {' '.join(SINFO)} prints; "
                "pipe that in"
            )
        name, partition, features, gres = fields
        node = nodes.get(name)
        nodes[name] = SlurmNode(
            partitions=frozenset({partition}) | (node.partitions if node else frozenset()),
            features=frozenset(features.split(",")) - {"(null)", ""},
            gres=resources_of(gres),
        )
    if not nodes:
        raise PlatformError(f"standard input names no node; pipe in what {' '.join(SINFO)} prints")
    return nodes


def allocated_hosts(environment: Mapping[str, str]) -> list[list[str]]:
    """Return the hosts of each component of this job; one component where it is not heterogeneous.

    Raises:
        PlatformError: this is not a job, or a variable of Slurm's is missing.
    """
    size = variable_number(environment, "SLURM_HET_SIZE", 0, most=9999)
    names = (
        ["SLURM_JOB_NODELIST"]
        if "SLURM_HET_SIZE" not in environment
        else [f"SLURM_JOB_NODELIST_HET_GROUP_{group}" for group in range(size)]
    )
    hosts = [expand_hostlist(environment.get(name, "")) for name in names]
    for name, component in zip(names, hosts, strict=True):
        if not component:
            raise PlatformError(f"{name} names no host; run this in the script of a Slurm job")
    return hosts
