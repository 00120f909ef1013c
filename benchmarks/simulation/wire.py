"""What the runtime would send under a plan, on torch's meta tensors, against what the cost model counts.

The whole attention layer runs for each rank, forward and backward: the runtime's own split tables, buffers
and autograd function, on tensors that have shapes and no contents, with a kernel that computes nothing. The
two functions that would send (runtime/wire.py) note the sizes of the tensors that they are given instead.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from benchmarks.simulation.results import Wire
from megatron_hexi.cost.exchange import exchange_chunks
from megatron_hexi.cost.layer import message_bytes
from megatron_hexi.cost.mixing import mixing_of
from megatron_hexi.cost.plan_arrays import PlanArrays, domain_arrays
from megatron_hexi.models import Job
from megatron_hexi.plan import Domain, Exchange, Plan, Schedules, Stage, Workload
from megatron_hexi.runtime import all_to_all, attention, exchange
from megatron_hexi.runtime.attention import DomainAttention
from megatron_hexi.runtime.kernels import KernelDispatch, MathKernel, Mode
from megatron_hexi.runtime.wire import Message

#: What is sent: the kind, the sender and the receiver, by their numbers in the domain. Kinds of all-to-alls
#: are ("all-to-all", 0 to 3) in the order of a layer; of the exchange ("forward" or "backward", its tag).
Key = tuple[tuple[str, int], int, int]
Bytes = Counter[Key]

_TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


class WireError(AssertionError):
    """The runtime would send other bytes than the cost model counts."""


class _NoKernel(MathKernel):
    """Gives tensors of the right shapes."""

    def dense(self, query: Tensor, key: Tensor, value: Tensor, mode: Mode) -> tuple[Tensor, Tensor]:
        return torch.empty_like(query), query.new_empty(query.shape[:3], dtype=torch.float32)

    def dense_backward(
        self, grad: Tensor, query: Tensor, key: Tensor, value: Tensor, output: Tensor, lse: Tensor, mode: Mode
    ) -> tuple[Tensor, Tensor, Tensor]:
        return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)


@dataclass
class _Recorder:
    """Stands where tensors would be sent, for one member of a domain.

    Args:
        members: numbers of its group's.
        rank: its own number.
        sent: by it.
        received: by it.
    """

    members: Sequence[int]
    rank: int
    sent: Bytes = field(default_factory=Counter)
    received: Bytes = field(default_factory=Counter)
    way: str = "forward"
    calls: int = 0

    def all_to_all(
        self,
        received: Tensor,
        sent: Tensor,
        received_sizes: Sequence[int],
        sent_sizes: Sequence[int],
        group: Any,
    ) -> mock.Mock:
        assert sum(received_sizes) == received.numel()
        assert sum(sent_sizes) == sent.numel()
        kind = ("all-to-all", self.calls)
        self.calls += 1
        for peer, arrives, leaves in zip(self.members, received_sizes, sent_sizes, strict=True):
            if peer != self.rank:
                self.sent[kind, self.rank, peer] += leaves * sent.element_size()
                self.received[kind, peer, self.rank] += arrives * received.element_size()
        return mock.Mock(spec=["wait"])

    def post(self, receives: Sequence[Message], sends: Sequence[Message], group: Any, tag: int) -> mock.Mock:
        kind = (self.way, tag)
        for message in receives:
            self.received[kind, message.peer, self.rank] += _size(message.tensor)
        for message in sends:
            self.sent[kind, self.rank, message.peer] += _size(message.tensor)
        return mock.Mock(spec=["wait"])


def check_wire(plan: Plan, job: Job) -> Wire:
    """Carry out the schedules of a plan and hold every message against the cost model, both ends of it.

    Args:
        plan: a plan that passed its checks, each of its stages one domain.
        job: the job that it is for.

    Raises:
        WireError: a message differs; with its place and both sizes.
    """
    total: Bytes = Counter()
    for replica in plan.replicas:
        for stage in replica.stages:
            total += _check_stage(plan, stage, job)
    inside = sum(size for (kind, _, _), size in total.items() if kind[0] == "all-to-all")
    return Wire(
        ranks=len(plan.members),
        of=len(plan.members),
        all_to_all_bytes=inside,
        message_bytes=sum(total.values()) - inside,
        messages=sum(1 for (kind, _, _), size in total.items() if kind[0] != "all-to-all" and size),
    )


def _check_stage(plan: Plan, stage: Stage, job: Job) -> Bytes:
    """The same for a stage; what its units send."""
    domain, exchange = stage.domain, stage.exchange or plan.exchange
    workload = plan.workload_of(domain)
    job = replace(job, tensor_parallel=workload.tensor_parallel)
    counted = counted_bytes(domain_arrays(workload, [domain], exchange.parts), job)
    total: Bytes = Counter()
    for number, member in enumerate(domain.members):
        recorder = _carry_out(workload, domain, number, exchange, job)
        _compare(f"rank {member.lead} sends", recorder.sent, counted.get(("sent", number), Counter()))
        _compare(
            f"rank {member.lead} receives", recorder.received, counted.get(("received", number), Counter())
        )
        total += recorder.sent
    return total


def _carry_out(workload: Workload, domain: Domain, number: int, exchange: Exchange, job: Job) -> _Recorder:
    """One member's attention layer, forward and backward, on tensors without contents."""
    schedules = Schedules(workload, domain, number, exchange.parts)
    schedule = schedules()
    recorder = _Recorder(schedule.members, number)
    layer = DomainAttention(workload, schedules, mock.sentinel.domain, mock.sentinel.group, exchange.window)
    with _nothing_sent(recorder):
        query, key, value = _tensors(workload, schedule.tokens, job)
        output = layer(query, key, value)
        recorder.way = "backward"
        output.backward(torch.empty_like(output))
    assert query.grad is not None
    assert query.grad.shape == query.shape
    return recorder


def counted_bytes(arrays: PlanArrays, job: Job) -> dict[tuple[str, int], Bytes]:
    """What the cost model counts: of each member, sent and received, by what it is."""
    counted: dict[tuple[str, int], Bytes] = {}

    def count(kind: tuple[str, int], senders: Any, receivers: Any, sizes: Any) -> None:
        columns = (senders.tolist(), receivers.tolist(), sizes.tolist())
        for sender, receiver, size in zip(*columns, strict=True):
            for side, rank in (("sent", sender), ("received", receiver)):
                counted.setdefault((side, rank), Counter())[kind, sender, receiver] += int(size)

    holder, taker = arrays.all_to_all_pairs
    for number, move in enumerate(mixing_of(arrays, job).all_to_alls()):
        senders, receivers = (holder, taker) if move.inward else (taker, holder)
        count(("all-to-all", number), senders, receivers, move.size)
    first = 0
    for chunk in exchange_chunks(arrays):
        sizes = message_bytes(arrays, job, chunk)
        for part in range(len(chunk.keys)):
            own = chunk.part == part
            ends = chunk.owner[own], chunk.user[own]
            # The runtime's tags: keys and values 2 x part, gradients on their way home one more.
            count(("forward", 2 * (first + part)), *ends, sizes[own])
            count(("backward", 2 * (first + part)), *ends, sizes[own])
            count(("backward", 2 * (first + part) + 1), *ends[::-1], sizes[own])
        first += len(chunk.keys)
    return counted


@contextlib.contextmanager
def _nothing_sent(recorder: _Recorder) -> Iterator[None]:
    with (
        mock.patch.object(all_to_all, "all_to_all", recorder.all_to_all),
        mock.patch.object(exchange, "post", recorder.post),
        mock.patch.object(attention, "agree_on_shapes"),
        mock.patch.object(attention, "select_kernel", return_value=KernelDispatch([_NoKernel()])),
    ):
        yield


def _tensors(workload: Workload, tokens: int, job: Job) -> Iterator[Tensor]:
    """Query, key and value in the tokens' layout."""
    kv_heads = workload.local_kv_heads
    for heads in (workload.local_heads, kv_heads, kv_heads):
        shape = (tokens, job.micro_batch_size, heads, workload.head_dim)
        yield torch.empty(shape, dtype=_TYPES[job.precision], device="meta", requires_grad=True)


def _compare(what: str, found: Bytes, wanted: Bytes) -> None:
    for key in sorted({*found, *wanted}):
        if found[key] != wanted[key]:
            kind, sender, receiver = key
            raise WireError(
                f"{what} {found[key]} bytes, member {sender} of its stage to member {receiver} "
                f"({kind[0]} {kind[1]}), the cost model counts {wanted[key]}"
            )


def _size(tensor: Tensor) -> int:
    assert tensor.is_contiguous()
    return tensor.numel() * tensor.element_size()
