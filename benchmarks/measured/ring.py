"""Equal ranks: attention by an even plan, by our own ring, and by torch's own ring attention, in turns.

    hexi testbed run scripts/testbed/four-equal.yaml -- -m benchmarks.measured.ring --seq-length 8192

One causal layer, forward and backward, without a model around it; the time of an iteration is that of the
slowest rank. torch's templates rotate keys and values by all-gather or by all-to-all; both are shown.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

try:
    from torch.distributed.tensor.experimental._context_parallel import _attention as torch_ring
except ImportError:  # before torch 2.12
    from torch.distributed.tensor.experimental import _attention as torch_ring  # type: ignore[no-redef]

from megatron_hexi.plan import Schedules, Workload, proportional_plan
from megatron_hexi.runtime import DomainAttention

_TEMPLATES: Any = torch_ring
_FORWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
#: One side of the comparison: the rank's own tokens in, nothing out that is kept.
_Run = Callable[[], object]


def ours(workload: Workload, groups: Sequence[int]) -> _Run:
    """Our attention over groups of so many equal ranks each."""
    plan = proportional_plan(workload, [[[1.0] * size for size in groups]])
    domain, rank, first = plan.replicas[0].domain, dist.get_rank(), 0
    a2a = None
    for size in groups:
        group = dist.new_group(list(range(first, first + size)))
        a2a = group if first <= rank < first + size else a2a
        first += size
    everyone = dist.group.WORLD
    assert everyone is not None
    assert isinstance(a2a, dist.ProcessGroup)
    schedules = Schedules(workload, domain, rank, plan.exchange.parts)
    attention = DomainAttention(workload, schedules, everyone, a2a, plan.exchange.window)
    shapes = [(schedules().tokens, 1, heads, workload.head_dim) for heads in _heads(workload)]

    def run() -> object:
        query, key, value = (torch.randn(shape, requires_grad=True) for shape in shapes)
        output = attention(query, key, value)
        output.backward(torch.ones_like(output))
        return query.grad

    return run


def torchs(workload: Workload, rotation: str) -> _Run:
    """Torch's ring attention, with its balanced (zigzag) order of tokens."""
    everyone = dist.group.WORLD
    tokens, scale = workload.seq_length // dist.get_world_size(), 1 / math.sqrt(workload.head_dim)
    shapes = [(1, heads, tokens, workload.head_dim) for heads in _heads(workload)]

    def forward(query: Tensor, key: Tensor, value: Tensor, **how: object) -> tuple[Tensor, ...]:
        output, log_sum_exp = _FORWARD(query, key, value, 0.0, how["is_causal"], scale=scale)
        return output, log_sum_exp.contiguous()

    def backward(*, query: Tensor, key: Tensor, value: Tensor, **how: Any) -> Any:
        merged = how["out"], how["logsumexp"]
        return _BACKWARD(how["grad_out"], query, key, value, *merged, 0.0, how["is_causal"], scale=scale)

    def run() -> object:
        _TEMPLATES.set_rotate_method(rotation)
        parts = [torch.randn(shape) for shape in shapes]
        merged = _TEMPLATES._templated_ring_attention(everyone, 2, forward, *parts, is_causal=True)[:2]
        return _TEMPLATES._templated_ring_attention_backward(
            everyone, 2, backward, torch.ones_like(merged[0]), "grad_out", *parts, *merged, is_causal=True
        )

    return run


def measure(runs: dict[str, _Run], repeats: int) -> dict[str, list[float]]:
    """Seconds of each repeat on the slowest rank; all sides in turns."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for repeat in range(repeats + 1):
        for name, run in runs.items():
            dist.barrier()
            begin = time.perf_counter()
            run()
            taken = torch.tensor(time.perf_counter() - begin)
            dist.all_reduce(taken, dist.ReduceOp.MAX)
            if repeat:
                times[name].append(float(taken))
    return times


def _heads(workload: Workload) -> tuple[int, int, int]:
    return workload.local_heads, workload.local_kv_heads, workload.local_kv_heads


def main() -> int:
    """Run it under torchrun, on ranks of a multiple of two."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.measured.ring", description=__doc__)
    parser.add_argument("--seq-length", type=int, default=8192)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    dist.init_process_group("gloo")
    ranks = dist.get_world_size()
    workload = Workload(options.seq_length, options.heads, options.heads, options.head_dim)
    runs = {
        "even plan, pairs": ours(workload, [2] * (ranks // 2)),
        "our ring": ours(workload, [1] * ranks),
        "torch's ring, all-to-all": torchs(workload, "alltoall"),
        "torch's ring, all-gather": torchs(workload, "allgather"),
    }
    times = measure(runs, options.repeats)
    if dist.get_rank() == 0:
        medians = {name: statistics.median(some) for name, some in times.items()}
        best = min(seconds for name, seconds in medians.items() if name != "even plan, pairs")
        print(
            json.dumps(
                {"seconds": times, "median_s": medians, "even_over_best": medians["even plan, pairs"] / best}
            )
        )
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
