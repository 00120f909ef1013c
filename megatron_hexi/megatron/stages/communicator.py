"""What stands in for Megatron's pipeline communicator where stages differ: rows travel by the border's table.

Megatron's 1F1B schedule calls it as its own. Its calls come in a known order, so sends are left under way
and the receive of the next micro-batch is posted while this one is computed. Each direction has a group of
its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_hexi.megatron.stages.groups import BorderGroups, RankView
from megatron_hexi.mesh import Mesh, border_messages, held_rows
from megatron_hexi.runtime.row_channel import RowChannel


class _Direction:
    """One direction over one border: how many micro-batches are still to come."""

    def __init__(self, channel: RowChannel) -> None:
        self.channel = channel
        self.left = 0

    def receive(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        self.channel.expect(shape, dtype)
        rows = self.channel.receive()
        self.left -= 1
        if self.left > 0:
            self.channel.expect(shape, dtype)
        return rows.requires_grad_()


@dataclass
class BorderChannels:
    """The four channels of one rank, kept from iteration to iteration.

    Args:
        activations_in: from the stage before; ``None`` at the first.
        gradients_out: to the stage before.
        activations_out: to the stage behind; ``None`` at the last.
        gradients_in: from the stage behind.
    """

    activations_in: _Direction | None = None
    gradients_out: _Direction | None = None
    activations_out: _Direction | None = None
    gradients_in: _Direction | None = None

    def begin(self, micro_batches: int, forward_only: bool) -> None:
        """Say how many micro-batches the schedule is going to run."""
        if self.activations_in is not None:
            self.activations_in.left = micro_batches
        if self.gradients_in is not None:
            self.gradients_in.left = 0 if forward_only else micro_batches

    def finish(self) -> None:
        """Wait until all that was sent has left: after the last forward-only pass nothing proves receipt."""
        for direction in (self.gradients_out, self.activations_out):
            if direction is not None:
                direction.channel.finish()


def make_channels(mesh: Mesh, view: RankView, device: torch.device) -> BorderChannels:
    """The channels of a rank."""
    place = view.place
    held = held_rows(mesh, place)

    def pair(groups: BorderGroups | None, other: int) -> tuple[_Direction | None, _Direction | None]:
        """What comes from a neighbour and what goes to it."""
        if groups is None:
            return None, None
        forward_in = other < place.stage
        incoming = border_messages(mesh, place.replica, other, place.stage)
        outgoing = border_messages(mesh, place.replica, place.stage, other)
        group_in, group_out = (
            (groups.forward, groups.backward) if forward_in else (groups.backward, groups.forward)
        )
        return (
            _Direction(RowChannel(incoming, held, group_in, device)),
            _Direction(RowChannel(outgoing, held, group_out, device)),
        )

    activations_in, gradients_out = pair(view.before, place.stage - 1)
    gradients_in, activations_out = pair(view.behind, place.stage + 1)
    return BorderChannels(activations_in, gradients_out, activations_out, gradients_in)


class BorderCommunicator:
    """Has the methods of Megatron's ``P2PCommunicator`` that its non-interleaved schedule calls.

    Args:
        channels: of this rank.
        stage: number of its stage.
        stages: how many its replica has.
        config: Megatron's.
    """

    def __init__(self, channels: BorderChannels, stage: int, stages: int, config: Any) -> None:
        self.config = config
        self.current_stage, self.total_stages = stage, stages
        self.is_pp_first_stage, self.is_pp_last_stage = stage == 0, stage == stages - 1
        self.virtual_pipeline_model_parallel_size = None
        self._channels = channels

    def recv_forward(self, tensor_shapes: Any, is_first_stage: bool) -> Any:
        """Activations of the stage before."""
        return self._receive(self._channels.activations_in, tensor_shapes)

    def recv_backward(self, tensor_shapes: Any, is_last_stage: bool) -> Any:
        """Gradients of the stage behind."""
        return self._receive(self._channels.gradients_in, tensor_shapes)

    def send_forward(self, output_tensors: Any, is_last_stage: bool) -> None:
        """Activations to the stage behind."""
        self._send(self._channels.activations_out, output_tensors)

    def send_backward(self, input_tensor_grads: Any, is_first_stage: bool) -> None:
        """Gradients to the stage before."""
        self._send(self._channels.gradients_out, input_tensor_grads)

    def send_forward_recv_backward(self, output_tensors: Any, tensor_shapes: Any, is_last_stage: bool) -> Any:
        """Both with the stage behind."""
        self._send(self._channels.activations_out, output_tensors)
        return self._receive(self._channels.gradients_in, tensor_shapes, like=output_tensors)

    def send_backward_recv_forward(
        self, input_tensor_grads: Any, tensor_shapes: Any, is_first_stage: bool
    ) -> Any:
        """Both with the stage before."""
        self._send(self._channels.gradients_out, input_tensor_grads)
        return self._receive(self._channels.activations_in, tensor_shapes, like=input_tensor_grads)

    def _receive(self, direction: _Direction | None, shapes: Any, like: Any = None) -> Any:
        """Rows of the shape that Megatron asks for, in a list where it gives or expects one."""
        is_list = isinstance(shapes, list) if like is None else isinstance(like, list)
        shape = shapes[0] if isinstance(shapes, list) else shapes
        rows = None if direction is None else direction.receive(shape, self.config.pipeline_dtype)
        return [rows] if is_list else rows

    def _send(self, direction: _Direction | None, tensors: Any) -> None:
        if direction is not None:
            (rows,) = tensors if isinstance(tensors, list) else [tensors]
            direction.channel.send(rows)
