"""The least bytes that nodes must send each other to load a copy, by the plans of two rounds."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Set
from itertools import accumulate
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from megatron_hexi.plan import plan_from_yaml
from megatron_hexi.yaml_file import yaml_from_text

#: Most that a node needs of what is no tensor: arguments and random states.
OBJECTS_MB = 0.07


def files_held(files: Iterable[str], saved: Mapping[str, Any]) -> dict[str, set[str]]:
    """Return the files of ranks that each node holds: those of its own ranks, and of the node before it.

    Args:
        files: names of all files of a copy.
        saved: rank 0's decision of the round that made it.
    """
    own: dict[str, set[str]] = {node: set() for node in saved["nodes"]}
    for file in files:
        if rank := re.fullmatch(r"__(\d+)_\d+\.distcp", file):
            own[saved["places"][int(rank[1])][0]].add(file)
    nodes = saved["nodes"]
    return {node: own[node] | own[nodes[number - 1]] for number, node in enumerate(nodes)}


def layers_needed(loaded: Mapping[str, Any]) -> tuple[dict[str, set[int]], int]:
    """Return the layers of each node's ranks in the round that loads a copy, and the number of all layers."""
    plan = plan_from_yaml(yaml_from_text(Path("plan.yaml"), loaded["plan"]))
    needed: dict[str, set[int]] = {node: set() for node in loaded["nodes"]}
    layers = plan.workload.layers
    assert layers is not None
    for replica in plan.replicas:
        sizes = [stage.ministage_sizes if stage.layers else (layers,) for stage in replica.stages]
        # The first ministage of every stage, then the second of every stage.
        turns = [(stage, size) for turn in zip(*sizes, strict=True) for stage, size in enumerate(turn)]
        starts = accumulate((size for _, size in turns), initial=0)
        for (number, size), start in zip(turns, starts, strict=False):
            members = (member for domain in replica.stages[number].domains for member in domain.members)
            for rank in (rank for member in members for rank in member.ranks):
                needed[loaded["places"][rank][0]].update(range(start, start + size))
    return needed, layers


def needed_bytes(copy: Path, held: Mapping[str, Set[str]], loaded: Mapping[str, Any]) -> tuple[int, int]:
    """Return the least bytes of tensors that the nodes of a round need and do not hold, and the most.

    They differ by moments of weights that several nodes have, such as the embedding where it also makes the
    logits: of these each node needs a part, which is not looked into here.

    Args:
        copy: folder with the description of the copy.
        held: files that each node holds; a node that has just come holds none.
        loaded: rank 0's decision of the round that loads the copy, each unit of which is on one node.
    """
    needed, layers = layers_needed(loaded)
    described, least, most = FileSystemReader(copy).read_metadata(), 0, 0
    for index, where in described.storage_data.items():
        tensor = described.state_dict_metadata[index.fqn]
        if not isinstance(tensor, TensorStorageMetadata):
            continue
        if ".layers." in index.fqn:
            number = re.search(r"\.layers\.(\d+)\.", index.fqn)
            reads = {int(number[1]) if number else index.offset[0]}
        else:  # the embedding also makes the logits
            reads = {0, layers - 1} if "embedding" in index.fqn else {layers - 1}
        [sizes] = {chunk.sizes for chunk in tensor.chunks if chunk.offsets == index.offset}
        size = math.prod(sizes) * tensor.properties.dtype.itemsize
        users = [node for node, own in needed.items() if reads & own]
        missing = size * sum(where.relative_path not in held.get(node, ()) for node in users)
        if not index.fqn.startswith("optimizer."):
            least += missing
        elif missing == size * len(users):
            least += size  # one of them needs it
        most += missing
    return least, most


def check_least(said_mb: float, copy: Path, held: Mapping[str, Set[str]], loaded: Mapping[str, Any]) -> float:
    """Compare the least that a log says with `needed_bytes`, whose arguments follow; says the most, in MB."""
    least, most = (number / 1e6 for number in needed_bytes(copy, held, loaded))
    print(f"{least:.3f} to {most:.3f} MB of tensors had to come by the plans; with all else {said_mb:.3f} MB")
    most += OBJECTS_MB * len(loaded["nodes"])
    assert least <= said_mb <= most
    return most
