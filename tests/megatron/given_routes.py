"""Our entry point, whose routers record, compare or follow the experts of a training's tokens.

Half precision changes which of two nearly equal scores of a token is larger. A token that goes to another
expert changes gradients by far more than rounding does; what is left where all trainings follow the routes
of one is rounding. A layout keeps rows in an order of its own, so a token is looked for among those of its
position by what its router is given.
"""

from __future__ import annotations

import functools
import json
import os
import sys
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

#: The first argument of a run; the second is the path of the recorded routes.
RECORD, COMPARE, FOLLOW = "--record-routes", "--compare-routes", "--follow-routes"
#: The largest distance of a token to its recorded one, as a part of that to any with other experts.
_NEAR = 0.5


@dataclass
class Tokens:
    """The tokens that a router saw.

    Attributes:
        positions: of each in its sequence, [tokens].
        given: what the router was given, [tokens, hidden].
        experts: chosen experts in ascending order, [tokens, chosen].
    """

    positions: Tensor
    given: Tensor
    experts: Tensor

    def nearest(self, others: Tokens) -> Tensor:
        """Return the place of each token among others.

        Raises:
            AssertionError: another token of the position with other experts is about as near.
        """
        apart = torch.cdist(self.given.double(), others.given.double())
        apart.masked_fill_(self.positions[:, None] != others.positions, torch.inf)
        distance, place = apart.min(1)
        unlike = (others.experts[place][:, None] != others.experts).any(2)
        assert bool((distance < _NEAR * apart.masked_fill(~unlike, torch.inf).min(1).values).all())
        return place


class Routes:
    """The routes of a training, recorded by its only rank or compared with recorded ones.

    Args:
        mode: `RECORD`, `COMPARE` or `FOLLOW`.
        file: the file of the recorded routes.
    """

    def __init__(self, mode: str, file: Path) -> None:
        self.mode, self._file = mode, file
        self._seen: dict[int, list[Tokens]] = defaultdict(list)
        self._elsewhere: dict[int, int] = defaultdict(int)
        self._recorded = {} if mode == RECORD else _read(file)

    def experts(self, layer: int, tokens: Tokens) -> Tensor:
        """Return the experts to which tokens go in a layer, [tokens, chosen]."""
        if self.mode == RECORD:
            self._seen[layer].append(tokens)
            return tokens.experts
        recorded = self._recorded[layer]
        experts = recorded.experts[tokens.nearest(recorded)]
        if self.mode == FOLLOW:
            return experts
        self._elsewhere[layer] += int((tokens.experts != experts).any(1).sum())
        return tokens.experts

    def write(self) -> None:
        """Write what was recorded, or how many tokens went elsewhere by layer."""
        if self.mode == RECORD:
            parts = {layer: [vars(one) for one in seen] for layer, seen in self._seen.items()}
            torch.save(parts, self._file)
        else:
            _counts(Path(), int(os.environ["RANK"])).write_text(json.dumps(self._elsewhere))


def _read(file: Path) -> dict[int, Tokens]:
    return {
        layer: Tokens(**{name: torch.cat([part[name] for part in parts]) for name in parts[0]})
        for layer, parts in torch.load(file).items()
    }


def main() -> None:
    """Train, and write the file."""
    from megatron.core.transformer.moe import router

    from megatron_hexi import pretrain_gpt

    routes = Routes(sys.argv[1], Path(sys.argv[2]))
    del sys.argv[1:3]
    forward, route = router.TopKRouter.forward, router.topk_routing_with_score_function
    balance = router.compute_routing_scores_for_aux_loss
    layer, given, experts = 0, torch.empty(0), torch.empty(0)

    @functools.wraps(forward)
    def keep_given(self: Any, rows: Tensor, *args: Any, **kwargs: Any) -> Any:
        nonlocal layer, given
        layer = self.layer_number + (self.config.num_layers if self.is_mtp_layer else 0)
        given = rows.detach()
        return forward(self, rows, *args, **kwargs)

    @functools.wraps(route)
    def topk_routing_with_score_function(logits: Tensor, topk: int, **kwargs: Any) -> Any:
        nonlocal experts
        experts = route(logits, topk, **kwargs)[1].int().topk(topk).indices.sort(1).values
        positions, here = _positions(given)
        tokens = Tokens(positions[here], given.flatten(0, 1)[here], experts[here])
        experts[here] = routes.experts(layer, tokens)
        return route(logits, topk, **kwargs, precomputed_indices=experts)

    @functools.wraps(balance)
    def compute_routing_scores_for_aux_loss(*args: Any, **kwargs: Any) -> Any:
        chosen, scores = balance(*args, **kwargs)
        if routes.mode == FOLLOW:
            counted = chosen.any(1, keepdim=True)
            chosen = torch.zeros_like(chosen).scatter(1, experts, counted.expand_as(experts))
        return chosen, scores

    router.TopKRouter.forward = keep_given
    router.topk_routing_with_score_function = topk_routing_with_score_function
    router.compute_routing_scores_for_aux_loss = compute_routing_scores_for_aux_loss
    pretrain_gpt.main()
    routes.write()


def _positions(given: Tensor) -> tuple[Tensor, Tensor]:
    """Return the position of each row of ``given``, [rows, batch, hidden], and which rows are tokens."""
    from megatron_hexi.megatron.router_losses import padding_rows
    from megatron_hexi.megatron.session import active_session

    rows, batch = given.shape[:2]
    session = active_session()
    if session is None:
        positions, padding = torch.arange(rows), torch.zeros(rows, dtype=torch.bool)
    else:
        from megatron.core import parallel_state

        all_rows = session.shard.positions
        number = parallel_state.get_tensor_model_parallel_rank() if len(all_rows) > rows else 0
        positions, padding = all_rows[number * rows :][:rows], padding_rows(session.shard, rows, given.device)
    return positions.repeat_interleave(batch), ~padding.repeat_interleave(batch)


def elsewhere(folder: Path, ranks: int) -> dict[int, int]:
    """Return how many tokens went to other experts than the recorded ones, by layer."""
    total: dict[int, int] = defaultdict(int)
    for rank in range(ranks):
        for layer, count in json.loads(_counts(folder, rank).read_text()).items():
            total[int(layer)] += count
    return total


def _counts(folder: Path, rank: int) -> Path:
    return folder / f"elsewhere-{rank}.json"
