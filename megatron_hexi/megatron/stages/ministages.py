"""Ministages: all micro-batches pass one part of every stage before the next, after Zorse (arXiv 2507.10392).

Forward, the stages take turns: stage 0 runs its first ministage on each micro-batch, stage 1 its first, and
so on; what leaves the last stage's first ministage enters the second of stage 0. Backward is the same in
reverse. Forward passes keep nothing but the rows that enter a ministage: its backward pass runs it again from
these. In the last ministage of the model each micro-batch turns round at once, so that one runs once.

So a rank has the activations of one ministage and one micro-batch at a time. Weights come a ministage at a
time where other units can send them again (`runtime.passing_buckets`). The optimizer's step comes after all
ministages, since clipping needs the norm of all gradients.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from megatron_hexi.megatron.session import Session, active_session
from megatron_hexi.megatron.stages.slices import StageSlices
from megatron_hexi.mesh import ministage_passes
from megatron_hexi.runtime.row_store import RowStore, Where


class _Replayed:
    """The batches of an iteration: each is read once, and given to all ministages.

    Args:
        source: Megatron's iterator.
    """

    def __init__(self, source: Any) -> None:
        self._source = source
        self._read: list[Any] = []
        #: The number of the micro-batch that is given next.
        self.place = 0

    def read(self, count: int) -> None:
        """Have so many read, whoever takes them."""
        while len(self._read) < count:
            self._read.append(next(self._source))

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        self.read(self.place + 1)
        return copy.copy(self._read[self.place])


class _Iteration:
    """One iteration of one rank.

    Args:
        session: what this rank trains by.
        model: its only model chunk.
        step: runs the model on a micro-batch: of a ministage's number, the micro-batch's and its rows.
        micro_batches: how many the replica takes.
        shape: of the rows between ministages, [L, b, hidden].
        batches: rewound before each pass.
    """

    def __init__(
        self,
        session: Session,
        model: Any,
        step: Callable[[StageSlices, int, int, Tensor | None], Tensor],
        micro_batches: int,
        shape: Any,
        batches: _Replayed | None,
    ) -> None:
        assert session.stages is not None
        self._stages = session.stages
        place = self._stages.view.place
        self._slices: StageSlices = model.slices
        self._model, self._step, self._shape, self._batches = model, step, shape, batches
        self._all = micro_batches
        #: Those that this rank takes.
        self._own = tuple(range(micro_batches)) if place.micro_batches is None else place.micro_batches
        #: The rows that entered each ministage, until its backward pass.
        self._rows: RowStore = model.waiting_rows
        self._hands_to_itself = place.depth == 1

    def run(self, forward_only: bool) -> None:
        """All micro-batches through all ministages; the gradients of this rank are in its buckets then."""
        self._keeps = not forward_only
        runs = {"forward": self._forward, "backward": self._backward, "turn": self._turn}
        count = self._slices.count
        pieces = self._model.pieces
        pieces.release()
        for sweep in ministage_passes(count, self._slices.gives_loss(count - 1), forward_only):
            self._stages.channels.begin(len(self._own), forward_only, is_sweep=True)
            with pieces.ministage_pass(sweep), self._slices.only(sweep.ministage):
                for micro_batch in self._own:
                    self._stages.channels.turn_to(micro_batch)
                    if self._batches is not None:
                        self._batches.place = micro_batch
                    runs[sweep.way](sweep.ministage, micro_batch)
        if self._batches is not None:
            self._batches.read(self._all)
        pieces.release()

    def _forward(self, number: int, micro_batch: int) -> None:
        """Run, and keep the rows that entered."""
        rows = self._enter(number, micro_batch)
        with torch.no_grad():
            output = self._step(self._slices, number, micro_batch, rows)
        if rows is not None and self._keeps and not self._hands_to_itself:
            # Not before: with documents rows come when the model is called.
            self._rows.put((number, micro_batch), rows)
        if not self._slices.gives_loss(number):
            self._send_rows(output, number, micro_batch)

    def _turn(self, number: int, micro_batch: int) -> None:
        """Run, and turn round at the loss."""
        self._pass_back(number, micro_batch, self._enter(number, micro_batch))

    def _backward(self, number: int, micro_batch: int) -> None:
        """Run again, and take the gradients through."""
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
        rows = None if rows is None else rows.detach().requires_grad_()
        output = self._step(self._slices, number, micro_batch, rows)
        gradient = None
        if self._slices.gives_loss(number):
            self._stages.channels.begin_backward()
        else:
            gradient = self._receive_gradients(number, micro_batch)
            deallocate_output_tensor(output, config.deallocate_pipeline_outputs)
        gradient = backward_step(rows, output, gradient, config)
        if rows is not None:
            self._send_gradients(gradient, number, micro_batch)

    def _following(self, number: int, micro_batch: int) -> Where | None:
        """The rows that are asked for after those of a micro-batch."""
        following = self._own[self._own.index(micro_batch) + 1 :]
        return (number, following[0]) if following else None

    # Over a border, or by hand where the replica has one stage: what leaves a ministage waits there for the
    # next one, and the gradients of what entered one, in its place, for the one before.

    def _enter(self, number: int, micro_batch: int) -> Tensor | None:
        """The rows that enter."""
        if self._slices.takes_tokens(number):
            return None
        where = number, micro_batch
        if self._hands_to_itself:
            keeps = self._keeps and not self._slices.gives_loss(number)
            take = self._rows.get if keeps else self._rows.pop
            return take(where, self._following(*where))
        rows = self._stages.channels.receive_activations(self._shape, self._model.config.pipeline_dtype)
        assert rows is not None, "a stage is before this one, or takes turns with it"
        return rows.detach()

    def _send_rows(self, rows: Tensor, number: int, micro_batch: int) -> None:
        if self._hands_to_itself:
            self._rows.put((number + 1, micro_batch), rows)
        else:
            self._stages.channels.send_activations(rows)

    def _receive_gradients(self, number: int, micro_batch: int) -> Tensor:
        if self._hands_to_itself:
            following = self._following(number + 1, micro_batch)
            return self._rows.pop((number + 1, micro_batch), following)
        rows = self._stages.channels.receive_gradients(self._shape, self._model.config.pipeline_dtype)
        assert rows is not None, "a stage is behind this one, or takes turns with it"
        return rows

    def _send_gradients(self, rows: Tensor, number: int, micro_batch: int) -> None:
        if self._hands_to_itself:
            self._rows.put((number, micro_batch), rows)
        else:
            self._stages.channels.send_gradients(rows)


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
    **others: Any,
) -> list[Any]:
    """Stands for Megatron's schedules, with their arguments and their result, where stages have ministages.

    Args:
        forward_step_func: the script's; called once a ministage and micro-batch in each direction.
        data_iterator: of micro-batches, alone or in a list.
        model: the only model chunk, alone or in a list.
        num_microbatches: that this replica takes.
        seq_length: rows of this rank times its context-parallel size.
        micro_batch_size: samples of this rank.
        decoder_seq_length: as `seq_length`.
        forward_only: whether it is an evaluation.
        collect_non_loss_data: handed on.
        first_val_step: handed on.
        force_all_reduce: handed on.
        others: what Megatron's schedules take besides; nothing else is carried out.

    Returns:
        What the loss function says of each micro-batch; empty but on a last stage.
    """
    from megatron.core import parallel_state
    from megatron.core.pipeline_parallel import schedules

    given = [name for name, value in others.items() if value is not None]
    assert not given, f"{given}: not known with ministages"
    session = active_session()
    assert session is not None
    (model,) = model if isinstance(model, list) else [model]
    (source,) = data_iterator if isinstance(data_iterator, list) else [data_iterator]
    batches = None if source is None else _Replayed(source)
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
        is_first = schedules.check_first_val_step(first_val_step, forward_only, micro_batch == 0)
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
            is_first_microbatch=is_first,
            current_microbatch=micro_batch,
            is_last_stage=slices.gives_loss(number),
        )
        tokens += counted
        # The last stage's wrapper gives fp32, which is right for losses only.
        return output if slices.gives_loss(number) else output.to(config.pipeline_dtype)

    if config.timers is not None:
        config.timers("forward-backward", log_level=1).start(barrier=config.barrier_with_L1_time)
    _Iteration(session, model, step, num_microbatches, shape, batches).run(forward_only)
    if config.finalize_model_grads_func is not None and not forward_only:
        config.finalize_model_grads_func([model], tokens, force_all_reduce=force_all_reduce)
    if config.timers is not None:
        config.timers("forward-backward").stop()
    return store
