"""Measurement of how unevenly tokens are routed to experts, for the cost model's `Job.expert_imbalance`.

Each router's choices are counted where it makes them, on the device. Ranks add up their counts when Megatron
logs, in one collective for all layers and iterations since.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_hexi.megatron.session import active_session
from megatron_hexi.patching import patched


class ExpertLoads:
    """Counts of the rows that this rank's routers sent to each expert.

    Attributes:
        latest: the imbalance that `take` returned in this iteration; ``None``: Megatron does not log it.
    """

    def __init__(self) -> None:
        self.latest: float | None = None
        self._present: dict[int, Tensor] = {}
        self._ended: list[dict[int, Tensor]] = []

    def count(self, layer: int, routing_map: Tensor) -> None:
        """Add the rows of a micro-batch.

        Args:
            layer: number of the layer in the model, from 1.
            routing_map: whether each row goes to each expert, [rows, experts].
        """
        rows = routing_map.sum(dim=0)
        self._present[layer] = self._present[layer] + rows if layer in self._present else rows

    def end_iteration(self) -> None:
        """Keep the counts of an iteration until `take` is called, and reset `latest`."""
        self.latest = None
        self._ended.append(self._present)
        self._present = {}

    def take(self, args: Namespace, device: torch.device | str) -> float | None:
        """Return the imbalance of the iterations since the last call; a collective of all ranks.

        Returns:
            The `load_variation` of all ranks' rows; ``None`` where the model has no experts.
        """
        ended, self._ended = self._ended, []
        if not args.num_experts or not ended:
            return None
        table = torch.zeros(len(ended), args.num_layers, args.num_experts, dtype=torch.float64, device=device)
        for counts, of_iteration in zip(ended, table, strict=True):
            for layer, rows in counts.items():
                of_iteration[layer - 1] = rows
        dist.all_reduce(table)
        self.latest = load_variation(table)
        return self.latest


def load_variation(table: Tensor) -> float | None:
    """Return the variation of experts' loads, a mean over iterations and layers.

    It is the standard deviation over the mean of an iteration's rows of an expert: 0 if all rows are equal.

    Args:
        table: rows of each expert, [iterations, layers, experts]; of layers without experts, zeros.

    Returns:
        The variation; ``None`` if no rows were routed.
    """
    rows = table.flatten(0, 1)
    rows = rows[rows.sum(dim=1) > 0]
    if not len(rows):
        return None
    return float((rows.std(dim=1, correction=0) / rows.mean(dim=1)).mean())


#: The counts of this process.
LOADS = ExpertLoads()


@patched(
    "megatron.core.transformer.moe.router:TopKRouter.routing",
    why="counts the rows of each expert, for the measured imbalance",
    parameters=("self", "logits", "padding_mask"),
)
def _counted(
    original: Callable[..., tuple[Tensor, Tensor]], self: Any, *args: Any, **kwargs: Any
) -> tuple[Tensor, Tensor]:
    found = original(self, *args, **kwargs)
    # Passes without gradients are evaluation, or the first pass of recomputed layers. Routers of
    # multi-token prediction have other layers' numbers.
    counts = active_session() is not None and torch.is_grad_enabled()
    if counts and not getattr(self, "is_mtp_layer", False):
        LOADS.count(self.layer_number, found[1])
    return found


EXPERT_LOAD_PATCHES = (_counted,)
