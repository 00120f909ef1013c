"""A training iteration as far as ranks send each other something, over a random plan and without data.

Attention is the runtime's own. Around it stands what Megatron posts, in Megatron's order: sums over the ranks
of a unit, 1F1B between pipeline stages, and the gradients of all ranks at the end.
"""

from __future__ import annotations

import functools
from collections import deque
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from megatron_hexi.plan import Mask, Plan, Schedules
from megatron_hexi.runtime import DomainAttention, passes
from megatron_hexi.runtime.attention_blocks import BlockAttention
from tests.support.nccl_rules import Call
from tests.support.posted import Posting, fake_group, fake_groups

#: What the backward pass computes again: nothing, attention, each layer, or all layers of a stage at once.
RECOMPUTE = ("no", "attention", "layer", "stage")


@dataclass(frozen=True)
class Job:
    """How a plan is trained by.

    Args:
        plan: the plan.
        masks: what each layer of a stage sees; all have the same documents.
        stages: of the pipeline.
        batch: sequences of a micro-batch.
        micro_batches: of each replica.
        recompute: one of `RECOMPUTE`.
        reentrant: the way in which torch computes again.
        dtype: of everything.
    """

    plan: Plan
    masks: tuple[Mask, ...]
    stages: int
    batch: int
    micro_batches: tuple[int, ...]
    recompute: str
    reentrant: bool
    dtype: torch.dtype

    def post(self) -> list[list[Call]]:
        """What each rank of the job posts in one iteration."""
        with fake_groups(), mock.patch.object(passes, "BlockAttention", _NoBlocks):
            return [_Rank(self, rank).post() for rank in range(self.stages * self.plan.ranks)]


class _NoBlocks(BlockAttention):
    """Computes nothing: what is sent does not depend on it."""

    def forward(self, *tensors: Any) -> Any:
        return ()

    def backward(self, *tensors: Any) -> Any:
        return ()


class _Rank:
    """One rank of the job."""

    def __init__(self, job: Job, rank: int) -> None:
        self.job, self.rank = job, rank
        plan = job.plan
        self.stage, self.place = divmod(rank, plan.ranks)
        self.replica, self.domain, self.member = next(
            (number, replica.domain, member)
            for number, replica in enumerate(plan.replicas)
            for member in replica.domain.members
            if self.place in member.ranks
        )
        workload = plan.workload
        lane = self.member.ranks.index(self.place)
        index = self.domain.members.index(self.member)
        schedules = Schedules(workload, self.domain, index, plan.exchange.parts)
        self.schedule = schedules(job.masks[0])
        domain = [member.ranks[lane] for member in self.domain.members]
        self.attention = DomainAttention(
            workload,
            schedules,
            self._group("domain", domain),
            self._group("a2a", [domain[member] for member in self.schedule.members]),
            plan.exchange.window,
        )
        self.unit = self._group("unit", list(self.member.ranks))
        everyone = range(job.stages * plan.ranks)
        self.everyone = fake_group(rank, everyone, "everyone")
        self.pipeline = fake_group(rank, everyone[self.place :: plan.ranks], f"pipeline {self.place}")
        #: Megatron's tensors have a row at least.
        self.rows = max(1, self.schedule.tokens)
        self.hidden = workload.local_heads * workload.value_size

    def _group(self, name: str, places: list[int]) -> dist.ProcessGroup:
        """A group of ranks of one stage."""
        first = self.stage * self.job.plan.ranks
        ranks = [first + place for place in places]
        return fake_group(self.rank, ranks, f"{name} of rank {min(ranks)}")

    def post(self) -> list[Call]:
        """Train an iteration (1F1B), and give what was posted."""
        with Posting(alone=True) as posting:
            self.attention.connect(torch.device("cpu"))
            count = self.job.micro_batches[self.replica]
            ahead = min(self.job.stages - self.stage - 1, count)
            done: deque[Tensor] = deque()
            for _ in range(ahead):
                done.append(self._forward(self._exchange(receive_from=-1)))
                self._exchange(send_to=+1)
            states = self._exchange(receive_from=-1) if ahead < count else None
            for left in reversed(range(count - ahead)):
                done.append(self._forward(states))
                self._exchange(send_to=+1, receive_from=+1)
                self._backward(done.popleft())
                states = self._exchange(send_to=-1, receive_from=-1 if left else 0)
            while done:
                self._exchange(receive_from=+1)
                self._backward(done.popleft())
                self._exchange(send_to=-1)
            dist.all_reduce(torch.zeros(7), group=self.everyone)
        return posting.calls

    def _exchange(self, send_to: int = 0, receive_from: int = 0) -> Tensor:
        """One batch between neighbouring stages, as Megatron makes it; what arrives."""
        states = torch.zeros(self.rows, self.job.batch, self.hidden, dtype=self.job.dtype)
        operations = [
            dist.P2POp(function, states, group=self.pipeline, group_peer=self.stage + way)
            for function, way in ((dist.isend, send_to), (dist.irecv, receive_from))
            if way and 0 <= self.stage + way < self.job.stages
        ]
        if operations:
            dist.batch_isend_irecv(operations)
        return states.requires_grad_()

    def _forward(self, states: Any) -> Tensor:
        return self._again(self._layers, states) if self.job.recompute == "stage" else self._layers(states)

    def _layers(self, states: Tensor) -> Tensor:
        for mask in self.job.masks:
            layer = functools.partial(self._layer, mask)
            states = self._again(layer, states) if self.job.recompute == "layer" else layer(states)
        return states

    def _layer(self, mask: Mask, states: Tensor) -> Tensor:
        """Heads from the hidden states, attention, and the sum over the unit."""
        workload, tokens = self.job.plan.workload, self.schedule.tokens
        value = states[:tokens].unflatten(2, (workload.local_heads, workload.value_size))
        query = value[..., :1].expand(*value.shape[:3], workload.head_dim)
        keys = slice(workload.local_kv_heads)
        inputs = query, query[:, :, keys], value[:, :, keys]
        attend = functools.partial(self.attention, mask=mask)
        output = self._again(attend, *inputs) if self.job.recompute == "attention" else attend(*inputs)
        return _Summed.apply(torch.cat([output.flatten(2), states[tokens:]]), self.unit)

    def _again(self, function: Any, *inputs: Tensor) -> Tensor:
        return checkpoint(function, *inputs, use_reentrant=self.job.reentrant)

    def _backward(self, output: Tensor) -> None:
        output.backward(torch.zeros_like(output))


class _Summed(torch.autograd.Function):
    """The sum over the ranks of a unit, forward and backward."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        total = tensor.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        total = grads[0].clone()
        dist.all_reduce(total, group=ctx.group)
        return total, None
