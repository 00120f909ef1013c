"""Nested partitions of the ranks into parts whose ranks have fast links to each other."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Partition:
    """A partition of the ranks into parts; `name` is the level whose links join the ranks of each part."""

    name: str
    parts: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, name: str, group_of: Sequence[int], members: Sequence[Sequence[int]]) -> Partition:
        """Return the partition that joins members, each a list of ranks, of the same group into one part."""
        parts: dict[int, list[int]] = {}
        for number, group in enumerate(group_of):
            parts.setdefault(group, []).extend(members[number])
        return cls(name, tuple(tuple(part) for part in parts.values()))


def matrix_partitions(nodes: int, gb_s: Mapping[tuple[int, int], float]) -> list[tuple[str, list[int]]]:
    """Return nested partitions of nodes by measured bandwidth, the fastest first.

    The nodes of a part reach each other at 2^k GB/s or more. Thresholds are powers of two so that noise of
    the measurement does not split equal nodes. A threshold that joins no further nodes is left out.

    Args:
        nodes: number of nodes.
        gb_s: bandwidth from node to node, GB/s; the slower of the two directions counts.

    Returns:
        For each partition its name, and the number of each node's part.
    """
    octave = {(a, b): math.floor(math.log2(min(gb_s[a, b], gb_s[b, a]))) for a, b in gb_s if a < b}
    group_of = list(range(nodes))
    groups = {node: [node] for node in range(nodes)}
    steps = []
    for power in sorted(set(octave.values()), reverse=True):
        before = len(groups)
        for (a, b), pair_power in octave.items():
            if pair_power == power and group_of[a] != group_of[b]:
                keep, drop = sorted((group_of[a], group_of[b]))
                moved = groups.pop(drop)
                groups[keep] += moved
                for node in moved:
                    group_of[node] = keep
        if len(groups) < before:
            steps.append((f"{2.0**power:g} GB/s", group_of.copy()))
    return steps
