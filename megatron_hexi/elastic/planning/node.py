"""Finds the node of the cluster file that a name stands for; as a command, checks a spare of the job."""

from __future__ import annotations

import sys

from megatron_hexi.cluster import Cluster, Node, read_cluster
from megatron_hexi.errors import HexiError, user_errors
from megatron_hexi.spelling import first_few
from megatron_hexi.whole_number import whole_number


def find_node(cluster: Cluster, name: str, ranks: int) -> Node:
    """Return the node that a name stands for."""
    numbers = cluster.file.find_nodes(name)
    if numbers is None or len(numbers) != 1:
        names = first_few([node.name for node in cluster.nodes])
        raise HexiError(f"--node {name}: names no node of {cluster.name} ({names}); give one of these")
    node = cluster.nodes[numbers[0]]
    if ranks != len(node.ranks):
        raise HexiError(
            f"--node {name}: {ranks} ranks were started there, {node.name} has {len(node.ranks)} GPUs; "
            f"give --nproc-per-node {len(node.ranks)}, and each node's name once"
        )
    return node


def main() -> None:
    """Check a node's name and number of ranks, which follow the cluster file on the command line.

    Raises:
        SystemExit: with 2 where they are not those of a node.
    """
    with user_errors():
        path, name, ranks = sys.argv[1:] if len(sys.argv) == 4 else ("", "", "")
        count = whole_number(ranks)
        if count is None:
            raise HexiError("give CLUSTER.yaml NODE RANKS, as megatron_hexi.elastic --spare does")
        find_node(read_cluster(path), name, count)


if __name__ == "__main__":
    main()
