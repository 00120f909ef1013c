"""FLOPs conventions: what a published TFLOP/s says in tokens/s.

Megatron and NeMo count three products of 2 FLOPs a weight and token, forward and twice backward, and nothing
for recomputation:

    6 (layers x weights of a layer's matrices + hidden x vocabulary) + c x context x layers x heads x D

a token, with c = 12 where attention counts as if every token saw every token ("full"), and c = 6 where it
counts what a causal mask leaves ("half"). 12 s h is 2 products x 2 FLOPs x 3 passes. The same job has one
number of tokens/s in both; so all rows are compared in tokens/s of a GPU, or in seconds.
"""

from __future__ import annotations

from typing import Literal

from megatron_hexi.cost import model_flops
from megatron_hexi.models import Model


def tokens_per_s(tflops: float, model: Model, context: int, counting: Literal["full", "half"]) -> float:
    """Tokens/s of a GPU that does so many model TFLOP/s."""
    return tflops * 1e12 / model_flops(model, context, counting)


def mask_tflops(model: Model, context: int, gpus: int, seconds: float, *, backward: bool) -> float:
    """TFLOP/s of a GPU in one layer's attention, by the area of a causal mask.

    4 x heads x D FLOPs for each pair of a query and a key that it sees, context^2 / 2 of them; 2.5 times that
    backward.
    """
    flops = 4 * model.heads * model.head_dim * context**2 / 2 * (2.5 if backward else 1)
    return flops / gpus / seconds / 1e12
