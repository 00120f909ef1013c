"""Plain attention on one device, and a plan carried out by threads, in the same terms.

Shape letters: S sequence, B batch, H query heads, K KV heads, D head size.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from megatron_hexi.plan import build_schedule
from megatron_hexi.runtime.kernels.aten_cpu import AtenCpuKernel
from tests.support.threads import run_ranks


@dataclass(frozen=True)
class Problem:
    """Query [S, B, H, D], key and value [S, B, K, D], and the gradient of the output [S, B, H, D]."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    grad_output: torch.Tensor
    causal: bool
    scale: float

    def to(self, dtype):
        return Problem(
            self.query.to(dtype),
            self.key.to(dtype),
            self.value.to(dtype),
            self.grad_output.to(dtype),
            self.causal,
            self.scale,
        )


def random_problem(workload, batch, dtype=torch.float64, scale=None, seed=0):
    """Normal values that `dtype` holds exactly, in that dtype."""
    generator = torch.Generator().manual_seed(seed)
    shapes = [workload.local_heads, workload.local_kv_heads, workload.local_kv_heads, workload.local_heads]
    query, key, value, grad_output = (
        torch.randn(
            workload.seq_length, batch, heads, workload.head_dim, generator=generator, dtype=torch.float64
        ).to(dtype)
        for heads in shapes
    )
    scale = workload.head_dim**-0.5 if scale is None else scale
    return Problem(query, key, value, grad_output, workload.causal, scale)


def plain_attention(query, key, value, causal, scale):
    """softmax(Q K^T scale) V as it stands in the paper, differentiable, in the type that it is given."""
    sharing = query.shape[2] // key.shape[2]
    key, value = (tensor.repeat_interleave(sharing, dim=2) for tensor in (key, value))
    scores = torch.einsum("qbhd,sbhd->bhqs", query, key) * scale
    if causal:
        rows, columns = torch.arange(scores.shape[2])[:, None], torch.arange(scores.shape[3])
        scores = scores.masked_fill(columns > rows, -math.inf)
    return torch.einsum("bhqs,sbhd->qbhd", torch.softmax(scores, dim=-1), value)


def plain_results(problem, function=None):
    """Output and gradients of query, key and value on one device."""
    query, key, value = (
        tensor.clone().requires_grad_() for tensor in (problem.query, problem.key, problem.value)
    )
    output = (function or plain_attention)(query, key, value, problem.causal, problem.scale)
    return output.detach(), *torch.autograd.grad(output, (query, key, value), problem.grad_output)


def plain_low_precision_results(problem):
    """Output and gradients as torch's own attention gives them in a low precision, in one block."""
    kernel = AtenCpuKernel()
    query, key, value, grad = (
        tensor.permute(1, 2, 0, 3).contiguous()
        for tensor in (problem.query, problem.key, problem.value, problem.grad_output)
    )
    mode = {"causal": problem.causal, "scale": problem.scale}
    output, log_sum_exp = kernel.forward(query, key, value, **mode)
    grads = kernel.backward(grad, query, key, value, output, log_sum_exp, **mode)
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
    """
    domain = plan.replicas[0].domain
    layer = layer or (lambda attention, query, key, value, scale: attention(query, key, value, scale))
    places = [
        positions_of(build_schedule(plan.workload, domain, index, plan.exchange.parts).segments)
        for index in range(len(domain.members))
    ]

    def work(rank):
        attention = rank.attention(plan, kernel)
        mine = places[rank.rank]
        inputs = [
            tensor[mine].clone().requires_grad_() for tensor in (problem.query, problem.key, problem.value)
        ]
        output = layer(attention, *inputs, problem.scale)
        output.backward(problem.grad_output[mine])
        return output.detach(), *(tensor.grad for tensor in inputs)

    parts = run_ranks(len(domain.members), work)
    whole = []
    for number, like in enumerate((problem.query, problem.query, problem.key, problem.value)):
        tensor = torch.full_like(like, math.nan)
        for mine, part in zip(places, parts, strict=True):
            assert part[number].dtype == like.dtype
            tensor[mine] = part[number]
        whole.append(tensor)
    return tuple(whole)


def rms_error(result, truth):
    """Root mean square of the difference, in fp64."""
    return float((result.double() - truth.double()).square().mean().sqrt())
