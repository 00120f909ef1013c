"""Ministages in interleaved 1F1B: passes of all ministages of a stage take turns (`mesh.pipeline_order`).

A micro-batch passes the ministages of all stages in the order of the model's layers, and back. All weights
stay on the device, and a forward pass keeps its activations until the backward pass, as in 1F1B. Rows go over
the same borders as ministages in turn send them, from the last stage to the first too; each border carries
the rows in the order in which both of its stages run the passes.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from megatron_hexi.megatron.stages.ministage_iteration import MinistageIteration
from megatron_hexi.mesh import PipelineStep, pipeline_steps


class InterleavedIteration(MinistageIteration):
    """One iteration of one rank, with its ministages interleaved."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        #: Rows that entered and rows that left, from the forward pass of a ministage to its backward pass.
        self._kept: dict[tuple[int, int], tuple[Tensor | None, Tensor]] = {}

    def run(self, forward_only: bool) -> None:
        """Run all micro-batches through all ministages; then this rank's gradients are in its buckets."""
        count, all_of_them = self._slices.count, self._micro_batches
        self._channels.begin(
            activations=(count - self._slices.takes_tokens(0)) * all_of_them,
            gradients=(count - self._slices.gives_loss(count - 1)) * all_of_them,
        )
        for step in pipeline_steps(self._place.depth, self._place.stage, all_of_them, count):
            if forward_only and step.way == "backward":
                continue
            self._channels.set_ministage(step.chunk)
            with self._slices.only(step.chunk):
                if step.way == "forward":
                    self._forward(step, keeps=not forward_only)
                else:
                    self._backward(step)

    def _forward(self, step: PipelineStep, keeps: bool) -> None:
        from megatron.core.pipeline_parallel.schedules import deallocate_output_tensor

        config, rows = self._model.config, None
        if self._batches is not None:
            self._batches.place = step.micro_batch
        if not self._slices.takes_tokens(step.chunk):
            rows = self._channels.receive_activations(self._shape, config.pipeline_dtype)
        output = self._step(self._slices, step.chunk, step.micro_batch, rows)
        if not self._slices.gives_loss(step.chunk):
            self._channels.send_activations(output)
        if keeps:
            self._kept[step.chunk, step.micro_batch] = rows, output
            if not self._slices.gives_loss(step.chunk):
                deallocate_output_tensor(output, config.deallocate_pipeline_outputs)

    def _backward(self, step: PipelineStep) -> None:
        from megatron.core.pipeline_parallel.schedules import backward_step

        config, pieces = self._model.config, self._model.pieces
        # The last micro-batch runs backward through later ministages first.
        pieces.is_last_microbatch = step.micro_batch == self._micro_batches - 1
        pieces.unfinished = self._slices.used_before(step.chunk)
        rows, output = self._kept.pop((step.chunk, step.micro_batch))
        gradient = None
        if self._slices.gives_loss(step.chunk):
            self._channels.begin_backward()
        else:
            gradient = self._channels.receive_gradients(self._shape, config.pipeline_dtype)
        gradient = backward_step(rows, output, gradient, config)
        if rows is not None:
            self._channels.send_gradients(gradient)
