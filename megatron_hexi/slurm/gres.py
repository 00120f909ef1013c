"""Compares the GPUs in Slurm's generic resources with those of a cluster file.

A site names types of GPUs in gres.conf as it likes, often with what NVML calls them, in lower case and with
underscores: ``h100``, ``nvidia_h100_80gb_hbm3``, ``a100-pcie-40gb``, ``a100_3g.20gb`` for a MIG slice.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping

#: ``gpu:h100:4(S:0-1)``, ``gres/gpu:8``: type and number; what is in brackets says where they are.
_GPUS = re.compile(
    r"(?:gres/)?gpu(?:\([^)]*\))?(?::(?P<type>[^:,()]*[^:,()0-9][^:,()]*))?(?::no_consume)?(?::(?P<count>\d+))?"
)
#: A MIG slice: ``3g.40gb``; names in cluster files have ``-MIG-3g-40gb``.
_SLICE = re.compile(r"(?<![a-z0-9])(\d+g)[.-](\d+gb)")
_MEMORY = re.compile(r"\d+gb")


def gpus_of(gres: str) -> Mapping[str, int]:
    """Return the number of a node's GPUs by type, in lower case; the type is empty where Slurm has none.

    >>> dict(gpus_of("gpu:h100:4(S:0-1)"))
    {'h100': 4}
    >>> dict(gpus_of("gpu:A100:2(S:0,1),shard:4,gpu:a100_3g.20gb:4,nvme:1"))
    {'a100': 2, 'a100_3g.20gb': 4}
    """
    counts: dict[str, int] = {}
    for entry in re.findall(r"(?:[^,(]|\([^)]*\))+", gres):
        match = _GPUS.match(entry.strip())
        if (
            match is not None
            and match.end() > 0
            and entry.strip()[match.end() : match.end() + 1] in ("", "(")
        ):
            kind = (match["type"] or "").lower()
            counts[kind] = counts.get(kind, 0) + int(match["count"] or 1)
    return counts


def names_gpu(kind: str, gpu: str) -> bool:
    """Return whether a type of Slurm's may be a GPU of a cluster file.

    The family has to be the same, and form and memory where the type says them.

    Args:
        kind: the type, in lower case.
        gpu: its name in the cluster file: ``H100-SXM-80GB``, or a name of the user's.

    >>> names_gpu("nvidia_h100_80gb_hbm3", "H100-SXM-80GB"), names_gpu("a100", "A100-PCIe-80GB")
    (True, True)
    >>> names_gpu("h100_pcie", "H100-SXM-80GB"), names_gpu("l40s", "L40-48GB")
    (False, False)
    >>> names_gpu("a100_3g.40gb", "A100-SXM-40GB"), names_gpu("a100_3g.40gb", "A100-SXM4-80GB-MIG-3g-40gb")
    (False, True)
    """
    name = gpu.lower()
    if _slice(kind) != _slice(name):
        return False
    family, *rest = _words(name) or [name]
    words = _words(kind)
    if family not in _runs(words):
        return False
    return _agree(_forms(words), _forms(rest)) and _agree(_memory(words), _memory(rest))


def _words(name: str) -> list[str]:
    """Return family, form and memory, without vendor, slice, or the memory of a Grace beside its GPU."""
    words = re.findall(r"[a-z0-9]+", _SLICE.sub("", name))
    return [word for word in words if word not in ("nvidia", "tesla", "geforce", "amd", "480gb")]


def _slice(name: str) -> tuple[str, ...] | None:
    match = _SLICE.search(name)
    return match.groups() if match else None


def _runs(words: list[str]) -> Iterator[str]:
    """Yield all runs of adjacent words, joined, as ``rtx4090`` from ``rtx`` and ``4090``."""
    for first, stop in itertools.combinations(range(len(words) + 1), 2):
        yield "".join(words[first:stop])


def _forms(words: list[str]) -> set[str]:
    forms = {"sxm" for word in words if word.startswith("sxm") or word == "hbm3"}
    return forms | {word for word in words if word in ("pcie", "nvl")}


def _memory(words: list[str]) -> set[str]:
    return {word for word in words if _MEMORY.fullmatch(word)}


def _agree(a: set[str], b: set[str]) -> bool:
    """Return whether two sets share an item, or one is empty: it does not say."""
    return not a or not b or bool(a & b)
