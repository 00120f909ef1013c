"""Seconds of matrix products by their sizes: m rows, columns in that are summed over, columns out.

A kernel reads both factors while it computes, and writes a tile of the result once the tile is complete:

    product = max(2 m in out / rate(m), bytes of both factors / memory) + bytes of the result / memory

Products of few rows are bound by reading the weights. Products of few columns lose by writing: a result in 16
bits takes as long as R / B more columns would (R FLOP/s, B bytes/s: 235 on an H100). Writing is added and not
overlapped because a tile of 128 x 256, the most efficient size, has a multiprocessor to itself (NVIDIA,
Matrix Multiplication Background User's Guide,
https://docs.nvidia.com/deeplearning/performance/dl-performance-matrix-multiplication/). A sweep of ten
weights by eight numbers of rows on an H100 (docs/results/one-gpu.md) is met within 4 % in the median. It
shows no steps by waves of tiles, which libraries avoid by choosing among tiles, so none are counted.

Each product of a layer has three passes: forward, gradients of inputs and gradients of weights. The last are
added to the optimizer's gradients, which are read and written. Frozen weights have no gradients; an adapter
beside them is a product of columns in to its rank, and one of its rank to columns out. Its result is scaled
and added to the layer's, and the gradients of both inputs are added up, in a kernel each.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from operator import add
from typing import NamedTuple

import numpy as np

from megatron_hexi.cluster import Curve
from megatron_hexi.cost.arrays import Floats
from megatron_hexi.cost.moved_bytes import gradient_bytes
from megatron_hexi.models.job import Job
from megatron_hexi.models.model import Model

#: The linear layer whose products curves are of: what `hexi probe` measures on a GPU (probe/document.py).
CURVE_IN, CURVE_OUT = 4096, 16384
#: The most by which leaving out writes may raise a curve's rate.
_MOST = 2.0


class Times(NamedTuple):
    """Seconds of the forward and of the backward pass."""

    forward: Floats
    backward: Floats


@dataclass(frozen=True)
class Products:
    """Sums over products that run one after the other.

    Args:
        weights: number of weights (in x out) times the part of the rows that the product sees.
        held: number of weights that are read (in x out).
        inputs: number of columns in, times that part.
        outputs: number of columns out, times that part.
    """

    weights: Floats | float = 0.0
    held: Floats | float = 0.0
    inputs: Floats | float = 0.0
    outputs: Floats | float = 0.0

    @classmethod
    def of(cls, inputs: float, outputs: float, part: float = 1.0) -> Products:
        """Return one product, which sees a part of the rows."""
        weights = inputs * outputs
        return cls(part * weights, weights, part * inputs, part * outputs)

    def adapters(self, rank: int) -> Products:
        """Return the products of adapters of a rank beside these."""
        weights = rank * (self.inputs + self.outputs)
        return Products(
            weights, weights * self.held / np.maximum(self.weights, 1.0), self.inputs, self.outputs
        )

    def __add__(self, other: Products) -> Products:
        return Products(*map(add, vars(self).values(), vars(other).values()))

    def __rmul__(self, times: float) -> Products:
        return Products(times * self.weights, times * self.held, times * self.inputs, times * self.outputs)


@dataclass(frozen=True)
class Elements:
    """Bytes of an element of the factors and of the result, and what a weight's gradient reads and writes.

    Args:
        adapters: rank of the adapters beside the weights; ``None``: the weights themselves are trained.
    """

    factor: float
    result: float
    gradient: float
    adapters: int | None = None

    @classmethod
    def of(cls, job: Job, *, in_layer: bool = False, in_fp8: bool = False) -> Elements:
        """Return the bytes in a job's precision.

        Args:
            in_layer: whether the matrices are a layer's, which have the job's adapters.
            in_fp8: whether the factors are cast to fp8.
        """
        factor = 1 if in_fp8 else job.element_bytes
        adapters = job.lora_rank * in_layer if job.lora_rank else None
        return cls(factor, job.element_bytes, gradient_bytes(job), adapters)


def product_seconds(rate: Floats, memory: float, rows: Floats, sizes: Products, elements: Elements) -> Times:
    """Return the seconds of products, for each number of rows; no rows take no time.

    Args:
        rate: FLOP/s of a product without the time in which it writes its result, for each number of rows.
        memory: the memory's bandwidth, bytes/s.
    """
    work = 2 * rows * sizes.weights / rate
    factor, result = elements.factor / memory, elements.result / memory
    some = rows > 0
    held = sizes.held * factor * some
    into, out = rows * sizes.inputs, rows * sizes.outputs
    forward = np.maximum(work, into * factor + held) + out * result
    inputs = np.maximum(work, out * factor + held) + into * result
    if elements.adapters is None:
        weights = np.maximum(work, (into + out) * factor) + sizes.held * elements.gradient / memory * some
        return Times(forward, inputs + weights)
    if not elements.adapters:
        return Times(forward, inputs)
    of_adapters = replace(elements, adapters=None)
    beside = product_seconds(rate, memory, rows, sizes.adapters(elements.adapters), of_adapters)
    # Scaled 2 and added 3 forward; backward scaled 2, and gradients of inputs added up 3.
    return Times(
        forward + beside.forward + 5 * out * result,
        inputs + beside.backward + (2 * out + 3 * into) * result,
    )


def unwritten(curve: Curve, memory: float, element: float) -> Curve:
    """Return a measured curve without the time in which its products write their results.

    Sizes that the curve's source does not give are dropped: `product_seconds` says what few rows take. A
    curve of one size is taken for the rate of many rows.

    Args:
        curve: rates of the three products of a linear layer (`CURVE_IN`, `CURVE_OUT`) by rows.
        memory: bytes/s.
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
    """Return the one-point curve that `unwritten` turns into `rate`, TFLOP/s: its inverse."""
    columns = CURVE_IN + CURVE_OUT
    each = 1 / (rate * 1e12) + columns * element / memory / (6 * CURVE_IN * CURVE_OUT)
    return Curve((1.0,), (1 / each / 1e12,), "")


def layer_products(job: Job) -> Products:
    """Return the products of a layer's matrices on one GPU, without routed experts; layers are of one kind.

    Matrices that every tensor-parallel rank holds whole (the router, latent attention's matrices down) see
    the rows that norms do. Where latent columns travel, the matrix that makes keys and values of them is
    counted inside attention.
    """
    return _layer_products(job.model, job.tensor_parallel, job.row_parts, job.latent_exchange)


@lru_cache(maxsize=1024)
def _layer_products(model: Model, tp: int, row_parts: int, latent_exchange: bool) -> Products:
    found = Products()
    for part in model.parts:
        for matrix in part.matrices(model, tp):
            if not (matrix.expands and latent_exchange):
                seen = 1 / row_parts if matrix.is_whole else 1.0
                found += Products.of(matrix.inputs, matrix.outputs, seen)
    return found
