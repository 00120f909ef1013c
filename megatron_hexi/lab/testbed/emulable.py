"""Refuses a cluster file's features that cannot be emulated, with their place in the file."""

from __future__ import annotations

from megatron_hexi.cluster import Cluster, Device
from megatron_hexi.cluster.schema import refuse
from megatron_hexi.lab.testbed.lab import Speeds
from megatron_hexi.lab.testbed.quotas import KERNEL
from megatron_hexi.yaml_file import YamlFile

#: An address is 10.77.NODE.GPU.
_MOST = 250
#: A quota knows one speed of a device: attention and matrix products must agree on it.
_SAME_RATIO = 0.01


def check_emulable(cluster: Cluster, source: YamlFile, speeds: Speeds, *, links: bool) -> None:
    """Refuse a cluster that the testbed cannot emulate."""
    if len(cluster.nodes) > _MOST or any(len(node.ranks) > _MOST for node in cluster.nodes):
        refuse(source, ("nodes",), f"= more than {_MOST} nodes, or GPUs of one", "emulate a smaller cluster")
    if links:
        _check_links(cluster, source)
    if speeds != "none":
        for number, entry in enumerate(cluster.file.nodes):
            device = next(rank.device for rank in cluster.ranks if rank.device.name == entry.gpu)
            if KERNEL not in device.kernels:
                problem = f"= {entry.gpu} has no curves of {KERNEL}, the kernel that ranks here compute with"
                refuse(source, ("nodes", number, "gpu"), problem, "give them below devices:")
    if speeds == "quota":
        _check_one_speed(cluster, source)


def _check_links(cluster: Cluster, source: YamlFile) -> None:
    file = cluster.file
    instead = "describe the nodes' links by network, or take --emulate-links off"
    if file.matrix is not None:
        refuse(source, ("matrix",), "cannot be emulated: a node has one link here, as wide to all", instead)
    for field in ("fabrics", "levels"):
        if getattr(file, field):
            refuse(source, (field,), "cannot be emulated: nodes hang on one switch here", instead)
    for number, entry in enumerate(file.nodes):
        node = cluster.nodes[file.node_numbers[entry.name].start]
        if node.cards is None:
            return
        if node.cards.count > 1:
            if entry.network is not None:
                problem = (
                    f"= {entry.network.cards} cannot be emulated: the GPUs of a node share its link here"
                )
                refuse(source, ("nodes", number, "network", "cards"), problem, "write cards: 1")
            problem = "= gpu cannot be emulated: the GPUs of a node share its link here"
            refuse(source, ("network", "per"), problem, "write per: node, or give each node one GPU")
        network = node.cards.bandwidth
        if entry.gpus > 1 and node.bandwidth < network:
            problem = (
                f"has {node.bandwidth / 1e9:g} GB/s inside and {network / 1e9:g} outside: not emulated, what "
                "leaves a node passes the GPU's own port here"
            )
            refuse(source, ("nodes", number), problem, "make intra the faster, or take --emulate-links off")


def _check_one_speed(cluster: Cluster, source: YamlFile) -> None:
    """Refuse devices whose speedup over the first differs between attention and matrix products."""
    first = cluster.ranks[0].device
    for number, entry in enumerate(cluster.file.nodes):
        device = cluster.ranks[cluster.nodes[cluster.file.node_numbers[entry.name].start].ranks[0]].device
        ratios = [_top(device)[name] / _top(first)[name] for name in _top(first)]
        if max(ratios) > (1 + _SAME_RATIO) * min(ratios):
            problem = (
                f"is {min(ratios):.3g} to {max(ratios):.3g} times as fast as {first.name}, by kind of work"
            )
            refuse(source, ("nodes", number), f"{problem}: a quota has one speed", "take --speeds paced")


def _top(device: Device) -> dict[str, float]:
    """Return the last rate of each curve, TFLOP/s."""
    curves = {"matmul": device.layer_matmul} | device.attention(KERNEL).curves
    return {name: curve.rates[-1] for name, curve in curves.items()}
