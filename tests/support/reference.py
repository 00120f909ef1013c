"""Plain attention on one device, and a plan carried out by threads, in the same terms.

Shape letters: S sequence, B batch, H query heads, K KV heads, D head size, Dv that of values.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch

from megatron_hexi.plan import Mask, build_schedule
from megatron_hexi.plan.units import domain_rows
from megatron_hexi.runtime.kernels import Mode
from megatron_hexi.runtime.kernels.aten import AtenCpuKernel
from tests.support.threads import run_ranks


@dataclass(frozen=True)
class Problem:
    """Query [S, B, H, D], key [S, B, K, D], value [S, B, K, Dv], gradient of the output; sinks [H]."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    grad_output: torch.Tensor
    mask: Mask
    scale: float
    sinks: torch.Tensor | None = None

    @property
    def inputs(self):
        """What has a gradient."""
        inputs = self.query, self.key, self.value, self.sinks
        return [tensor for tensor in inputs if tensor is not None]

    def to(self, dtype):
        return replace(
            self,
            query=self.query.to(dtype),
            key=self.key.to(dtype),
            value=self.value.to(dtype),
            grad_output=self.grad_output.to(dtype),
            sinks=None if self.sinks is None else self.sinks.to(dtype),
        )


def random_problem(workload, batch, dtype=torch.float64, scale=None, seed=0, mask=None, has_sinks=False):
    """Normal values that `dtype` holds exactly, in that dtype."""
    generator = torch.Generator().manual_seed(seed)
    heads, kv_heads = workload.local_heads, workload.local_kv_heads
    query, key, value, grad_output = (
        torch.randn(workload.seq_length, batch, count, size, generator=generator, dtype=torch.float64).to(
            dtype
        )
        for count, size in (
            (heads, workload.head_dim),
            (kv_heads, workload.head_dim),
            (kv_heads, workload.value_size),
            (heads, workload.value_size),
        )
    )
    scale = workload.head_dim**-0.5 if scale is None else scale
    sinks = torch.randn(workload.local_heads, generator=generator, dtype=torch.float64).to(dtype)
    mask = mask or Mask(causal=workload.causal)
    return Problem(query, key, value, grad_output, mask, scale, sinks if has_sinks else None)


def plain_attention(query, key, value, sinks=None, *, mask, scale):
    """softmax(Q K^T scale) V as it stands in the paper, differentiable, in the type that it is given.

    A sink is one more column of the scores, of which the softmax's result is dropped.
    """
    sharing = query.shape[2] // key.shape[2]
    key, value = (tensor.repeat_interleave(sharing, dim=2) for tensor in (key, value))
    scores = torch.einsum("qbhd,sbhd->bhqs", query, key) * scale
    scores = scores.masked_fill(~visible(mask, scores.shape[2]), -math.inf)
    if sinks is not None:
        column = sinks[:, None, None].expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, column], dim=3)
    weights = torch.softmax(scores, dim=-1)[..., : value.shape[0]]
    return torch.einsum("bhqs,sbhd->qbhd", weights, value)


def visible(mask, seq_length):
    """Which keys [.., S] each query [S, ..] sees."""
    row, column = torch.arange(seq_length)[:, None], torch.arange(seq_length)
    seen = torch.ones(seq_length, seq_length, dtype=torch.bool)
    if mask.causal:
        seen &= column <= row
    if mask.window is not None:
        seen &= column >= row - mask.window
    if mask.documents is not None:
        document = torch.repeat_interleave(torch.tensor(mask.documents))
        seen &= document[:, None] == document
    return seen


def plain_results(problem, function=None):
    """Output and gradients of query, key, value and sinks on one device."""
    leaves = [tensor.clone().requires_grad_() for tensor in problem.inputs]
    output = (function or plain_attention)(*leaves, mask=problem.mask, scale=problem.scale)
    return output.detach(), *torch.autograd.grad(output, leaves, problem.grad_output)


def plain_low_precision_results(problem):
    """Output and gradients as torch's own attention gives them in a low precision, in one block."""
    kernel = AtenCpuKernel()
    query, key, value, grad = (
        tensor.permute(1, 2, 0, 3).contiguous()
        for tensor in (problem.query, problem.key, problem.value, problem.grad_output)
    )
    assert problem.mask == Mask(problem.mask.causal), "kernels know no other masks"
    mode = Mode(problem.mask.causal, problem.scale)
    output, log_sum_exp = kernel.forward(query, key, value, mode)
    grads = kernel.backward(grad, query, key, value, output, log_sum_exp, mode)
    return tuple(tensor.permute(2, 0, 1, 3) for tensor in (output, *grads))


def positions_of(segments):
    """Segments as a list of positions."""
    return [position for start, stop in segments for position in range(start, stop)]


def planned_results(plan, problem, kernel="auto", layer=None):
    """Output and gradients of the whole sequence, each rank's part computed by a thread.

    Args:
        plan: the plan; its first replica is carried out.
        problem: the whole sequence.
        kernel: name of the kernel.
        layer: what to compute from attention, query, key, value and scale; one attention if not given.

    Gradients of sinks are those of all ranks, added up.
    """
    row = domain_rows(plan)[0]
    domain, rates = row.domain, row.rates
    layer = layer or (
        lambda attention, query, key, value, scale, sinks=None: attention(
            query, key, value, scale, problem.mask, sinks
        )
    )
    places = [
        positions_of(
            build_schedule(plan.workload, domain, index, plan.exchange.parts, problem.mask, rates).segments
        )
        for index in range(len(domain.members))
    ]

    def work(rank):
        attention = rank.attention(plan, kernel)
        mine = places[rank.rank]
        inputs = [
            tensor[mine].clone().requires_grad_() for tensor in (problem.query, problem.key, problem.value)
        ]
        sinks = [problem.sinks.clone().requires_grad_()] if problem.sinks is not None else []
        output = layer(attention, *inputs, problem.scale, *sinks)
        output.backward(problem.grad_output[mine])
        return output.detach(), *(tensor.grad for tensor in [*inputs, *sinks])

    parts = run_ranks(len(domain.members), work)
    whole = []
    for number, like in enumerate((problem.grad_output, problem.query, problem.key, problem.value)):
        tensor = torch.full_like(like, math.nan)
        for mine, part in zip(places, parts, strict=True):
            assert part[number].dtype == like.dtype
            tensor[mine] = part[number]
        whole.append(tensor)
    if problem.sinks is not None:
        whole.append(sum(part[4] for part in parts))
    return tuple(whole)


def rms_error(result, truth):
    """Root mean square of the difference, in fp64."""
    return float((result.double() - truth.double()).square().mean().sqrt())
