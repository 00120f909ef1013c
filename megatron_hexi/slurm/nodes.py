"""Slurm's nodes with their GPUs, and the hosts of a job.

A site names types of GPUs in gres.conf as it likes, often with what NVML calls them, in lower case and with
underscores: ``h100``, ``4090``, ``a100-80``, ``nvidia_h100_80gb_hbm3``, ``a100_3g.20gb`` for a MIG slice.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from megatron_hexi.errors import PlatformError
from megatron_hexi.hostlist import expand_hostlist
from megatron_hexi.whole_number import variable_number

#: ``gpu:h100:4``, ``gpu:3090:8``, ``gres/gpu:8``: the last number counts, any word before it is a type.
_GPUS = re.compile(r"(?:gres/)?gpu(?::(?P<type>[^:]+?))??(?::no_consume)?(?::(?P<count>\d+))?")
#: A MIG slice: ``3g.40gb``, ``1g.10gb+me``; names in cluster files have ``-MIG-3g-40gb``.
_SLICE = re.compile(r"(?<![a-z0-9])(?:mig[._-]?)?(?:\d+c[.-])?(\d)g[.-]?(\d+)gb((?:[+.-]me)?)(?![a-z])")
#: Forms, also where they are written without a blank: ``a100sxm4``, ``a100pcie``, ``a100sxm480gb``.
_FORM = re.compile(r"sxm(?:[2-6](?!\d?gb?\b))?|pcie|nvl(?!ink|\d)|hbm\d?e?")
_MEMORY = re.compile(r"([1-9]\d{0,2})gb?|([1-9]\d{1,2})")
#: Vendors and series, which sites write or leave out.
_BRANDS = "nvidia|amd|tesla|geforce|quadro|instinct|radeon|rtx|gtx|gpu|generation"
_BRAND = re.compile(rf"^(?:{_BRANDS})+|(?:{_BRANDS})+$")
#: Words that make another GPU of the next or the last one: RTX PRO 6000, RTX 2080 Ti, RTX 6000 Ada, Titan V.
_BEFORE = re.compile(r"\b(pro|titan) (?!\d{1,3}(?:gb?)?\b)")
_BEHIND = re.compile(r" ([a-z]{1,2}|super|ada|laptop|mobile)\b")
#: Memory of a Grace CPU in GB, which the driver's name has beside or in place of its GPU's.
_GRACE = {120, 240, 480}


class _GpuName(NamedTuple):
    """A reading of a GPU's name.

    Attributes:
        model: the GPU without vendor, series, form and memory: ``a100``, ``2080ti``.
        forms: its form factors; empty: the name does not say.
        memory: its memory in GB, likewise.
        mig: a MIG slice of it; empty: the whole GPU.
    """

    model: str
    forms: frozenset[str]
    memory: frozenset[int]
    mig: tuple[str, ...]


def resources_of(gres: str) -> str:
    """Return generic resources, as Slurm prints them, sorted and without their sockets.

    >>> resources_of("nvme:1,gpu:h100:4(S:0,1)")
    'gpu:h100:4,nvme:1'
    """
    return ",".join(sorted(entry.strip() for entry in re.sub(r"\([^)]*\)", "", gres).split(",")))


def gpus_of(gres: str) -> Mapping[str, int]:
    """Return the number of a node's GPUs by type, in lower case; the type is empty where Slurm has none.

    >>> dict(gpus_of("gpu:h100:4(S:0-1)"))
    {'h100': 4}
    >>> dict(gpus_of("gpu:A100:2(S:0,1),shard:4,gpu:a100_3g.20gb:4,nvme:1,gpu:3090:8"))
    {'3090': 8, 'a100': 2, 'a100_3g.20gb': 4}
    """
    counts: Counter[str] = Counter()
    for match in filter(None, map(_GPUS.fullmatch, resources_of(gres).split(","))):
        counts[(match["type"] or "").lower()] += int(match["count"] or 1)
    return dict(sorted(counts.items()))


def names_gpu(kind: str, gpu: str) -> bool:
    """Return whether a type of Slurm's may be a GPU of a cluster file.

    The model and the MIG slice have to be the same, and form and memory where the type says them. Further
    words of the type are not understood and do not count, so several GPUs of one model may fit one type.

    Args:
        kind: the type, in lower case.
        gpu: its name in the cluster file: ``H100-SXM-80GB``, or a name of the user's.

    >>> names_gpu("nvidia_h100_80gb_hbm3", "H100-SXM-80GB"), names_gpu("2080ti", "RTX2080Ti-11GB")
    (True, True)
    >>> names_gpu("h100_pcie", "H100-SXM-80GB"), names_gpu("a100-40", "A100-SXM-80GB")
    (False, False)
    >>> names_gpu("a100_3g.40gb", "A100-SXM-40GB"), names_gpu("a100_3g.40gb", "A100-SXM4-80GB-MIG-3g-40gb")
    (False, True)
    """
    wanted = next(_readings(gpu.lower()), None)
    return wanted is not None and any(
        found.model == wanted.model
        and found.mig == wanted.mig
        and _agree(found.forms, wanted.forms)
        and _agree(found.memory, wanted.memory)
        for found in _readings(kind, wanted.model)
    )


def _readings(name: str, model: str = "") -> Iterator[_GpuName]:
    """Yield the readings of a name: each of its words may be the model, as ``sxm4-a100`` shows.

    Args:
        model: a model that may stand before its memory without a blank, as in ``a10080gb``.
    """
    mig = _SLICE.search(name)
    rest = _SLICE.sub(" ", name)
    if model:
        rest = re.sub(rf"({re.escape(model)})(?=[1-9]\d*gb?(?![a-z0-9]))", r"\1 ", rest)
    words = re.findall(r"[a-z0-9]+", _FORM.sub(r" \g<0> ", rest))
    forms = {"sxm" if word[:3] in ("sxm", "hbm") else word for word in words if _FORM.fullmatch(word)}
    plain = [short for word in words if not _FORM.fullmatch(word) and (short := _BRAND.sub("", word))]
    words = _BEHIND.sub(r"\1", _BEFORE.sub(r"\1", " ".join(plain))).split()
    for number, found in enumerate(words):
        others = words[:number] + words[number + 1 :]
        sizes = {int(match[1] or match[2]) for match in map(_MEMORY.fullmatch, others) if match}
        sizes -= _GRACE if re.match("g[hb]2", found) else set()
        yield _GpuName(found, frozenset(forms), frozenset(sizes), mig.groups() if mig else ())


def _agree(a: frozenset[str] | frozenset[int], b: frozenset[str] | frozenset[int]) -> bool:
    """Return whether two sets share an item, or one is empty and so says nothing."""
    return not a or not b or bool(a & b)


#: What `parse_nodes` reads: a line for each node and partition.
SINFO = ("sinfo", "--all", "--Node", "--noheader", "--format=%N|%R|%f|%G")


@dataclass(frozen=True)
class SlurmNode:
    """A node as Slurm describes it. Nodes with equal descriptions are taken to be alike.

    Args:
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
        partitions = {partition, *(nodes[name].partitions if name in nodes else ())}
        named = frozenset(features.split(",")) - {"(null)", ""}
        nodes[name] = SlurmNode(frozenset(partitions), named, resources_of(gres))
    if not nodes:
        raise PlatformError(f"standard input names no node; pipe in what {' '.join(SINFO)} prints")
    return nodes


def allocated_hosts(environment: Mapping[str, str]) -> list[list[str]]:
    """Return the hosts of each component of this job; one component where it is not heterogeneous.

    Raises:
        PlatformError: this is not a job, or a variable of Slurm's is missing.
    """
    size = variable_number(environment, "SLURM_HET_SIZE", 0, most=9999)
    names = [f"SLURM_JOB_NODELIST_HET_GROUP_{group}" for group in range(size)]
    if "SLURM_HET_SIZE" not in environment:
        names = ["SLURM_JOB_NODELIST"]
    hosts = [expand_hostlist(environment.get(name, "")) for name in names]
    for name, component in zip(names, hosts, strict=True):
        if not component:
            raise PlatformError(f"{name} names no host; run this in the script of a Slurm job")
    return hosts
