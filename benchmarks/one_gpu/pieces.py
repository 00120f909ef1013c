"""`python -m benchmarks.one_gpu.pieces`: parts of an attention layer: copies, sums, blocks, host time.

Prints a JSON object for each: Triton's copies and sums beside the same in torch; all blocks of a rank over
one kernel call of the same area; and with blocks so small that the GPU waits, the time of the host.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict
from functools import partial
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from benchmarks.blocks import measure
from benchmarks.one_gpu.parts import Deadline, Row, Setting, json_rows, print_rows
from megatron_hexi.plan import Workload, proportional_plan
from megatron_hexi.probe.compute import clock_for, steady_seconds
from megatron_hexi.runtime.call_rows import Rows
from megatron_hexi.runtime.fused import on_gpu, plain
from megatron_hexi.runtime.fused.plain import Slot

_LIMIT_S = 0.3
_BF16 = torch.bfloat16
#: (tokens, heads) of a rank, heads of 128.
SHAPES = ((4096, 8), (32768, 8), (65536, 16))


def run(setting: Setting, deadline: Deadline) -> Iterator[Row]:
    """Measure in a process of its own."""
    device = ("--device", "cpu", "--tiny") if setting.is_dry else ("--device", "cuda")
    yield from json_rows("benchmarks.one_gpu.pieces", device, deadline)


def copies_and_sums(device: torch.device, tiny: bool) -> Iterator[Row]:
    """Each fused operation by Triton and by torch; on a CPU by torch alone."""
    clock = clock_for(device)
    ways = {"torch": plain} | ({"triton": on_gpu} if device.type == "cuda" else {})
    for tokens, heads in ((64, 2),) if tiny else SHAPES:
        for name, operation in _operations(device, tokens, heads, ways.values()).items():
            seconds = {
                key: steady_seconds(partial(operation, way), clock, _LIMIT_S) for key, way in ways.items()
            }
            microseconds = {key: round(1e6 * value, 2) for key, value in seconds.items()}
            yield {"kind": "operation", "name": name, "tokens": tokens, "heads": heads, "us": microseconds}


def _operations(
    device: torch.device, tokens: int, heads: int, ways: Iterable[ModuleType]
) -> dict[str, Callable[[Any], None]]:
    """The operations of some size; each takes the module that carries it out."""
    value, part = (_made(device, 1, heads, count, 128) for count in (tokens, tokens // 2))
    lse, part_lse = (torch.randn(tensor.shape[:3], device=device) for tensor in (value, part))
    index = torch.arange(0, tokens, 2, device=device)
    whole, half, some = Rows((0, tokens)), Rows((0, tokens // 2)), Rows((0, tokens), index)
    shard = _made(device, tokens, 1, heads, 128)
    flat, slot = torch.empty_like(shard).flatten(), Slot(0, (0, heads), 128, 0, heads * 128)
    out, out_lse, taken = torch.empty_like(value), torch.empty_like(lse), torch.empty_like(part)
    rows, values, nothing = (whole, half), (value, part), (None, None, None)
    packing = {way: way.make_pack([slot], [heads], device) for way in ways}
    return {
        "merge two attentions": lambda way: way.combine(rows, out, out_lse, *nothing, *values, lse, part_lse),
        "add half to a gradient": lambda way: way.combine(rows, out, None, *nothing, *values),
        "take every second row": lambda way: way.copy_rows(some, taken, value),
        "pack for the all-to-all": lambda way: packing[way](flat, shard),
    }


def blocks(device: torch.device, tiny: bool) -> Iterator[Row]:
    """Attention of two groups of two ranks without a wire: long, and short ones that the host bounds."""
    lengths = {"short": (512, 5)} if tiny else {"long": (65536, 5), "short": (2048, 30)}
    for name, (tokens, repeats) in lengths.items():
        plan = proportional_plan(Workload(tokens, 32, 8, 128), [[[1, 1], [3, 1]]])
        for row in measure(plan, device, torch.float32 if tiny else _BF16, "auto", repeats):
            yield {"kind": "blocks", "name": name, "tokens": tokens, **asdict(row)}


def _made(device: torch.device, *shape: int) -> Tensor:
    return torch.randn(shape, device=device, dtype=_BF16)


if __name__ == "__main__":
    sys.exit(print_rows(__doc__, (copies_and_sums, blocks), seconds=60))
