"""Ministages: all micro-batches pass one part of every stage before the next, after Zorse (arXiv 2507.10392).

Forward, the stages take turns: stage 0 runs its first ministage on each micro-batch, then stage 1, and so on;
the output of the last stage's first ministage enters the second ministage of stage 0. Backward is the same in
reverse. Forward passes keep only the rows that enter a ministage: its backward pass recomputes it from these.
In the model's last ministage the backward pass of each micro-batch follows at once, without recomputation.

So a rank has the activations of one ministage and one micro-batch at a time. Weights are gathered for each
ministage where other units can send them again (`runtime.passing_buckets`). The optimizer's step comes after
all ministages, since clipping needs the norm of all gradients.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from megatron_hexi.megatron.session import active_session
from megatron_hexi.megatron.stages.interleaving import InterleavedIteration
from megatron_hexi.megatron.stages.ministage_iteration import MinistageIteration, ReplayedBatches
from megatron_hexi.megatron.stages.slices import StageSlices
from megatron_hexi.mesh import ministage_passes
from megatron_hexi.runtime.row_channel import RowStore, Where


class _Iteration(MinistageIteration):
    """One iteration of one rank, one ministage after the other."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        #: Micro-batches that this rank takes.
        dealt = self._place.micro_batches
        self._own = tuple(range(self._micro_batches)) if dealt is None else dealt
        #: The rows that entered each ministage, until its backward pass.
        self._rows: RowStore = self._model.waiting_rows
        self._is_only_stage = self._place.depth == 1

    def run(self, forward_only: bool) -> None:
        """Run all micro-batches through all ministages; then this rank's gradients are in its buckets."""
        self._keeps = not forward_only
        runs = {"forward": self._forward, "backward": self._backward, "turn": self._turn}
        count = self._slices.count
        pieces = self._model.pieces
        pieces.release()
        for current in ministage_passes(count, self._slices.gives_loss(count - 1), forward_only):
            # A ministage's rows of a micro-batch arrive after those of the ministage before were received by
            # all stages: so at most one message for each micro-batch is in flight.
            own = len(self._own)
            self._channels.begin(own, own, most_sent=own)
            with pieces.ministage_pass(current), self._slices.only(current.ministage):
                for micro_batch in self._own:
                    self._channels.set_micro_batch(micro_batch)
                    if self._batches is not None:
                        self._batches.place = micro_batch
                    runs[current.way](current.ministage, micro_batch)
        pieces.release()

    def _forward(self, number: int, micro_batch: int) -> None:
        """Run a ministage's forward pass on a micro-batch, and keep its input rows for the backward pass."""
        rows = self._enter(number, micro_batch)
        with torch.no_grad():
            output = self._step(self._slices, number, micro_batch, rows)
        if rows is not None and self._keeps and not self._is_only_stage:
            # Not earlier: with documents, rows arrive when the model is called.
            self._rows.put((number, micro_batch), rows)
        if not self._slices.gives_loss(number):
            self._send_rows(output, number, micro_batch)

    def _turn(self, number: int, micro_batch: int) -> None:
        """Run the forward and backward pass of a ministage with the loss."""
        self._pass_back(number, micro_batch, self._enter(number, micro_batch))

    def _backward(self, number: int, micro_batch: int) -> None:
        """Recompute a ministage, and run its backward pass."""
        rows = None
        if not self._slices.takes_tokens(number):
            rows = self._rows.pop((number, micro_batch), self._following(number, micro_batch))
        self._pass_back(number, micro_batch, rows)

    def _pass_back(self, number: int, micro_batch: int, rows: Tensor | None) -> None:
        from megatron.core.pipeline_parallel.schedules import backward_step, deallocate_output_tensor

        config = self._model.config
        pieces = self._model.pieces
        pieces.is_last_microbatch = micro_batch == self._own[-1]
        pieces.unfinished = self._slices.used_before(number)
        if rows is not None and not rows.requires_grad:  # stored ones
            rows = rows.detach().requires_grad_()
        output = self._step(self._slices, number, micro_batch, rows)
        gradient = None
        if self._slices.gives_loss(number):
            self._channels.begin_backward()
        else:
            gradient = self._receive_gradients(number, micro_batch)
            deallocate_output_tensor(output, config.deallocate_pipeline_outputs)
        gradient = backward_step(rows, output, gradient, config)
        if rows is not None:
            self._send_gradients(gradient, number, micro_batch)

    def _following(self, number: int, micro_batch: int) -> Where | None:
        """Return the key of the rows that are needed after those of a micro-batch."""
        following = self._own[self._own.index(micro_batch) + 1 :]
        return (number, following[0]) if following else None

    # Over a border; where the replica has one stage, rows that leave a ministage are stored for the next one,
    # and gradients of the rows that entered it are stored in their place for the one before.

    def _enter(self, number: int, micro_batch: int) -> Tensor | None:
        """Return the rows that enter a ministage."""
        if self._slices.takes_tokens(number):
            return None
        where = number, micro_batch
        if self._is_only_stage:
            keeps = self._keeps and not self._slices.gives_loss(number)
            take = self._rows.get if keeps else self._rows.pop
            return take(where, self._following(*where))
        rows = self._channels.receive_activations(self._shape, self._model.config.pipeline_dtype)
        assert rows is not None, "a stage is before this one, or takes turns with it"
        return rows  # with documents these arrive when the model is called

    def _send_rows(self, rows: Tensor, number: int, micro_batch: int) -> None:
        if self._is_only_stage:
            self._rows.put((number + 1, micro_batch), rows)
        else:
            self._channels.send_activations(rows)

    def _receive_gradients(self, number: int, micro_batch: int) -> Tensor:
        if self._is_only_stage:
            following = self._following(number + 1, micro_batch)
            return self._rows.pop((number + 1, micro_batch), following)
        rows = self._channels.receive_gradients(self._shape, self._model.config.pipeline_dtype)
        assert rows is not None, "a stage is behind this one, or takes turns with it"
        return rows

    def _send_gradients(self, rows: Tensor, number: int, micro_batch: int) -> None:
        if self._is_only_stage:
            self._rows.put((number, micro_batch), rows)
        else:
            self._channels.send_gradients(rows)


def forward_backward_by_ministages(
    *,
    forward_step_func: Callable[..., Any],
    data_iterator: Any,
    model: Any,
    num_microbatches: int,
    seq_length: int,
    micro_batch_size: int,
    decoder_seq_length: int | None = None,
    forward_only: bool = False,
    collect_non_loss_data: bool = False,
    first_val_step: bool | None = None,
    force_all_reduce: bool | None = False,
    p2p_communicator: Any = None,
    pg_collection: Any = None,
    **others: Any,
) -> list[Any]:
    """Run an iteration in ministages, with the arguments and the result of Megatron's schedules.

    `forward_step_func` is called once a ministage and micro-batch, and again before its backward pass if
    ministages take turns. The communicator and the groups are the plan's, whatever a loop gives. Arguments in
    `others` must be ``None``.

    Returns:
        The loss function's result for each micro-batch; empty except on a last stage.
    """
    from megatron.core import parallel_state
    from megatron.core.pipeline_parallel import schedules

    unknown = [name for name, value in others.items() if value is not None]
    assert not unknown, f"{unknown}: not known with ministages"
    session = active_session()
    assert session is not None
    (model,) = model if isinstance(model, list) else [model]
    (source,) = data_iterator if isinstance(data_iterator, list) else [data_iterator]
    batches = None if source is None else ReplayedBatches(source)
    config = model.config
    groups = parallel_state.get_tensor_model_parallel_group(), parallel_state.get_context_parallel_group()
    (shape,) = schedules.get_tensor_shapes(
        seq_length=seq_length,
        micro_batch_size=micro_batch_size,
        decoder_seq_length=decoder_seq_length,
        config=config,
        tp_group=groups[0],
        cp_group=groups[1],
    )
    store: list[Any] = []
    tokens = torch.zeros([], dtype=torch.int, device=session.shard.positions.device)

    def step(slices: StageSlices, number: int, micro_batch: int, rows: Tensor | None) -> Tensor:
        nonlocal tokens
        output, counted = schedules.forward_step(
            forward_step_func,
            batches,
            model,
            num_microbatches,
            rows,
            store,
            config,
            cp_group_size=groups[1].size(),
            collect_non_loss_data=collect_non_loss_data,
            current_microbatch=micro_batch,
            is_last_stage=slices.gives_loss(number),
        )
        tokens += counted
        # The last stage's wrapper returns fp32, which is right for losses only.
        return output if slices.gives_loss(number) else output.to(config.pipeline_dtype)

    # Before the model is made one ministage: it remembers the modules that it finds when first asked.
    if schedules.check_first_val_step(first_val_step, forward_only, True):
        model.set_is_first_microbatch()
    if config.timers is not None:
        config.timers("forward-backward", log_level=1).start(barrier=config.barrier_with_L1_time)
    assert session.stages is not None
    in_turn = session.stages.view.place.in_turn
    iteration = _Iteration if in_turn else InterleavedIteration
    iteration(session, model, step, num_microbatches, shape, batches).run(forward_only)
    if batches is not None:
        batches.read(num_microbatches)
    if config.finalize_model_grads_func is not None and not forward_only:
        config.finalize_model_grads_func([model], tokens, force_all_reduce=force_all_reduce)
    if config.timers is not None:
        config.timers("forward-backward").stop()
    return store
