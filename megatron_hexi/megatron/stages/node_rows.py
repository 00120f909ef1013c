"""Sends each row once to every node that holds some of its experts, and sums the results of the nodes.

Megatron's all-to-all sends up to eight copies of a top-8 token to another node. Here the row travels once,
with the probabilities of all experts of that node, to one rank there (`ExpertDomain.gateway`), from which
Megatron's dispatcher sends it on inside the node; what the node's experts return is summed there before it
travels back. Shape letters: n rows of this rank, m rows that it takes as a gateway, h hidden size, E experts.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_hexi.mesh import ExpertDomain

#: Stands for the probability of an expert to which a row is not routed.
_NOT_ROUTED = -1.0


class _Route(NamedTuple):
    """Rows of one exchange.

    Args:
        rows: the rows that are sent, in the order of the gateways; a row is sent once to each of its nodes.
        sent: number of rows for each rank of the expert domain.
        received: number of rows from each rank of the expert domain.
        total: number of this rank's own rows (n).
    """

    rows: Tensor
    sent: list[int]
    received: list[int]
    total: int


class NodeRows:
    """The rows between this rank and the gateways of all nodes of its expert domain, its own among them.

    Args:
        domain: an expert domain with nodes.
        rank: this rank.
        group: the process group of the expert domain.
        device: where the rows are.
    """

    def __init__(
        self, domain: ExpertDomain, rank: int, group: dist.ProcessGroup, device: torch.device
    ) -> None:
        self._group, self._size = group, len(domain.ranks)
        by_gateway = {domain.ranks.index(domain.gateway(rank, node)): node for node in domain.nodes}
        #: Experts of each node, by the place of its gateway in the group, ascending.
        self._experts = {
            place: torch.tensor(domain.inside(by_gateway[place]).experts, dtype=torch.long, device=device)
            for place in sorted(by_gateway)
        }
        self._own = self._experts[domain.ranks.index(rank)]
        self._route: _Route | None = None

    def there(self, rows: Tensor, routing_map: Tensor, probs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Send rows to the gateways of the nodes that hold some of their experts.

        Args:
            rows: this rank's rows, [n, h].
            routing_map: the experts of each row, [n, E].
            probs: their probabilities, none negative, [n, E].

        Returns:
            The rows that this rank takes as a gateway, [m, h], with their map and probabilities, [m, E], of
            which only those of this node's experts are set.
        """
        from megatron.core.tensor_parallel import all_to_all

        with torch.no_grad():
            chosen = [
                routing_map[:, experts].any(dim=1).nonzero()[:, 0] for experts in self._experts.values()
            ]
            counts = torch.zeros(self._size, dtype=torch.long, device=rows.device)
            counts[list(self._experts)] = counts.new_tensor([len(one) for one in chosen])
            theirs = torch.empty_like(counts)
            dist.all_to_all_single(theirs, counts, group=self._group)
            route = _Route(torch.cat(chosen), counts.tolist(), theirs.tolist(), len(rows))
        self._route = route
        stated = torch.where(routing_map, probs, _NOT_ROUTED)
        flat = [
            stated[one][:, experts].ravel()
            for one, experts in zip(chosen, self._experts.values(), strict=True)
        ]
        columns = [len(self._experts[place]) if place in self._experts else 0 for place in range(self._size)]
        rows = all_to_all(self._group, rows.index_select(0, route.rows), route.received, route.sent)
        sent = all_to_all(
            self._group,
            torch.cat(flat),
            [count * len(self._own) for count in route.received],
            [count * width for count, width in zip(route.sent, columns, strict=True)],
        ).view(len(rows), len(self._own))
        routed = sent.detach() >= 0
        probs = sent.new_zeros(len(rows), probs.shape[1]).index_copy(1, self._own, sent * routed)
        routing_map = torch.zeros_like(probs, dtype=torch.bool).index_copy(1, self._own, routed)
        return rows, routing_map, probs

    def back(self, rows: Tensor) -> Tensor:
        """Return this rank's rows, [n, h], each the sum in fp32 of what its nodes computed.

        Args:
            rows: results of the rows that this rank took as a gateway, [m, h].
        """
        from megatron.core.tensor_parallel import all_to_all

        assert self._route is not None, "rows travel there first"
        route = self._route
        returned = all_to_all(self._group, rows, route.sent, route.received)
        together = widened(returned).new_zeros(route.total, rows.shape[1])
        return together.index_add(0, route.rows, widened(returned)).to(rows.dtype)


def widened(rows: Tensor) -> Tensor:
    """Return the rows in fp32, in which results are summed; rows in fp64 as they are."""
    return rows.to(torch.promote_types(rows.dtype, torch.float32))
