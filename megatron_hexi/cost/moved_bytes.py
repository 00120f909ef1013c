"""Bytes that the kernels beside matrix products and attention read and write: they are bound by memory.

Each kernel reads its inputs once and writes its outputs once. Counted are Megatron-core 0.19's operations
with Transformer Engine, or where the job leaves them unfused (`Job.unfused`) those of Megatron's own modules,
as torch's dispatcher sees them. Small operations (masks, sums of a row, positions) count nothing, nor do
dropout, the embedding's look-up and its gradients.

Shape letters: h hidden size, f MLP width, H heads and K KV heads of D columns, V logits, e bytes an element.
Tensor-parallel ranks share f, H, K and V, and with sequence parallelism h.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

from megatron_hexi.cost.fp8 import CAST_SHARE, cast_bytes
from megatron_hexi.cost.memory import weight_bytes
from megatron_hexi.kinds.part import Columns
from megatron_hexi.models.job import Fusible, Job

#: Part of a memory's nominal bandwidth that streaming kernels reach. An estimate: BabelStream's triad reaches
#: about 90 % on A100 and H100 (https://github.com/UoB-HPC/BabelStream).
HBM_SHARE = 0.9
#: Factor on the bytes of casts to fp8, counted as those of kernels that stream.
CAST_PACE = HBM_SHARE / CAST_SHARE


class Ways(NamedTuple):
    """Elements or bytes of the two directions."""

    forward: float
    backward: float


#: Elements a column that rotary embeddings read and write in one kernel, and in torch's: negated half 1, put
#: together 2, times cosine 2 and sine 2, added 3, put together with columns that do not turn 2; backward
#: likewise, with zeros 1 and an addition 3 for these in place of the last 2 (rope_utils.py).
_ROTARY, _ROTARY_UNFUSED = Ways(2, 2), Ways(12, 14)
#: Elements a column of a norm. torch's takes gradients of inputs and of weights in kernels of their own
#: (layer_norm_kernel.cu), each of which reads the input and the output's gradient.
_NORM, _NORM_UNFUSED = Ways(2, 3), Ways(2, 5)
#: Elements a column of an activation, and of one with a gate. Apart: a gate's are the activation 2, its
#: product 3; backward two products 6, the activation 3, both put together 4.
_ACTIVATION, _GATED, _GATED_UNFUSED = Ways(2, 3), Ways(3, 5), Ways(5, 13)


def layer_elements(job: Job, fp8_copies: float = 0.0) -> Ways:
    """Return the elements that a row of one layer reads and writes outside matrices and attention.

    forward:  two norms 4 h, two residual additions 6 h, activation 2 f (gated 3 f), rotary 2 (H + K) D, and
              queries of grouped heads copied 2 H D
    backward: norms 6 h, gradients of residuals 6 h, activation 3 f (gated 5 f), rotary 2 (H + K) D, and
              gradients of queries, keys and values put together 2 (H + 2 K) D
    a gate of attention's output: 3 H D forward, 5 H D backward, as that of the activation
    norms behind attention and MLP: 4 h more forward, 6 h backward; norms of c other columns 2 c and 3 c
    The columns of other parts are in their `row_columns`; layers of one part have half of norms and
    residual additions.

    fp8 casts (`fp8.cast_bytes`) what no kernel before it casts on its way: the inputs of projection and
    second MLP matrix, H D and f, forward; the gradients of query, key and value (H + 2 K) D, of the first MLP
    matrix f (gated 2 f) and of both residual additions 2 h backward. Transformer Engine's norms cast their
    own output by ``delayed`` and ``mxfp8``, for other recipes a kernel behind them does; the activation is
    Megatron's (fusions/fused_bias_swiglu.py), in 16 bits.

    Args:
        fp8_copies: bytes of an element's copies in fp8; 0: matrices are not in fp8.
    """
    model, columns = job.model, job.columns
    hidden = len(model.parts) * model.hidden_size / job.row_parts
    normed = (1 + model.post_norms) * hidden + columns.normed
    forward, backward = (3 * hidden + one for one in _elements(job, columns, normed))
    if fp8_copies:
        pace, recipe = CAST_PACE / job.element_bytes, job.fp8_recipe
        cast = pace * cast_bytes(recipe, fp8_copies)
        forward += cast * columns.inputs
        backward += cast * (columns.outputs + hidden)
        if recipe not in ("delayed", "mxfp8"):
            forward += pace * cast_bytes(recipe, fp8_copies, after_norm=True) * hidden
    return Ways(forward, backward)


def forward_elements(job: Job, columns: Columns, normed: float, fp8_copies: float) -> float:
    """Return the elements that the forward pass of a part of a layer reads and writes outside matrices.

    Args:
        columns: columns of a row in the part.
        normed: columns of norms of the hidden state.
        fp8_copies: see `layer_elements`.
    """
    cast = CAST_PACE / job.element_bytes * cast_bytes(job.fp8_recipe, fp8_copies) if fp8_copies else 0.0
    return _elements(job, columns, normed).forward + cast * columns.inputs


def _elements(job: Job, columns: Columns, normed: float) -> Ways:
    """Return the elements of `columns` of a row, and of `normed` ones of the hidden state, without casts."""
    norm = _apart(job, "norms", _NORM, _NORM_UNFUSED)
    rotary = _apart(job, "rotary", _ROTARY, _ROTARY_UNFUSED)
    activation = activation_elements(job)
    copied = columns.copied, columns.copied_back
    forward, backward = (
        norm[way] * normed
        + activation[way] * columns.activated
        + rotary[way] * columns.turned
        + _ROTARY_UNFUSED[way] * columns.turned_apart
        + copied[way]
        + _GATED[way] * columns.gated
        for way in range(2)
    )
    return Ways(forward, backward)


def activation_elements(job: Job) -> Ways:
    """Return the elements that the activation of an MLP, with its gate, reads and writes for a column."""
    return _apart(job, "activation", _GATED, _GATED_UNFUSED) if job.model.gated else _ACTIVATION


def routed_activation(job: Job) -> Ways:
    """Return those of an expert's activation, which weighs by probabilities (fused_bias_swiglu.py).

    The gradients of probabilities are a sum over columns, which reads the inputs and the gradient again.
    """
    forward, backward = activation_elements(job)
    return Ways(forward, backward + 2 + job.model.gated)


def routed_elements(job: Job, *, in_fp8: bool = False) -> Ways:
    """Return the elements that a row of one of k experts reads and writes outside products, times h.

    Megatron's alltoall dispatcher (moe_utils.py) gathers rows from tokens, sorts them by expert, sorts the
    results back and adds them up in tokens. In one kernel gathering and adding up touch each token once,
    1 + 1 / k; a sort 2. Apart, index_select gathers with 2, and scatter_add_ clears the tokens 1 / k, reads a
    row and its sum and writes the sum 3; backward the other way round.
    fp8: rows of each expert are copied to padded ones 2, and results back 2, both ways.
    Biases of second matrices (experts.py, `_apply_bias`): times probabilities 1, added 3, put together 2;
    backward gradients put together 2, those of biases and of probabilities 3 each.
    """
    (experts,) = job.model.routed
    each = 9 + 1 / experts.active if "permutation" in job.unfused else 6 + 2 / experts.active
    padded, biased = 4 * in_fp8, job.model.biases
    return Ways(each + padded + 6 * biased, each + padded + 8 * biased)


def loss_bytes(job: Job) -> Ways:
    """Return the bytes of the cross entropy of a row, as Megatron's vocab_parallel_cross_entropy.

    A logit of e bytes: cast e + 4, max 4, subtract 8, exp 8, sum 4, divide 8 forward; scale 8, cast 4 + e
    backward. Fused (fused_cross_entropy.py): cast with max e + 4, subtract, exp and sum 8, divide 8; scale
    and cast 4 + e.
    """
    logits = (1 + job.model.mtp_layers) * vocabulary(job)
    apart, fused = (
        Ways(36 + job.element_bytes, 12 + job.element_bytes),
        Ways(20 + job.element_bytes, 4 + job.element_bytes),
    )
    each = _apart(job, "loss", fused, apart)
    return Ways(each.forward * logits, each.backward * logits)


def vocabulary(job: Job) -> float:
    """Return the number of logits of a row on one GPU."""
    return job.model.vocab_params(job.tensor_parallel) / job.model.hidden_size


def gradient_bytes(job: Job) -> float:
    """Return the bytes of adding a weight's gradient of a micro-batch to the sum of all micro-batches.

    The matrix product's kernel reads and writes the sum. Where another kernel adds, the gradient is written
    and read in the weight's type too (distributed_data_parallel.py).
    """
    sums = 2 * weight_bytes(job).gradient / job.trained_share
    return sums + 2 * job.element_bytes * ("gradients" in job.unfused)


def step_bytes(job: Job) -> tuple[float, float]:
    """Return the bytes of a training step for each weight on a GPU, and for each of the optimizer's shard.

    Of adapters, their part of each weight's.
    Of a gradient of g bytes: cleared g, scaled by tokens or replicas 2 g and searched for NaN g
    (param_and_grad_buffer.py). The shard: `shard_step_bytes`.
    """
    return 4 * weight_bytes(job).gradient, shard_step_bytes(job, job.unfused)


def shard_step_bytes(job: Job, unfused: Collection[Fusible] = ()) -> float:
    """Return the bytes of the optimizer's step for each weight of its shard, wherever the shard is.

    In fp32: gradient read for its norm 4 and clipped 8; Adam reads gradient, master weight and both moments
    and writes these three, 28; the 16-bit weight made of it 4 + e. fp16: the gradient cast to fp32 and
    unscaled 14. By torch's Adam (optim/adam.py, `_multi_tensor_adam`): gradients clipped 16 (src * scale,
    and copied); decay 8, first moment 12, second scaled 8 and added to 12, its root 8, divided 8 and epsilon
    added 8, and the weight 16.

    Args:
        unfused: operations that run kernel by kernel; host memory's optimizer is fused.
    """
    shard = 4 + (16 + 80 if "optimizer" in unfused else 8 + 28)
    if job.precision != "fp32":
        shard += 4 + job.element_bytes
    if job.precision == "fp16":
        shard += 14
    return job.trained_share * shard


def _apart(job: Job, operation: str, fused: Ways, apart: Ways) -> Ways:
    return apart if operation in job.unfused else fused
