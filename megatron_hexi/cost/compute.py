"""Seconds of computation on a GPU, phase by phase. Times are seconds of one micro-batch, sizes may be arrays.

Each phase is matrix or attention work over an achieved rate, plus bytes over the bandwidth of the GPU's
memory. Nothing overlaps inside a GPU: kernels run one after the other. D is the size of a head's query and
key, V that of its value.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from megatron_hexi.cluster import Curve, Device, PassCurves
from megatron_hexi.cost.arrays import Floats
from megatron_hexi.cost.documents import packed_in
from megatron_hexi.cost.fp8 import cast_bytes, copies
from megatron_hexi.cost.moved_bytes import HBM_SHARE, layer_elements, loss_bytes, step_bytes, vocabulary
from megatron_hexi.cost.products import (
    Elements,
    Products,
    Times,
    layer_products,
    product_seconds,
    unwritten,
)
from megatron_hexi.errors import ClusterError
from megatron_hexi.models.job import Job
from megatron_hexi.plan.terms import WIDEST_HEADS, kernel_on

#: Attention curves count the backward pass as this many forward passes (cluster/device.py).
ATTENTION_BACKWARD = 2.5
#: Heads below 128 lose (D / 128) ** this. Forward, full, 16k tokens, H100: head size 64 over 128 is 324 / 370
#: (FlashAttention-2), 413 / 595 (cuDNN), 497 / 648 (FlashAttention-3); mean 0.779 = 0.5 ** 0.36. Above 128
#: nothing is gained: 642 / 648 at 256 (all: FlashAttention-3 paper, arXiv 2407.08608, figure 5).
HEAD_SIZE_EXPONENT = 0.36
CURVE_HEAD_DIM = 128


@dataclass(frozen=True)
class Speeds:
    """A GPU's rates for a job: curves in its precision and head size, and memory bandwidth (bytes/s).

    Args:
        matmul: FLOP/s of the layers' matrix products, without the time to write results (`unwritten`).
        output: likewise for the vocabulary's matrix, which stays in 16 bits where layers are in fp8.
        causal: FLOP/s of causal attention.
        full: FLOP/s of attention without a mask.
        memory: bandwidth of the GPU's memory that kernels reach, bytes/s.
        call_s: seconds that the host takes to call an operation.
        fp8_copies: bytes of fp8 copies of a weight of the layers' matrices (`fp8.copies`); 0: none is in fp8.
    """

    matmul: Curve
    output: Curve
    causal: PassCurves
    full: PassCurves
    memory: float
    call_s: float = 0.0
    fp8_copies: float = 0.0

    @property
    def in_fp8(self) -> bool:
        """Whether the layers' matrices are multiplied in fp8."""
        return self.fp8_copies > 0

    def of_layers(self, job: Job) -> Speeds:
        """Return the rates for layers of one kind, which may stay in bf16 in a job in fp8."""
        if job.precision == "fp8" or not self.in_fp8:
            return self
        return replace(self, matmul=self.output, fp8_copies=0.0)


def device_speeds(device: Device, job: Job) -> Speeds:
    """Return the rates that a GPU achieves in a job.

    Curves are in bf16 (fp16 where there is no bf16); both 16-bit types run alike. fp32 is slower by the
    ratio of the nominal rates, matrix products and attention alike. fp8 is matrix products in fp8 where the
    GPU has a rate by the job's recipe, else in bf16; attention and the output matrix stay in bf16, as with
    Megatron's --fp8-format. The catalogue's rates of matrix products are the best of many shapes; layers
    reach a share of them (cluster/data/devices.yaml).

    Raises:
        ClusterError: the GPU lacks the precision or curves for the kernel, or the kernel takes no such heads.
    """
    precision = "bf16" if job.precision == "fp8" else job.precision
    rate = getattr(device.nominal, precision)
    if rate is None:
        known = [name for name in ("bf16", "fp16", "fp32") if getattr(device.nominal, name) is not None]
        raise ClusterError(f"{device.name}: no {precision} on this GPU; use precision {' or '.join(known)}")
    half = device.nominal.bf16 or device.nominal.fp16 or rate
    factor = rate / half if job.precision == "fp32" else 1.0
    heads = factor * head_size_factor(job.model.kernel_dim)
    chosen = kernel_on(job.kernel, device.name)
    if chosen is not None and job.model.kernel_dim > WIDEST_HEADS.get(chosen, job.model.kernel_dim):
        raise ClusterError(
            f"--kernel {chosen}: takes heads of up to {WIDEST_HEADS[chosen]} columns, those of "
            f"{job.model.name} have {job.model.kernel_dim}; choose another of {', '.join(device.kernels)}"
        )
    attention = device.attention(chosen).map(lambda curve: curve.scaled(heads))
    memory = device.memory_gb_s * 1e9 * HBM_SHARE
    output = unwritten(device.layer_matmul.scaled(factor), memory, job.element_bytes)
    in_fp8 = device.fp8_matmul(job.fp8_recipe) if job.precision == "fp8" else None
    if in_fp8 is not None:
        in_fp8 = unwritten(in_fp8.scaled(device.layer_share), memory, job.element_bytes)
    return Speeds(
        matmul=output if in_fp8 is None else in_fp8,
        output=output,
        causal=attention.causal,
        full=attention.full,
        memory=memory,
        call_s=device.call_us * 1e-6,
        fp8_copies=0.0 if in_fp8 is None else copies(device, job.fp8_recipe),
    )


def head_size_factor(head_dim: int) -> float:
    """Return the fraction of a curve's rate, measured with heads of 128, that heads of this size reach."""
    return min(1.0, (head_dim / CURVE_HEAD_DIM) ** HEAD_SIZE_EXPONENT)


def rates(curve: Curve, sizes: Floats) -> Floats:
    """Return the FLOP/s at many sizes: `Curve.rate` for arrays."""
    return _rates(curve, _logs(sizes))


def layer_factors(speeds: Speeds, job: Job) -> Elements:
    """Return the bytes of an element of a layer's matrices on a GPU."""
    return Elements.of(job, in_layer=True, in_fp8=speeds.in_fp8)


def token_times(speeds: Speeds, job: Job, rows: Floats) -> Times:
    """Return the seconds of one layer outside attention, for `rows` = B x T rows: products and memory."""
    speeds = speeds.of_layers(job)
    products = product_seconds(
        rates(speeds.matmul, rows), speeds.memory, rows, layer_products(job), layer_factors(speeds, job)
    )
    forward, backward = layer_elements(job, speeds.fp8_copies)
    memory = rows * job.element_bytes / speeds.memory
    return Times(products.forward + forward * memory, products.backward + backward * memory)


def own_block_times(
    speeds: Speeds, job: Job, tokens: Floats, causal: bool, pairs: Floats | None = None
) -> Times:
    """Return the seconds of one head's attention over its own group's G tokens.

    Area G^2 / 2 causal, G^2 full, at size G. In packed documents, the sum over the documents' own parts of G.

    In a window of w keys: area (w - 1/2) G - w (w - 1) / 2, at size w, because kernel calls consist of
    squares of that size; `edge_times` of all queries but w are added.

    Args:
        pairs: number of visible pairs of query and key in a sequence of one document, in the window that
            corresponds to that in each class of documents, [classes, ...]; ``None``: the group's segments are
            contiguous. An area contains half of each query's pair with itself.
    """
    span = job.model.span
    if not causal:
        return _attention(speeds.full, job, tokens**2, tokens)
    forward = backward = np.zeros(np.shape(tokens))
    for number, packed in enumerate(packed_in(job, tokens)):
        count, own = packed.own(tokens, job.seq_length)
        if span.size >= job.seq_length:
            found = _attention(speeds.causal, job, count * own**2 / 2, own)
        else:
            size = np.minimum(own, span.size)
            visible = count * (size * own - size * (size - 1) / 2)
            if pairs is not None:
                visible = np.where(packed.is_cut, packed.share * packed.part * pairs[number], visible)
            blocks = _attention(speeds.causal, job, visible - count * own / 2, size)
            edges = edge_times(speeds, job, count * (own - size))
            found = Times(blocks.forward + edges.forward, blocks.backward + edges.backward)
        forward, backward = forward + found.forward, backward + found.backward
    return Times(forward, backward)


def expansion_times(speeds: Speeds, job: Job, keys: Floats, merged: bool = False) -> Times:
    """Return the seconds to compute one head's keys and values from latent columns that were received.

    forward:  the product of B S rows, C to N + V, and bytes of columns put together, 2 (D + V)
    backward: made again, and two products for the gradients of columns and matrix; bytes 4 (D + V)

    Args:
        merged: whether gradients of several blocks are added up first, as in a step of the exchange: bytes of
            an element of B (D + V) S, zeroed 4, added 8 + e, cast 4 + e.
    """
    speeds, rows = speeds.of_layers(job), job.micro_batch_size * keys
    matrix = job.model.attention.expansion(job.model)
    product = product_seconds(
        rates(speeds.matmul, rows),
        speeds.memory,
        rows,
        Products.of(matrix.inputs, matrix.outputs),
        layer_factors(speeds, job),
    )
    columns = job.model.head_dim + job.model.value_dim
    memory = 2 * columns * rows * job.element_bytes / speeds.memory
    added = (16 + 2 * job.element_bytes) * columns * rows / speeds.memory if merged else 0.0
    return Times(product.forward + memory, product.forward + product.backward + 2 * memory + added)


def edge_times(speeds: Speeds, job: Job, queries: Floats) -> Times:
    """Return the seconds of a window's edge besides its products, for one query head.

    Its blocks are triangles of copied rows in reverse order, whose results are added to those of neighbouring
    blocks (runtime/call_rows.py, runtime/sums.py). Elements, k / h KV heads to a query head:
    forward:  query copied 2 D, keys and values 2 (D + V) k / h, two outputs added up 3 V
    backward: query, output and its gradient copied 2 D + 4 V, keys and values 2 (D + V) k / h, two gradients
    of each added up 3 D + 3 (D + V) k / h
    """
    model = job.model
    keys = (model.head_dim + model.value_dim) * model.kv_heads / model.heads
    forward = 2 * model.head_dim + 3 * model.value_dim + 2 * keys
    backward = 5 * model.head_dim + 4 * model.value_dim + 5 * keys
    copied = job.micro_batch_size * job.element_bytes / speeds.memory * queries
    return Times(forward * copied, backward * copied)


def rectangle_times(
    speeds: Speeds, job: Job, queries: Floats, keys: Floats, tokens: Floats | float = 0.0
) -> Times:
    """Return the seconds of one head's attention of q queries to k keys of another group, without a mask.

    Curves are measured on squares only, so a rectangle counts as a square of the same area q k, at size
    sqrt(q k), or in a window at its size if that is less. In packed documents, each that is cut has a smaller
    copy of the rectangle; in a window q k are the pairs of all of them.

    Args:
        tokens: tokens of the queries' groups, by which documents are cut where they are dealt out.
    """
    area, span = queries * keys, job.model.span
    side = np.sqrt(area)
    if span.size < job.seq_length:
        widest = sum(share * min(length, span.size) for share, length in job.packed)
        return _attention(speeds.full, job, area, np.minimum(side, widest))
    forward = backward = np.zeros(np.broadcast_shapes(area.shape, np.shape(tokens)))
    for share, part, is_cut in packed_in(job, tokens):
        found = _attention(speeds.full, job, share * part * is_cut * area, part * side)
        forward, backward = forward + found.forward, backward + found.backward
    return Times(forward, backward)


def square_times(speeds: Speeds, job: Job, area: Floats, size: float) -> Times:
    """Return the seconds of one head's attention without a mask in squares of one size.

    Args:
        area: number of pairs of query and key in all squares.
        size: number of queries of a square.
    """
    return _attention(speeds.full, job, area, np.full(np.shape(area), size))


def _attention(curves: PassCurves, job: Job, area: Floats, size: Floats) -> Times:
    """Return the seconds of attention: 4 B max(D, V) area FLOPs forward, 2.5 times that backward."""
    flops, logs = 4 * job.micro_batch_size * job.model.kernel_dim * area, _logs(size)
    return Times(
        flops / _rates(curves.forward, logs), ATTENTION_BACKWARD * flops / _rates(curves.backward, logs)
    )


def merge_times(speeds: Speeds, job: Job, queries: Floats) -> Times:
    """Return the seconds of adding up one exchange step's results in fp32, for one query head.

    Bytes as in runtime/attention_blocks.py and runtime/attention.py, e bytes an element:
    forward:  output scaled 8, its new part scaled and added 8 + e: (16 + e) B V q
    backward: query gradient added (8 + e) B D q
    `keys_merge_times` gives the seconds for each KV head.
    """
    element, model = job.element_bytes, job.model
    outputs, gradients = (
        job.micro_batch_size * columns / speeds.memory for columns in (model.value_dim, model.head_dim)
    )
    return Times((16 + element) * queries * outputs, (8 + element) * queries * gradients)


def keys_merge_times(speeds: Speeds, job: Job, keys: Floats) -> Floats:
    """Return the seconds of adding up one KV head's gradients of the keys received in one exchange step.

    Bytes of each element of B (D + V) keys: zeroed 4, added 8 + e, cast 4 + e, added at the owner 8 + e.
    Where latent columns travel, B (C + R) keys.
    """
    columns = job.micro_batch_size * job.exchanged_columns
    return (24 + 3 * job.element_bytes) * columns * keys / speeds.memory


def logits_times(speeds: Speeds, job: Job, rows: Floats) -> Times:
    """Return the seconds of the output matrix and of cross entropy, with V words of the vocabulary on a GPU.

    These are a product of h to V, and `loss_bytes`. Each block of multi-token prediction repeats both, and
    has a projection of 2 h to h before its layer.
    """
    matrix, inner = output_products(job)
    output = product_seconds(rates(speeds.output, rows), speeds.memory, rows, matrix, Elements.of(job))
    forward, backward = (
        seconds + size * rows / speeds.memory for seconds, size in zip(output, loss_bytes(job), strict=True)
    )
    for projection in [inner] * job.model.mtp_layers:
        more = product_seconds(
            rates(speeds.matmul, rows), speeds.memory, rows, projection, layer_factors(speeds, job)
        )
        forward, backward = forward + more.forward, backward + more.backward
    return Times(forward, backward)


def output_products(job: Job) -> tuple[Products, Products]:
    """Return the products of the output matrix, one a loss, and of a projection of multi-token prediction."""
    hidden, blocks = job.model.hidden_size, job.model.mtp_layers
    return (
        (1 + blocks) * Products.of(hidden, vocabulary(job)),
        Products.of(2 * hidden, hidden / job.tensor_parallel),
    )


def optimizer_seconds[N: (float, Floats)](
    speeds: Speeds, job: Job, params: N, shard: N, copied: N | float = 0.0
) -> N:
    """Return the seconds of a training step on gradients and weights (`step_bytes`), bound by memory.

    Args:
        shard: number of weights whose optimizer state it holds.
        copied: number of weights of which copies in fp8 are made, if the GPU computes in fp8.
    """
    each, of_shard = step_bytes(job)
    copy = cast_bytes(job.fp8_recipe, speeds.fp8_copies) if speeds.in_fp8 else 0
    return (each * params + of_shard * shard + job.trained_share * copy * copied) / speeds.memory


def _logs(sizes: Floats) -> Floats:
    logs: Floats = np.log(np.maximum(sizes, 1.0))
    return logs


def _rates(curve: Curve, logs: Floats) -> Floats:
    return np.interp(logs, *curve.points)
