"""Seconds of matrix products by their sizes: m rows, in columns summed over, out columns made.

A kernel reads both factors while it computes, and writes its result when a tile of it is done:

    product = max(2 m in out / rate(m), bytes of both factors / memory) + bytes of the result / memory

So short products are bound by reading the weights, and products of few columns in or out lose by writing: of
a result in 16 bits as much as another 2 R / 2 B columns would take (R FLOP/s, B bytes/s: 260 on an H100).
That tiles are written behind what is computed, not beside it, is how a tile of 128 x 256 fills the shared
memory of a multiprocessor alone (NVIDIA, Matrix Multiplication Background User's Guide,
https://docs.nvidia.com/deeplearning/performance/dl-performance-matrix-multiplication/). Beside the sweep of
13 weights by 8 numbers of rows on an H100 (docs/results/one-gpu.md), tests compare. Waves of tiles count
nothing: libraries choose among tiles, and that sweep shows no steps.

A layer has three passes of each: forward, gradients of inputs, gradients of weights. These are added to a sum
in the optimizer's gradients, which is read and written.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from megatron_hexi.cluster import Curve
from megatron_hexi.cost.arrays import Floats
from megatron_hexi.cost.job import Job
from megatron_hexi.cost.memory import GRADIENT_BYTES
from megatron_hexi.cost.model import Model

#: The linear layer whose products curves are of: what `hexi probe` measures on a GPU (probe/sizes.py).
CURVE_IN, CURVE_OUT = 4096, 16384
#: Of a curve's rate, the most that a product may reach where writing is left out.
_MOST = 2.0


class Times(NamedTuple):
    """Seconds of the two directions."""

    forward: Floats
    backward: Floats


@dataclass(frozen=True)
class Products:
    """Sizes of products that follow each other, added up.

    Args:
        weights: of which each row takes part in a product: in x out.
        held: weights that are read; more, where a rank has a part of the rows.
        inputs: columns in.
        outputs: columns out.
    """

    weights: Floats | float = 0.0
    held: Floats | float = 0.0
    inputs: Floats | float = 0.0
    outputs: Floats | float = 0.0

    @classmethod
    def of(cls, inputs: float, outputs: float, part: float = 1.0) -> Products:
        """One product, of a part of the rows."""
        weights = inputs * outputs
        return cls(part * weights, weights, part * inputs, part * outputs)

    def __add__(self, other: Products) -> Products:
        return Products(
            self.weights + other.weights,
            self.held + other.held,
            self.inputs + other.inputs,
            self.outputs + other.outputs,
        )

    def __rmul__(self, times: float) -> Products:
        return Products(times * self.weights, times * self.held, times * self.inputs, times * self.outputs)


@dataclass(frozen=True)
class Elements:
    """Bytes of an element: of factors, of results, and of a weight's gradient read and written."""

    factor: float
    result: float
    gradient: float

    @classmethod
    def of(cls, job: Job, *, in_fp8: bool = False) -> Elements:
        """Those of a job; of matrices that are in fp8 where the job is."""
        factor = 1 if in_fp8 and job.precision == "fp8" else job.element_bytes
        return cls(factor, job.element_bytes, 2 * GRADIENT_BYTES[job.precision])


def product_seconds(rate: Floats, memory: float, rows: Floats, sizes: Products, elements: Elements) -> Times:
    """Seconds of products, of each number of rows; no rows take none.

    Args:
        rate: FLOP/s that a product reaches apart from what it writes.
        memory: bytes/s.
        rows: m.
        sizes: of the products.
        elements: their bytes.
    """
    work = 2 * rows * sizes.weights / rate
    factor, result = elements.factor / memory, elements.result / memory
    some = rows > 0
    held = sizes.held * factor * some
    into, out = rows * sizes.inputs, rows * sizes.outputs
    forward = np.maximum(work, into * factor + held) + out * result
    inputs = np.maximum(work, out * factor + held) + into * result
    weights = np.maximum(work, (into + out) * factor) + sizes.held * elements.gradient / memory * some
    return Times(forward, inputs + weights)


def row_seconds(memory: float, sizes: Products, elements: Elements) -> Times:
    """Seconds of a row beside its FLOPs, 2 and 4 a weight: with these no more than of any number of rows."""
    result = elements.result / memory
    return Times(sizes.outputs * result, sizes.inputs * result)


def unwritten(curve: Curve, memory: float, element: float) -> Curve:
    """The rates of a measured curve apart from what the products that it is of write.

    Of sizes that the curve's source does not give nothing is kept: `product_seconds` says what few rows take.
    A curve of one size says what many rows reach.

    Args:
        curve: rates of the three products of a linear layer (`CURVE_IN`, `CURVE_OUT`) by rows.
        memory: bytes/s.
        element: bytes of a result's element.
    """
    given = [place for place, size in enumerate(curve.sizes) if size >= curve.given_from] or [-1]
    sizes = tuple(curve.sizes[place] for place in given)
    weights, columns = CURVE_IN * CURVE_OUT, CURVE_IN + CURVE_OUT
    rates = []
    for place, size in zip(given, sizes, strict=True):
        rows = np.inf if len(sizes) == 1 else size
        written = (columns + weights / rows) * element / memory / (6 * weights)  # of a FLOP
        each = max(1 / (curve.rates[place] * 1e12) - written, 1 / (_MOST * curve.rates[place] * 1e12))
        rates.append(1 / each / 1e12)
    return replace(curve, sizes=sizes, rates=tuple(rates))


def written(rate: float, memory: float, element: float) -> Curve:
    """The curve of one size of which `unwritten` says this rate, TFLOP/s."""
    columns = CURVE_IN + CURVE_OUT
    each = 1 / (rate * 1e12) + columns * element / memory / (6 * CURVE_IN * CURVE_OUT)
    return Curve((1.0,), (1 / each / 1e12,), "")


def layer_products(job: Job) -> Products:
    """The products of a layer's matrices on one GPU, without routed experts, layers of one kind.

    Matrices that every tensor-parallel rank has see the rows that norms do. Where latent columns travel, the
    matrix that makes keys and values of them is counted inside attention.
    """
    return _layer_products(job.model, job.tensor_parallel, job.row_parts, job.latent_exchange)


@lru_cache(maxsize=1024)
def _layer_products(model: Model, tp: int, row_parts: int, latent_exchange: bool) -> Products:
    hidden, heads, kv_heads = model.hidden_size, model.heads // tp, max(1, model.kv_heads // tp)
    found = Products.of(heads * model.value_dim, hidden)
    if model.latent is None:
        found += Products.of(hidden, model.head_dim * ((1 + model.output_gate) * heads + 2 * kv_heads))
    else:
        latent = model.latent
        down = latent.kv_rank + latent.rotary_dim + (latent.query_rank or 0)
        found += Products.of(hidden, down, 1 / row_parts)
        found += Products.of(latent.query_rank or hidden, heads * model.head_dim)
        if not latent_exchange:
            found += Products.of(latent.kv_rank, heads * model.expansion_params // latent.kv_rank)
    if model.experts is not None:
        found += Products.of(hidden, model.experts.count)
    if model.mlp_width:
        width = model.mlp_width / tp
        found += Products.of(hidden, (1 + model.gated) * width) + Products.of(width, hidden)
    return found
