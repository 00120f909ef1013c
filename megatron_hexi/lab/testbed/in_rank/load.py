"""``… -m megatron_hexi.lab.testbed.in_rank.load SECONDS``: cycles of a synthetic load, on all ranks at once.

Each rank prints ``{"cycles": N, "seconds": T}`` as the last line of its log, T by the wall clock.
"""

from __future__ import annotations

import json
import sys
import time

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import linear, scaled_dot_product_attention

from megatron_hexi.lab.testbed.quotas import HEAD_DIM, HEADS, TOKENS, WIDTH

_LEAST_CYCLES = 3


def main(least_s: float) -> None:
    """Run the load together with all other ranks, for at least this many seconds."""
    dist.init_process_group("gloo")
    tensors = _tensors()
    _cycle(*tensors)
    dist.barrier()
    begin, cycles, seconds = time.perf_counter(), 0, 0.0
    while cycles < _LEAST_CYCLES or seconds < least_s:
        _cycle(*tensors)
        cycles, seconds = cycles + 1, time.perf_counter() - begin
    dist.barrier()  # the others still measure
    print(json.dumps({"cycles": cycles, "seconds": seconds}), flush=True)
    dist.destroy_process_group()


def _tensors() -> tuple[Tensor, Tensor, Tensor]:
    shapes = ((TOKENS, WIDTH), (WIDTH, WIDTH), (1, HEADS, TOKENS, HEAD_DIM))
    rows, weight, heads = (torch.randn(shape, requires_grad=True) for shape in shapes)
    return rows, weight, heads


def _cycle(rows: Tensor, weight: Tensor, heads: Tensor) -> None:
    output = linear(rows, weight)
    torch.autograd.grad(output, (rows, weight), output)
    attended = scaled_dot_product_attention(heads, heads, heads, is_causal=True)
    torch.autograd.grad(attended, heads, attended)


if __name__ == "__main__":
    main(float(sys.argv[1]))
