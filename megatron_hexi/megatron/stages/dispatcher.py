"""Sends tokens to unevenly divided experts by Megatron's own all-to-all, over slots, some of them empty.

Each rank of an expert domain has as many slots as the rank with the most experts. Megatron is told that slots
are the experts: so all ranks have equally many, and an empty one gets no tokens.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor

from megatron_hexi.megatron.session import active_session
from megatron_hexi.megatron.stages.experts import active_experts
from megatron_hexi.patching import Patch


def _over_slots(original: type) -> type:
    """Return a class that makes Megatron's dispatcher, or the one below if the plan places experts."""

    class MoEAlltoAllTokenDispatcher(original):
        __doc__ = original.__doc__

        def __new__(cls, *args: Any, **kwargs: Any) -> Any:
            uneven = cls is MoEAlltoAllTokenDispatcher and active_experts() is not None
            return super().__new__(SlotDispatcher if uneven else cls)

    class SlotDispatcher(MoEAlltoAllTokenDispatcher):
        """Megatron's dispatcher of the tokens to slots.

        A slice of an expert is a slot of its own: a token that goes to the expert goes to every slice, and
        the results are added up, as they are over the token's top k.
        """

        def __init__(
            self,
            num_local_experts: int,
            local_expert_indices: list[int],
            config: Any,
            pg_collection: Any = None,
        ) -> None:
            view, session = active_experts(), active_session()
            assert view is not None
            assert session is not None
            assert session.stages is not None
            device, domain = session.shard.positions.device, view.domain
            self.held = view.held
            self.sends_copies = domain.has_slices
            #: The expert of each slot, and whether it has one, [ranks of the domain * slots of each].
            self.expert_of_slot = torch.tensor([expert or 0 for expert in domain.slots], device=device)
            self.is_used = torch.tensor([expert is not None for expert in domain.slots], device=device)
            config, groups = copy.copy(config), copy.copy(pg_collection)
            config.num_moe_experts = len(domain.slots)
            groups.ep = groups.tp_ep = view.dispatch
            groups.expt_tp = session.stages.groups.alone
            first = domain.ranks.index(view.held.rank) * domain.width
            super().__init__(domain.width, list(range(first, first + domain.width)), config, groups)

        def dispatch_preprocess(
            self, hidden_states: Tensor, routing_map: Tensor, probs: Tensor
        ) -> tuple[Tensor, Tensor]:
            """Call Megatron's method with map and probabilities, [rows, experts], spread over slots."""
            routing_map = routing_map[:, self.expert_of_slot] & self.is_used
            result: tuple[Tensor, Tensor] = super().dispatch_preprocess(
                hidden_states, routing_map, probs[:, self.expert_of_slot]
            )
            return result

        def preprocess(self, routing_map: Tensor) -> Tensor:
            """Return the rows of each slot; with slices, a token has more of them than its top k."""
            per_slot: Tensor = super().preprocess(routing_map)
            if self.sends_copies:
                self.num_out_tokens = routing_map.sum()
                self._maybe_update_cuda_sync_point("before_permutation_1")
            return per_slot

        def dispatch_postprocess(self, tokens: Tensor, probs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            """Return Megatron's result without this rank's empty slots, which are its last."""
            tokens, per_slot, probs = super().dispatch_postprocess(tokens, probs)
            return tokens, per_slot[: self.held.count], probs

    return MoEAlltoAllTokenDispatcher


DISPATCHER_PATCH = Patch(
    target="megatron.core.transformer.moe.token_dispatcher:MoEAlltoAllTokenDispatcher",
    why="tokens travel to ranks with unequal numbers of experts",
    build=_over_slots,
    only=">=0.19",  # before, plans with stages refuse experts
)
