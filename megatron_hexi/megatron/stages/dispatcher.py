"""Sends tokens to unevenly divided experts by Megatron's own all-to-all, over slots, some of them empty.

Each rank of an expert domain has as many slots as the rank with the most experts. Megatron is told that slots
are the experts: so all ranks have equally many, and an empty one gets no tokens. Where the plan names the
nodes of a stage, that is so inside each node, and rows travel between nodes before it (`node_rows`).
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor

from megatron_hexi.megatron.session import active_session
from megatron_hexi.megatron.stages.experts import active_experts
from megatron_hexi.megatron.stages.node_rows import NodeRows, widened
from megatron_hexi.patching import Patch


def _over_slots(original: type) -> type:
    """Return a class that makes Megatron's dispatcher, or the one below if the plan places experts."""

    class MoEAlltoAllTokenDispatcher(original):
        __doc__ = original.__doc__

        def __new__(cls, *args: Any, **kwargs: Any) -> Any:
            view = active_experts()
            if cls is MoEAlltoAllTokenDispatcher and view is not None:
                cls = NodeDispatcher if view.domain.nodes else SlotDispatcher
            return super().__new__(cls)

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
            device, domain = session.shard.positions.device, view.inside
            self.held = view.held
            #: Whether a row may have more or fewer slots than its top k.
            self.sends_copies = domain.has_slices or domain is not view.domain
            #: The expert of each slot, and whether it has one, [ranks of the domain * slots of each].
            self.expert_of_slot = torch.tensor([expert or 0 for expert in domain.slots], device=device)
            self.is_used = torch.tensor([expert is not None for expert in domain.slots], device=device)
            config, groups = copy.copy(config), copy.copy(pg_collection)
            config.num_moe_experts = len(domain.slots)
            groups.ep = groups.tp_ep = view.dispatch_inside
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
            """Return the number of rows of each of this rank's slots."""
            per_slot: Tensor = super().preprocess(routing_map)
            if self.sends_copies:
                self.num_out_tokens = routing_map.sum()
                self._maybe_update_cuda_sync_point("before_permutation_1")
            return per_slot

        def dispatch_postprocess(self, tokens: Tensor, probs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            """Return Megatron's result without this rank's empty slots, which are its last."""
            tokens, per_slot, probs = super().dispatch_postprocess(tokens, probs)
            return tokens, per_slot[: self.held.count], probs

    class NodeDispatcher(SlotDispatcher):
        """A dispatcher that sends a row once to each node with experts of it, and to their slots there."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            view = active_experts()
            assert view is not None
            self.between_nodes = NodeRows(view.domain, view.held.rank, view.dispatch, self.is_used.device)

        def dispatch_preprocess(
            self, hidden_states: Tensor, routing_map: Tensor, probs: Tensor
        ) -> tuple[Tensor, Tensor]:
            """Send rows between nodes, and call Megatron's method with those that arrive."""
            self.shape_before = hidden_states.shape
            rows = hidden_states.view(-1, hidden_states.shape[-1])
            return super().dispatch_preprocess(*self.between_nodes.there(rows, routing_map, probs))

        def combine_postprocess(self, tokens: Tensor) -> Tensor:
            """Sum what a row's experts in this node return, and return the sums of all nodes."""
            summed = super().combine_postprocess(widened(tokens)).to(tokens.dtype)
            return self.between_nodes.back(summed).view(self.shape_before)

    return MoEAlltoAllTokenDispatcher


DISPATCHER_PATCH = Patch(
    target="megatron.core.transformer.moe.token_dispatcher:MoEAlltoAllTokenDispatcher",
    why="tokens travel to ranks with unequal numbers of experts",
    build=_over_slots,
    only=">=0.19",  # before, plans with stages refuse experts
)
