"""Nested partitions of the ranks into parts with fast links inside."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Partition:
    """A partition of the ranks; `name` is the level that joins the ranks of a part."""

    name: str
    parts: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, name: str, group_of: Sequence[int], members: Sequence[Sequence[int]]) -> Partition:
        """Build a partition from each member's group; parts in the order of their first rank."""
        parts: dict[int, list[int]] = {}
        for number, group in enumerate(group_of):
            parts.setdefault(group, []).extend(members[number])
        return cls(name, tuple(tuple(part) for part in parts.values()))


def matrix_partitions(nodes: int, gb_s: Mapping[tuple[int, int], float]) -> list[tuple[str, list[int]]]:
    """Return partitions of nodes by measured bandwidth, fastest first: at least 2^k GB/s inside a part.

    Powers of two, so that the noise of a measurement does not split what belongs together. A step that
    joins nothing is left out.

    Args:
        nodes: number of nodes.
        gb_s: GB/s from node to node; the slower of two directions counts.

    Returns:
        Name, and the group of each node, of every step.
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
