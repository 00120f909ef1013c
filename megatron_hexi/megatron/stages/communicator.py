"""Messages between pipeline stages that differ, in place of Megatron's pipeline communicator.

Megatron's 1F1B schedule calls it like its own. The order of calls is known, so sends stay in flight and the
receive of the next micro-batch is posted while this one is computed. Each direction has a group of its own.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_hexi.megatron.stages.mesh_groups import RankView
from megatron_hexi.mesh import HeldRows, Mesh, RowMessage, border_messages, held_rows
from megatron_hexi.runtime.row_channel import RowChannel

#: Micro-batches in flight in one direction. In 1F1B, interleaved or not, a stage receives the last but one
#: without waiting for anything that comes after the last was sent, so the sender may wait for it.
_MOST_LEAVING = 2

#: Lengths of the documents of a micro-batch's sequence; ``None``: the sequence is one document.
Documents = tuple[int, ...] | None
#: Numbers of the domains that take a micro-batch, in the first and last stage of a direction.
_Domains = tuple[int | None, int | None]


class _Direction:
    """The rows that this rank sends or receives over one border in one direction."""

    def __init__(
        self, mesh: Mesh, rank: int, ends: tuple[int, int], group: dist.ProcessGroup, device: torch.device
    ) -> None:
        replica = mesh.units[rank].replica

        @lru_cache(maxsize=16)  # the micro-batches in flight
        def table(documents: Documents, domains: _Domains) -> tuple[tuple[RowMessage, ...], HeldRows]:
            messages = border_messages(mesh, replica, *ends, documents, domains)
            return messages, held_rows(mesh, rank, documents)

        self._table = table
        self._takes_micro_batches = any(
            mesh.plan.replicas[replica].stages[stage].takes_micro_batches for stage in ends
        )
        self._domains = lru_cache(maxsize=None)(
            lambda micro_batch: tuple(mesh.taking_domain(replica, stage, micro_batch) for stage in ends)
        )
        #: Number of the next micro-batch, where domains take whole micro-batches.
        self.micro_batch = 0
        self._channel = RowChannel(*self._now(None), group, device)
        #: Number of micro-batches that are still to be received.
        self.left = 0

    def _now(self, documents: Documents) -> tuple[tuple[RowMessage, ...], HeldRows]:
        """Return the table of the next micro-batch."""
        return self._table(
            documents, self._domains(self.micro_batch) if self._takes_micro_batches else (None, None)
        )

    def send(self, rows: Tensor, documents: Documents) -> None:
        self._channel.set_table(*self._now(documents))
        self._channel.send(rows)

    def receive(self, shape: Sequence[int], dtype: torch.dtype, documents: Documents) -> Tensor:
        """Return the rows of the next micro-batch; without documents, post the next receive.

        Args:
            shape: [L, b, hidden] under the plan's shares; the documents decide how many rows there are.
        """
        messages, held = self._now(documents)
        self._channel.set_table(messages, held)
        shape = (held.rows, *shape[1:])
        self._channel.expect(shape, dtype)
        rows = self._channel.receive()
        self.left -= 1
        if self.left > 0 and documents is None and not self._takes_micro_batches:
            self._channel.expect(shape, dtype)
        return rows

    @property
    def sent(self) -> int:
        return self._channel.sent

    def finish(self, number: int | None = None) -> None:
        self._channel.finish(number)


class BorderChannels:
    """The four directions of one rank, kept between iterations.

    With documents, a rank's rows depend on the micro-batch. A stage learns the documents when its model is
    called, after the schedule has received the rows: so it returns a tensor that is filled later. Gradients
    come in the order of the activations, and so do their documents.
    """

    def __init__(self, mesh: Mesh, view: RankView, device: torch.device, is_packed: bool) -> None:
        stage, depth, rank = view.place.stage, view.place.depth, view.rank
        before, behind = (stage - 1) % depth, (stage + 1) % depth
        self._is_packed = is_packed
        self._device = device
        self._activations_in = self._gradients_out = self._activations_out = self._gradients_in = None
        if view.before is not None:
            self._activations_in = _Direction(mesh, rank, (before, stage), view.before.forward, device)
            self._gradients_out = _Direction(mesh, rank, (stage, before), view.before.backward, device)
        if view.behind is not None:
            self._activations_out = _Direction(mesh, rank, (stage, behind), view.behind.forward, device)
            self._gradients_in = _Direction(mesh, rank, (behind, stage), view.behind.backward, device)
        #: With ministages one after the other: sends that may be in flight, in order, and their greatest
        #: number.
        self._sent: deque[tuple[_Direction, int]] = deque()
        self._most_sent: int | None = None
        self._unfilled: Tensor | None = None
        #: Number of the ministage that runs, if ministages are interleaved; else 0.
        self._ministage = 0
        #: Documents of micro-batches before their backward pass, by ministage.
        self._documents: dict[int, deque[Documents]] = defaultdict(deque)
        #: Documents of the micro-batch in its backward pass.
        self._backward_documents: Documents = None

    def under(self, mesh: Mesh, view: RankView) -> BorderChannels:
        """Return channels over the same process groups for the rows of another plan, between iterations."""
        return BorderChannels(mesh, view, self._device, self._is_packed)

    def begin(self, activations: int, gradients: int, most_sent: int | None = None) -> None:
        """Set the numbers of micro-batches that are received before the next call.

        Args:
            activations: number of micro-batches whose rows are received; with ministages, over all of them.
            gradients: number of micro-batches whose gradients are received, likewise.
            most_sent: largest number of micro-batches in flight in both directions together; ``None``: each
                direction has a limit of its own, as in 1F1B.
        """
        self._most_sent = most_sent
        self._documents.clear()
        for direction, left in ((self._activations_in, activations), (self._gradients_in, gradients)):
            if direction is not None:
                direction.left = left

    def set_ministage(self, ministage: int) -> None:
        """Set the ministage that runs next, where ministages are interleaved."""
        self._ministage = ministage

    def set_micro_batch(self, micro_batch: int) -> None:
        """Set the micro-batch that is received and sent next, with ministages one after the other."""
        for direction in (
            self._activations_in,
            self._activations_out,
            self._gradients_in,
            self._gradients_out,
        ):
            if direction is not None:
                direction.micro_batch = micro_batch

    def finish(self) -> None:
        """Wait until all sends have left: after the last forward-only pass nothing proves receipt."""
        for direction in (self._gradients_out, self._activations_out):
            if direction is not None:
                direction.finish()

    def receive_activations(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor | None:
        """Return the rows of the stage before (with documents, a tensor for them); ``None`` at the first."""
        if self._activations_in is None:
            return None
        if not self._is_packed:
            return self._activations_in.receive(shape, dtype, None).requires_grad_()
        self._unfilled = torch.empty(0, *shape[1:], dtype=dtype, device=self._device, requires_grad=True)
        return self._unfilled

    @torch.no_grad()
    def take_documents(self, documents: Documents) -> None:
        """Set the documents of the micro-batch whose forward pass begins."""
        self._documents[self._ministage].append(documents)
        if self._unfilled is not None and self._activations_in is not None:
            unfilled, self._unfilled = self._unfilled, None
            unfilled.data = self._activations_in.receive(unfilled.shape, unfilled.dtype, documents)

    def send_activations(self, rows: Tensor) -> None:
        """Send a micro-batch's rows to the next stage; does nothing on the last."""
        if self._activations_out is not None:
            documents = self._documents[self._ministage][-1] if self._is_packed else None
            self._activations_out.send(rows, documents)
            self._note_sent(self._activations_out)

    def receive_gradients(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor | None:
        """Start a backward pass and receive output gradients from the next stage; ``None`` on the last."""
        self.begin_backward()
        if self._gradients_in is None:
            return None
        return self._gradients_in.receive(shape, dtype, self._backward_documents)

    def begin_backward(self) -> None:
        """Begin the backward pass of the oldest micro-batch in flight."""
        self._backward_documents = self._documents[self._ministage].popleft() if self._is_packed else None

    def send_gradients(self, rows: Tensor) -> None:
        """Send the gradients of a micro-batch's rows to the previous stage; does nothing on the first."""
        if self._gradients_out is not None:
            self._gradients_out.send(rows, self._backward_documents)
            self._note_sent(self._gradients_out)

    def _note_sent(self, direction: _Direction) -> None:
        if self._most_sent is None:
            direction.finish(direction.sent - 1 - _MOST_LEAVING)
            return
        self._sent.append((direction, direction.sent - 1))
        while len(self._sent) > self._most_sent:
            before, number = self._sent.popleft()
            before.finish(number)


class BorderCommunicator:
    """Methods of Megatron's ``P2PCommunicator`` that its non-interleaved schedule calls.

    Args:
        config: Megatron's configuration.
    """

    def __init__(self, channels: BorderChannels, stage: int, stages: int, config: Any) -> None:
        self.config = config
        self.current_stage, self.total_stages = stage, stages
        self.is_pp_first_stage, self.is_pp_last_stage = stage == 0, stage == stages - 1
        self.virtual_pipeline_model_parallel_size = None
        self._channels = channels

    def recv_forward(self, tensor_shapes: Any, is_first_stage: bool) -> Any:
        """Return the activations of the stage before."""
        return self._activations(tensor_shapes, isinstance(tensor_shapes, list))

    def recv_backward(self, tensor_shapes: Any, is_last_stage: bool) -> Any:
        """Return the gradients from the next stage."""
        return self._gradients(tensor_shapes, isinstance(tensor_shapes, list))

    def send_forward(self, output_tensors: Any, is_last_stage: bool) -> None:
        """Send activations to the next stage."""
        self._channels.send_activations(_only(output_tensors))

    def send_backward(self, input_tensor_grads: Any, is_first_stage: bool) -> None:
        """Send gradients to the stage before."""
        self._channels.send_gradients(_only(input_tensor_grads))

    def send_forward_recv_backward(self, output_tensors: Any, tensor_shapes: Any, is_last_stage: bool) -> Any:
        """Send activations to the next stage, and return the gradients from there."""
        self.send_forward(output_tensors, is_last_stage)
        return self._gradients(tensor_shapes, isinstance(output_tensors, list))

    def send_backward_recv_forward(
        self, input_tensor_grads: Any, tensor_shapes: Any, is_first_stage: bool
    ) -> Any:
        """Send gradients to the stage before, and return its activations."""
        self.send_backward(input_tensor_grads, is_first_stage)
        return self._activations(tensor_shapes, isinstance(input_tensor_grads, list))

    def _activations(self, shapes: Any, as_list: bool) -> Any:
        rows = self._channels.receive_activations(_shape(shapes), self.config.pipeline_dtype)
        return [rows] if as_list else rows

    def _gradients(self, shapes: Any, as_list: bool) -> Any:
        rows = self._channels.receive_gradients(_shape(shapes), self.config.pipeline_dtype)
        return [rows] if as_list else rows


def _only(tensors: Any) -> Any:
    """Return the tensor that Megatron sends, alone or in a list."""
    if not isinstance(tensors, list):
        return tensors
    (tensor,) = tensors
    return tensor


def _shape(shapes: Any) -> Any:
    return shapes[0] if isinstance(shapes, list) else shapes
