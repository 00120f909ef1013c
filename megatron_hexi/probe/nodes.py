"""The nodes that the ranks are on, and the names of nodes and GPUs in the cluster file."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from megatron_hexi.cluster import catalog
from megatron_hexi.errors import HexiError
from megatron_hexi.grouping import grouped
from megatron_hexi.probe.document import HostCards, RankInfo
from megatron_hexi.spelling import first_few

#: What torch calls a GPU, and the catalogue's names for it; the memory chooses.
_GPUS = (
    (r"B200", ("B200-180GB",)),
    (r"GH200", ("GH200-96GB",)),
    (r"H200", ("H200-SXM-141GB",)),
    (r"H100 NVL", ("H100-NVL-94GB",)),
    (r"H100 PCIe", ("H100-PCIe-80GB",)),
    (r"H100 .*HBM3", ("H100-SXM-80GB",)),
    (r"H100", ("H100-SXM-96GB",)),
    (r"A100-SXM.*", ("A100-SXM-80GB", "A100-SXM-40GB")),
    (r"A100 80GB PCIe", ("A100-PCIe-80GB",)),
    (r"A800-SXM.*", ("A800-SXM-80GB",)),
    (r"L40S", ("L40S-48GB",)),
    (r"L40", ("L40-48GB",)),
    (r"L4", ("L4-24GB",)),
    (r"RTX A6000", ("A6000-48GB",)),
    (r"A10G", ("A10G-24GB",)),
    (r"GeForce RTX 4090", ("RTX4090-24GB",)),
    (r"GeForce RTX 3090", ("RTX3090-24GB",)),
    (r"GeForce RTX 3080 Ti", ("RTX3080Ti-12GB",)),
    (r"GeForce RTX 2080 Ti", ("RTX2080Ti-11GB",)),
    (r"TITAN RTX", ("TitanRTX-24GB",)),
    (r"V100-SXM2.*", ("V100-SXM2-16GB", "V100-SXM2-32GB")),
    (r"V100-PCIE.*", ("V100-PCIe-16GB",)),
    (r"T4", ("T4-16GB",)),
)
#: Vendors' GB are nearly GiB, of which ECC may take up to a tenth (16 GB of a T4 show as 14.6 GiB).
_MEMORY_TOLERANCE = 0.12
_LONGEST_NAME = 64


@dataclass(frozen=True)
class NodeFound:
    """A node: its name in the file, its ranks, its host if no other node is there, and its cards."""

    name: str
    ranks: range
    host: str = ""
    cards: HostCards | None = None


def find_nodes(ranks: Sequence[RankInfo]) -> tuple[NodeFound, ...]:
    """Return the nodes in rank order."""
    members = grouped(((info.host, info.group), rank) for rank, info in enumerate(ranks))
    for (host, group), node_ranks in members.items():
        if node_ranks[-1] - node_ranks[0] + 1 != len(node_ranks):
            raise HexiError(
                f"ranks {first_few(node_ranks)} are on {_spell(host, group)} and others between them are "
                "not; number the ranks node by node (srun --distribution=block)"
            )
        kinds = sorted({ranks[rank].gpu for rank in node_ranks})
        if len(kinds) > 1:
            raise HexiError(
                f"{_spell(host, group)} has {' and '.join(kinds)}; a node of a cluster file has one kind of "
                "GPU: start the ranks of each kind as a node of its own"
            )
        local_ranks = [ranks[rank].local_rank for rank in node_ranks]
        if local_ranks != list(range(len(node_ranks))):
            raise HexiError(
                f"{_spell(host, group)}: its ranks {first_few(node_ranks)} have the local ranks "
                f"{first_few(local_ranks)}; start them with one torchrun or one srun"
            )
    hosts = [host for host, _ in members]
    nodes = []
    for name, host, node_ranks in zip(_node_names(hosts), hosts, members.values(), strict=True):
        alone = host if hosts.count(host) == 1 and re.fullmatch(r"[\w.-]+", host) else ""
        held = range(node_ranks[0], node_ranks[-1] + 1)
        nodes.append(NodeFound(name, held, alone, ranks[node_ranks[0]].cards))
    return tuple(nodes)


def device_name(info: RankInfo, precision: str) -> str:
    """Return a GPU's name in the file: the catalogue's where it is known, else torch's, made spellable.

    The catalogue's curves are in 16 bits: measured in fp32 a GPU gets a name of its own. So does a slice of a
    GPU (MIG 3g.40gb), the largest one too, which lacks multiprocessors of the whole.
    """
    for pattern, names in () if " MIG " in info.gpu else _GPUS:
        if info.kind == "cuda" and re.fullmatch(rf"(NVIDIA |Tesla )*{pattern}( \d+GB)?", info.gpu):
            gib = info.memory_bytes / 2**30
            for name in names:
                if abs(gib / catalog()[name].memory_gb - 1) <= _MEMORY_TOLERANCE:
                    return name if precision != "fp32" else f"{name}-fp32"
    prefix = "CPU " if info.kind == "cpu" else ""
    return spellable(f"{prefix}{re.sub(r'[(]R[)]|[(]TM[)]|@', ' ', info.gpu)}")


def _node_names(hosts: Sequence[str]) -> list[str]:
    """Return host names without their domain; several nodes of one name are numbered."""
    plain = [spellable(host.split(".")[0]) for host in hosts]
    counts = Counter(plain)
    names: list[str] = []
    for name in plain:
        number = 0
        # `name-0` is also what the one node of an entry called `name` is called.
        chosen = f"{name}.0" if counts[name] > 1 else name
        while chosen in names or (chosen.endswith("-0") and chosen[:-2] in (*plain, *names)):
            number += 1
            chosen = f"{name}.{number}"
        names.append(chosen)
    return names


def spellable(text: str) -> str:
    """Return a text with only letters, digits, _ and -, as names in a cluster file need."""
    return re.sub(r"[^A-Za-z0-9_]+", "-", text).strip("-_")[: _LONGEST_NAME - 10].rstrip("-") or "node"


def _spell(host: str, group: str) -> str:
    return f"{host} (node {group})" if group else host
