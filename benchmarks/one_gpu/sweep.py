"""`python -m benchmarks.one_gpu.sweep`: rates of products, grouped products and attention by their sizes.

Prints a JSON object for each shape. What a product takes depends on rows and widths by tiles and waves over
the GPU's multiprocessors; the cost model's rates are held against these.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from itertools import product

import torch
from torch import Tensor

from benchmarks.one_gpu.parts import Deadline, Row, Setting, json_rows, print_rows
from megatron_hexi.probe.compute import attention, clock_for, steady_seconds
from megatron_hexi.probe.document import Sizes, sizes_for
from megatron_hexi.runtime.kernels import KERNELS, select_kernel

#: (in, out) of linear layers: Llama 3 8B and 70B (QKV, projection, MLP), and of small experts.
WIDTHS = (
    *((4096, 6144), (4096, 4096), (4096, 28672), (14336, 4096)),
    *((8192, 10240), (8192, 57344), (28672, 8192)),
    *((1024, 3072), (2048, 1536), (768, 2048)),
)
ROWS = (16, 128, 512, 1024, 2048, 4096, 8192, 16384)
#: (experts, in, out): Qwen3-30B-A3B's, gpt-oss-20b's and Mixtral's first matrices.
EXPERTS = ((128, 2048, 1536), (32, 2880, 5760), (8, 4096, 28672))
ROWS_PER_EXPERT = (16, 64, 256, 1024)
HEADS = (2, 8, 32)
TOKENS = (1024, 2048, 4096, 8192, 16384, 32768)
#: Seconds that one shape may take.
_LIMIT_S = 0.05


def run(setting: Setting, deadline: Deadline) -> Iterator[Row]:
    """Measure all shapes in a process of its own, each kind of work in turn."""
    device = ("--device", "cpu", "--tiny") if setting.is_dry else ("--device", "cuda")
    yield from json_rows("benchmarks.one_gpu.sweep", device, deadline)


def products(device: torch.device, tiny: bool) -> Iterator[Row]:
    """The three products of a linear layer in training."""
    rows, widths = ((4,), ((8, 16),)) if tiny else (ROWS, WIDTHS)
    clock = clock_for(device)
    for (inner, outer), count in product(widths, rows):
        x, weight, grad = (
            torch.randn(*shape, device=device, dtype=torch.bfloat16)
            for shape in ((count, inner), (outer, inner), (count, outer))
        )
        ways: dict[str, Callable[[], Tensor]] = {
            "forward": lambda x=x, weight=weight: x @ weight.t(),  # type: ignore[misc]
            "input": lambda grad=grad, weight=weight: grad @ weight,  # type: ignore[misc]
            "weight": lambda grad=grad, x=x: grad.t() @ x,  # type: ignore[misc]
        }
        flops = 2 * count * inner * outer
        rates = {way: flops / steady_seconds(work, clock, _LIMIT_S) / 1e12 for way, work in ways.items()}
        yield {"kind": "product", "rows": count, "in": inner, "out": outer, "tflops": _rounded(rates)}


def grouped_products(device: torch.device, tiny: bool) -> Iterator[Row]:
    """The forward product of experts, all with equally many rows."""
    rows, experts = ((4,), ((2, 16, 16),)) if tiny else (ROWS_PER_EXPERT, EXPERTS)
    clock = clock_for(device)
    for (count, inner, outer), each in product(experts, rows):
        x = torch.randn(count * each, inner, device=device, dtype=torch.bfloat16)
        weight = torch.randn(count, outer, inner, device=device, dtype=torch.bfloat16)
        ends = torch.arange(1, count + 1, device=device, dtype=torch.int32) * each

        def work(x: Tensor = x, weight: Tensor = weight, ends: Tensor = ends) -> Tensor:
            return torch.nn.functional.grouped_mm(x, weight.transpose(1, 2), offs=ends)

        flops = 2 * count * each * inner * outer
        rate = {"forward": flops / steady_seconds(work, clock, _LIMIT_S) / 1e12}
        shape = {"experts": count, "rows": each, "in": inner, "out": outer}
        yield {"kind": "grouped product", **shape, "tflops": _rounded(rate)}


def attentions(device: torch.device, tiny: bool) -> Iterator[Row]:
    """Blocks of attention by kernel, heads and length, heads of 128."""
    heads, tokens = ((2,), (64,)) if tiny else (HEADS, TOKENS)
    clock = clock_for(device)
    for kernel in KERNELS:
        if kernel.refuses(device, torch.bfloat16, 128) is not None or kernel.name == "math":
            continue
        chosen = select_kernel(kernel.name, device, torch.bfloat16, 128)
        for count, length in product(heads, tokens):
            sizes = _sizes(count)
            rates = {}
            for mask, way in product(("causal", "full"), ("forward", "backward")):
                prepare = attention(
                    chosen, sizes, device, torch.bfloat16, causal=mask == "causal", backward=way == "backward"
                )
                seconds = steady_seconds(prepare(length), clock, _LIMIT_S)
                rates[f"{mask} {way}"] = sizes.attention_flops(mask, way, length) / seconds / 1e12
            shape = {"kernel": kernel.name, "heads": count, "tokens": length}
            yield {"kind": "attention", **shape, "tflops": _rounded(rates)}


def _sizes(heads: int) -> Sizes:
    from dataclasses import replace

    from megatron_hexi.probe.document import Options

    return replace(sizes_for(Options(precision="bf16"), "cuda"), heads=heads, head_dim=128)


def _rounded(rates: dict[str, float]) -> dict[str, float]:
    return {name: float(f"{rate:.4g}") for name, rate in rates.items()}


if __name__ == "__main__":
    sys.exit(print_rows(__doc__, (products, grouped_products, attentions), seconds=120))
