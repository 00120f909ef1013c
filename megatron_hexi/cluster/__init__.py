"""The machines of a cluster: catalogue of GPUs, cluster file, and topology of links; without torch."""

from megatron_hexi.cluster.catalog import catalog, device
from megatron_hexi.cluster.device import Attention, Curve, Device, Host, Link, Nominal, PassCurves
from megatron_hexi.cluster.file import cluster_digest, cluster_from_yaml, read_cluster
from megatron_hexi.cluster.links import Cards, LinkId, Node, Rank, Route, Tier
from megatron_hexi.cluster.model import ANYTHING, MEMORY_MARGIN, ClusterFile, NodeEntry, PlannerRules
from megatron_hexi.cluster.topology import Cluster, Partition

__all__ = [
    "ANYTHING",
    "MEMORY_MARGIN",
    "Attention",
    "Cards",
    "Cluster",
    "ClusterFile",
    "Curve",
    "Device",
    "Host",
    "Link",
    "LinkId",
    "Node",
    "NodeEntry",
    "Nominal",
    "Partition",
    "PassCurves",
    "PlannerRules",
    "Rank",
    "Route",
    "Tier",
    "catalog",
    "cluster_digest",
    "cluster_from_yaml",
    "device",
    "read_cluster",
]
