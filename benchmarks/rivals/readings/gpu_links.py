"""Links between all GPUs of a cluster, as graph partitioning needs them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from megatron_hexi.cluster import Cluster
from megatron_hexi.cost.arrays import Floats


def bandwidths(cluster: Cluster) -> Floats:
    """Return bytes/s between every two GPUs, of the slower direction; 0 on the diagonal, [N, N]."""
    count = len(cluster.ranks)
    firsts = [node.ranks[0] for node in cluster.nodes]
    between = np.array(
        [[0.0 if one == other else cluster.bandwidth(one, other) for other in firsts] for one in firsts]
    )
    node = np.array([rank.node for rank in cluster.ranks])
    found = between[np.ix_(node, node)]
    inside = np.array([one.bandwidth for one in cluster.nodes])
    found = np.where(node[:, None] == node, inside[node], found)
    return np.minimum(found, found.T) * (1 - np.eye(count))


def thickest_path(groups: Sequence[list[int]], links: Floats) -> list[list[int]]:
    """Return the groups along a path that starts at the first and always follows the fastest link.

    Args:
        groups: GPUs of each group.
        links: bytes/s between all GPUs, [N, N].
    """
    path, left = [groups[0]], list(groups[1:])
    while left:
        here = path[-1]
        path.append(max(left, key=lambda group: float(links[np.ix_(here, group)].mean())))
        left.remove(path[-1])
    return path
