"""Our entry point with a fault planted in what joins stages that differ: ``--planted NAME`` says which."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from megatron_hexi.megatron.mamba import PlannedMambaExchange
from megatron_hexi.megatron.session import LocalShard, Session
from megatron_hexi.mesh import ExpertDomain, RowMessage
from megatron_hexi.runtime.bucket_buffer import BucketBuffer
from megatron_hexi.runtime.column_exchange import ColumnExchange
from megatron_hexi.runtime.piece_buffers import PieceBuffers, ValueBroadcast
from megatron_hexi.runtime.row_channel import RowChannel
from tests.megatron.planted_losses import RESUME_FAULTS
from tests.megatron.planted_shares import DEALT_FAULTS


def _copies_unscaled() -> None:
    from megatron_hexi.megatron.stages import gradients

    gradients._copies = lambda *_: set()


def _as_copies(word: str) -> Callable[[], None]:
    """Gradients of weights with this in their names are divided as if each rank of a unit had the whole."""

    def plant() -> None:
        from megatron_hexi.megatron.stages import gradients

        original = gradients._copies
        gradients._copies = lambda module, *rest: (
            original(module, *rest) | {weight for name, weight in module.named_parameters() if word in name}
        )

    return plant


def _a_weight_unknown() -> None:
    from megatron_hexi.megatron import unit_weights

    del unit_weights.HOLDINGS["MLP", "linear_fc2.bias"]


def _one_ranks_gradient_infinite() -> None:
    from megatron_hexi.megatron.stages.piece_optimizer import PieceOptimizer

    original = PieceOptimizer._copy_model_grads_to_main_grads

    def copy(self: PieceOptimizer) -> None:
        original(self)
        if self.buffers.rank == 1:
            gradient = self.owned[-1].main.grad
            assert gradient is not None
            gradient.view(-1)[-1] = float("inf")

    PieceOptimizer._copy_model_grads_to_main_grads = copy  # type: ignore[method-assign]


def _a_holder_adds_nothing() -> None:
    original = PieceBuffers._lay_out

    def lay_out(self: PieceBuffers, *args: Any) -> BucketBuffer:
        buffer = original(self, *args)
        if self.rank == 0:
            buffer.scales.append((slice(0, buffer.bucket.size), 0.0))
        return buffer

    PieceBuffers._lay_out = lay_out  # type: ignore[assignment, method-assign]


def _rows_in_another_order() -> None:
    original = RowChannel._outgoing

    def outgoing(self: RowChannel, rows: Tensor, message: RowMessage) -> Tensor:
        packed = original(self, rows, message)
        return packed.view(-1, rows.shape[2]).flip(0).flatten()

    RowChannel._outgoing = outgoing  # type: ignore[method-assign]


def _new_weights_not_waited_for() -> None:
    ValueBroadcast.settle = lambda self, buffers: None  # type: ignore[method-assign]


#: Found by the comparison of losses and norms.
FAULTS: dict[str, Callable[[], None]] = {
    "copies-unscaled": _copies_unscaled,
    "a-holder-adds-nothing": _a_holder_adds_nothing,
    "rows-in-another-order": _rows_in_another_order,
    "new-weights-not-waited-for": _new_weights_not_waited_for,
}

#: Those of which only other comparisons say anything.
OTHER_FAULTS: dict[str, Callable[[], None]] = {
    "sinks-as-copies": _as_copies("softmax_offset"),
    "norm-of-heads-as-a-copy": _as_copies(".out_norm."),
    "gate-as-a-copy": _as_copies("gate_weight"),
    "output-layer-as-a-copy": _as_copies("output_layer"),
    "a-weight-unknown": _a_weight_unknown,
    "one-ranks-gradient-infinite": _one_ranks_gradient_infinite,
}


def _balanced_in_a_domain() -> None:
    from megatron_hexi.megatron.stages import stages_session

    original = stages_session.make_experts_view  # type: ignore[attr-defined]

    def make_experts_view(*args: Any) -> Any:
        view = original(*args)
        return dataclasses.replace(view, micro_batch=view.sequence)

    stages_session.make_experts_view = make_experts_view  # type: ignore[attr-defined, assignment]


def _bias_of_a_stage() -> None:
    from megatron.core.transformer.moe import moe_utils

    from megatron_hexi.megatron.stages.experts import active_experts

    original = moe_utils.get_updated_expert_bias

    def get_updated_expert_bias(*args: Any, tp_dp_cp_group: Any) -> Any:
        view = active_experts()
        assert view is not None
        return original(*args, tp_dp_cp_group=view.micro_batch)

    moe_utils.get_updated_expert_bias = get_updated_expert_bias


def _slot_of_another_expert() -> None:
    original = vars(ExpertDomain)["slots"].fget
    swapped = {0: 1, 1: 0}

    def slots(self: ExpertDomain) -> tuple[int | None, ...]:
        return tuple(None if expert is None else swapped.get(expert, expert) for expert in original(self))

    ExpertDomain.slots = property(slots)  # type: ignore[assignment, method-assign]


def _bias_of_another_layer() -> None:
    """Multi-token prediction counts for the layer that Megatron gives the same number."""
    from megatron_hexi.megatron.stages import routers

    routers._row = lambda router: router.layer_number - 1


#: Of ranks that hold some of the experts.
EXPERT_FAULTS: dict[str, Callable[[], None]] = {
    "balanced-in-a-domain": _balanced_in_a_domain,
    "bias-of-a-stage": _bias_of_a_stage,
    "experts-as-copies": _as_copies(".experts."),
    "slot-of-another-expert": _slot_of_another_expert,
}


def _labels_not_shifted_over_borders() -> None:
    """Each rank shifts the tokens that it holds as if there were no others."""
    from megatron_hexi.megatron import multi_token

    def gathered(tensor: Tensor, session: Session, shard: LocalShard) -> Tensor:
        whole = tensor.new_zeros(*tensor.shape[:-1], session.seq_length)
        whole[..., shard.positions[: shard.tokens]] = tensor[..., : shard.tokens]
        return whole

    multi_token._gathered = gathered


def _embedding_of_the_last_stage_not_summed() -> None:
    """Ranks of a last stage leave out what the prediction of further tokens adds to the embedding."""
    from megatron_hexi.megatron.session import active_session

    original = PieceBuffers._lay_out

    def lay_out(self: PieceBuffers, *args: Any) -> BucketBuffer:
        buffer = original(self, *args)
        session = active_session()
        assert session is not None
        assert session.stages is not None
        place = session.stages.view.place
        if place.is_last and place.depth > 1:
            for slab in buffer.bucket.slabs:
                if slab.key.startswith("embedding."):
                    buffer.scales.append((slice(slab.start, slab.stop), 0.0))
        return buffer

    PieceBuffers._lay_out = lay_out  # type: ignore[assignment, method-assign]


def _counted_in_a_domain() -> None:
    from megatron_hexi.megatron import multi_token

    multi_token._of_the_micro_batch = lambda count, session: count


#: Of experts in the prediction of further tokens.
FURTHER_EXPERT_FAULTS: dict[str, Callable[[], None]] = {
    "bias-of-another-layer": _bias_of_another_layer,
    "balanced-in-a-domain": _balanced_in_a_domain,
}

#: Of the prediction of further tokens.
MULTI_TOKEN_FAULTS: dict[str, Callable[[], None]] = {
    "labels-not-shifted-over-borders": _labels_not_shifted_over_borders,
    "embedding-of-the-last-stage-not-summed": _embedding_of_the_last_stage_not_summed,
    "counted-in-a-domain": _counted_in_a_domain,
}


def _ministages_swapped() -> None:
    """A last stage runs its ministages in the other order."""
    from megatron_hexi.megatron.stages.slices import StageSlices

    original = StageSlices.__init__

    def __init__(self: StageSlices, *args: Any) -> None:
        original(self, *args)
        if self._is_last:
            self._layers.reverse()

    StageSlices.__init__ = __init__  # type: ignore[assignment, method-assign]


def _gradients_of_another_micro_batch() -> None:
    """Give each of two micro-batches whose activations are kept the gradients of the other."""
    from megatron_hexi.megatron.stages import interleaving

    original = interleaving.InterleavedIteration._backward

    def backward(self: Any, step: Any) -> None:
        own, other = (step.chunk, step.micro_batch), (step.chunk, step.micro_batch ^ 1)
        if {own, other} <= self._kept.keys():
            self._kept[own], self._kept[other] = self._kept[other], self._kept[own]
        original(self, step)

    interleaving.InterleavedIteration._backward = backward  # type: ignore[method-assign]


def _sums_before_the_last_micro_batch() -> None:
    def register_grad_ready(self: PieceBuffers, parameter: Any, *_: object) -> None:
        self.is_last_microbatch = True
        original(self, parameter)

    original = PieceBuffers.register_grad_ready
    PieceBuffers.register_grad_ready = register_grad_ready  # type: ignore[method-assign]


#: Of ministages that are interleaved.
INTERLEAVING_FAULTS: dict[str, Callable[[], None]] = {
    "ministages-swapped": _ministages_swapped,
    "gradients-of-another-micro-batch": _gradients_of_another_micro_batch,
    "sums-before-the-last-micro-batch": _sums_before_the_last_micro_batch,
}


def _decay_of_the_first_heads() -> None:
    def get_A_log(self: PlannedMambaExchange) -> Tensor:
        return self.A_log_cp1[: self.nheads_local_tpcp]

    PlannedMambaExchange.get_A_log = get_A_log


def _tokens_in_another_order() -> None:
    """The back half comes before the front half, as in a zigzag, and goes back so."""
    before, after = PlannedMambaExchange.pre_conv_ssm, PlannedMambaExchange.post_conv_ssm

    def pre_conv_ssm(self: PlannedMambaExchange, *args: Any) -> Tensor:
        arrived = before(self, *args)
        return arrived.roll(len(arrived) // 2, 0)

    def post_conv_ssm(self: PlannedMambaExchange, input_: Tensor, *args: Any) -> Tensor:
        return after(self, input_.roll(-(len(input_) // 2), 0), *args)

    PlannedMambaExchange.pre_conv_ssm = pre_conv_ssm  # type: ignore[assignment, method-assign]
    PlannedMambaExchange.post_conv_ssm = post_conv_ssm  # type: ignore[assignment, method-assign]


def _shared_groups_used_once() -> None:
    """Drop the gradient of one of two members that read the same group."""
    original = ColumnExchange._send_columns

    def send_columns(self: ColumnExchange, columns: Tensor, rows: int, width: int) -> Tensor:
        if self.position == len(self.shards) - 1 and self._overlap:
            columns = torch.zeros_like(columns)
        return original(self, columns, rows, width)

    ColumnExchange._send_columns = send_columns  # type: ignore[method-assign]


def _decay_of_the_first_value_heads() -> None:
    from megatron.core.ssm.gated_delta_net import GatedDeltaNet

    original = GatedDeltaNet._compute_g_and_beta

    def compute(self: Any, decays: Tensor, *args: Tensor) -> Any:
        return original(self, self.A_log[: decays.numel()], *args)

    GatedDeltaNet._compute_g_and_beta = compute


def _state_not_passed() -> None:
    """The state is 0 again in the middle of the sequence."""
    from megatron.core.ssm.gated_delta_net import gdn

    original = gdn.chunk_gated_delta_rule

    def scan(*parts: Tensor, g: Tensor, beta: Tensor, **settings: Any) -> tuple[Tensor, None]:
        halves = zip(*(part.chunk(2, 1) for part in (*parts, g, beta)), strict=True)
        outputs = [original(q, k, v, g=g, beta=b, **settings)[0] for q, k, v, g, b in halves]
        return torch.cat(outputs, 1), None

    gdn.chunk_gated_delta_rule = scan


def _halo_one_row_off() -> None:
    """Each rank receives the row before the one that its convolution reads."""
    from megatron_hexi.plan import schedule

    original = vars(schedule)["halo"]

    def halo(*args: Any) -> Any:
        found = original(*args)
        sends = tuple(tuple(max(0, row - 1) for row in rows) for rows in found.sends)
        return dataclasses.replace(found, sends=sends)

    vars(schedule)["halo"] = halo


#: Of short convolutions.
CONVOLUTION_FAULTS: dict[str, Callable[[], None]] = {"halo-one-row-off": _halo_one_row_off}
#: Of Mamba layers.
MAMBA_FAULTS: dict[str, Callable[[], None]] = {
    "decay-of-the-first-heads": _decay_of_the_first_heads,
    "tokens-in-another-order": _tokens_in_another_order,
    "shared-groups-used-once": _shared_groups_used_once,
}
#: Of delta nets.
DELTA_FAULTS: dict[str, Callable[[], None]] = {
    "decay-of-the-first-value-heads": _decay_of_the_first_value_heads,
    "state-not-passed": _state_not_passed,
    "shared-groups-used-once": _shared_groups_used_once,
}


def main() -> None:
    """Train with the fault."""
    from megatron_hexi import pretrain_gpt

    place = sys.argv.index("--planted")
    faults = {
        **FAULTS,
        **OTHER_FAULTS,
        **EXPERT_FAULTS,
        **MULTI_TOKEN_FAULTS,
        **INTERLEAVING_FAULTS,
        **FURTHER_EXPERT_FAULTS,
        **MAMBA_FAULTS,
        **CONVOLUTION_FAULTS,
        **DEALT_FAULTS,
        **DELTA_FAULTS,
        **RESUME_FAULTS,
    }
    faults[sys.argv[place + 1]]()
    del sys.argv[place : place + 2]
    pretrain_gpt.main()
