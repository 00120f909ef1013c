"""Our entry point, which also keeps how each token was routed, in a file of each rank in its folder."""

from __future__ import annotations

import functools
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Routed:
    """The rows that a router saw in one micro-batch.

    Args:
        iteration: from 0 on.
        layer: number of the layer; layers of multi-token prediction follow the others.
        use: "balance": for the balancing losses, by the scores alone; "dispatch": with the experts' biases.
        scores: by which the router chose, [rows, experts].
        chosen: whether each expert is one of the row's, [rows, experts].
    """

    iteration: int
    layer: int
    use: str
    scores: Tensor
    chosen: Tensor


def main() -> None:
    """Train, and write the file."""
    from megatron.core.transformer.moe import router
    from megatron.training import get_args

    from megatron_hexi import pretrain_gpt

    kept: list[Routed] = []
    route, balance = router.TopKRouter.routing, router.compute_routing_scores_for_aux_loss
    layer = 0

    def keep(use: str, scores: Tensor, chosen: Tensor) -> None:
        kept.append(Routed(get_args().curr_iteration, layer, use, scores.detach(), chosen.detach()))

    @functools.wraps(route)
    def routing(self: Any, logits: Tensor, **kwargs: Any) -> Any:
        nonlocal layer
        layer = self.layer_number + (self.config.num_layers if self.is_mtp_layer else 0)
        bias = self.expert_bias.clone()
        found = route(self, logits, **kwargs)
        if torch.is_grad_enabled():
            keep("dispatch", torch.sigmoid(logits.float()).view(-1, logits.shape[-1]) + bias, found[1])
        return found

    @functools.wraps(balance)
    def compute_routing_scores_for_aux_loss(*args: Any, **kwargs: Any) -> Any:
        chosen, scores = balance(*args, **kwargs)
        keep("balance", scores, chosen)
        return chosen, scores

    router.TopKRouter.routing = routing
    router.compute_routing_scores_for_aux_loss = compute_routing_scores_for_aux_loss
    try:
        pretrain_gpt.main()
    finally:
        torch.save([vars(one) for one in kept], _file(Path(), int(os.environ["RANK"])))


def routed(folder: Path, ranks: int) -> dict[tuple[int, int, str], tuple[Tensor, Tensor]]:
    """The scores and choices of all rows, [rows, experts], by the iteration, the layer and the use."""
    kept: dict[tuple[int, int, str], list[Routed]] = {}
    for rank in range(ranks):
        for one in torch.load(_file(folder, rank)):
            kept.setdefault((one["iteration"], one["layer"], one["use"]), []).append(Routed(**one))
    return {
        key: (torch.cat([one.scores for one in parts]), torch.cat([one.chosen for one in parts]))
        for key, parts in kept.items()
    }


def _file(folder: Path, rank: int) -> Path:
    return folder / f"routed-{rank}.pt"
