"""Bytes on one GPU that a layer keeps of a micro-batch, and that it needs while it is computed.

Shape letters: B micro-batch, T tokens of the unit, G of its group, H heads of the layer, h of the unit, K and
k KV heads likewise, D size of a head's query and key, V of its value, e bytes an element.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from megatron_hexi.cost.arrays import Bools, Floats
from megatron_hexi.cost.fp8 import SCALE_BYTES
from megatron_hexi.kinds.part import LayerPart
from megatron_hexi.models.job import Job

#: Micro-batches whose rows a rank holds at a border between stages beside its activations: on either side the
#: rows that arrive before their use, and the rows that have not left (runtime/row_channel.py).
BORDER_ROWS = 2


@dataclass(frozen=True, eq=False)
class Flights:
    """Most keys that a unit receives, and sends, in one step of the exchange, tokens x KV heads, [U] each."""

    received: Floats
    sent: Floats


def token_activation_bytes(job: Job) -> float:
    """Return the bytes that one layer keeps of one token outside attention, without recomputation.

    Inputs of both norms 2 h, their outputs 2 h, the projection's input H D, the MLP's first output f
    (gated 2 f) and its activation f; e bytes an element, flash attention, no dropout. For a GPT in 16 bits
    that is 26 h: the 34 h of Korthikanti et al. (arXiv 2205.05198, section 4.1) less dropout masks 2 h, and
    less query, key and value 6 h, which are counted inside attention here. fp8 keeps in one byte, and scales,
    what goes into matrices: all but the norms' inputs and the MLP's first output; and but for ``delayed`` the
    projection's input, of which Megatron lets Transformer Engine keep what attention has put out.

    Layers of one part keep half of the norms'. What other parts keep is in their `row_columns`; norms behind
    attention and MLP keep their inputs 2 h.
    """
    model, columns = job.model, job.columns
    hidden = len(model.parts) * model.hidden_size / job.row_parts
    whole = (1 + model.post_norms) * hidden + columns.normed + columns.kept
    inputs = columns.inputs + columns.compressed
    if job.precision == "fp8" and job.fp8_recipe != "delayed":
        projected = model.mixer.attends * model.heads * model.value_dim / job.tensor_parallel
        whole, inputs = whole + projected, inputs - projected
    normed = sum(sum(_normed_bytes(job, part)) for part in model.parts)
    return job.element_bytes * whole + _factor_bytes(job) * inputs + normed


def _normed_bytes(job: Job, part: LayerPart) -> tuple[float, float]:
    """Return the bytes kept of a token's norm before a part: as the input of the part, and inside the part.

    What a norm that is a module puts out is kept once for all that read it, a norm's that is fused with a
    matrix inside the part. In fp8 each linear layer of Transformer Engine keeps a copy of its own, and only a
    router the input itself (`LayerPart.normed_copies`).
    """
    hidden, is_apart = job.model.hidden_size / job.row_parts, part.norm_apart["norms" in job.unfused]
    if job.precision != "fp8":
        return job.element_bytes * hidden * is_apart, job.element_bytes * hidden * (not is_apart)
    inputs, copies = part.normed_copies
    return job.element_bytes * hidden * inputs, _factor_bytes(job) * hidden * copies


def _factor_bytes(job: Job) -> float:
    return 1 + SCALE_BYTES[job.fp8_recipe] if job.precision == "fp8" else job.element_bytes


def routed_row_bytes(job: Job) -> float:
    """Return the bytes that one layer keeps of a row of its routed experts; 0 without experts.

    fp8 keeps the inputs of both products in one byte, and scales.
    """
    kept = sum(experts.kept_columns(job.model) for experts in job.model.routed)
    inputs = sum(job.model.hidden_size + experts.ffn_hidden_size for experts in job.model.routed)
    return job.element_bytes * (kept - inputs) + _factor_bytes(job) * inputs


def routed_working_bytes(job: Job) -> float:
    """Return the bytes that one row of the routed experts needs in their backward pass.

    Gradients of all that is kept, and the gradient of the output as it arrives and sorted by expert, 2 h.
    """
    model = job.model
    columns = sum(experts.kept_columns(model) + 2 * model.hidden_size for experts in model.routed)
    return job.element_bytes * columns


class Freed(NamedTuple):
    """Bytes that modules which are computed again (`Again.modules`) do not keep, outside attention.

    Args:
        mixer: bytes of a token before the mixer.
        feed_forward: bytes of a token before the MLP or the experts, and inside those that see every token.
        routed: bytes of a row of the routed experts.
    """

    mixer: float = 0.0
    feed_forward: float = 0.0
    routed: float = 0.0


def separate_norms(job: Job) -> tuple[bool, bool]:
    """Return whether the norms before mixer and feed-forward part are modules of their own.

    Only those can be computed again by themselves. Transformer Engine's layers have them before latent
    attention and before experts (megatron/core/models/gpt/gpt_layer_specs.py), and fuse others with a matrix.
    """
    is_local = "norms" in job.unfused
    return job.model.mixer.norm_apart[is_local], job.model.feed_forward.norm_apart[is_local]


def freed_bytes(job: Job) -> Freed:
    """Return the bytes that one layer does not keep because modules are computed again.

    ``layernorm``: output of a norm h, where the norm is a module. ``mlp``, ``shared_experts`` and ``moe``:
    first output and activation, and of an MLP whose norm is fused with its first matrix the norm's output, as
    the input of the MLP is then the norm's; of experts that see every token fp8's copy of it. ``moe``: all
    that is kept of a routed row; ``moe_act``: its activation.
    """
    model, modules, factor = job.model, job.again.modules, _factor_bytes(job)
    if not modules:
        return Freed()
    normed = [_normed_bytes(job, part) for part in (model.mixer, model.feed_forward)]
    norms = [
        sum(kept) if is_apart and "layernorm" in modules else 0.0
        for kept, is_apart in zip(normed, separate_norms(job), strict=True)
    ]
    inside = 0.0
    if feed_forward_again(job):
        how = model, job.tensor_parallel, job.row_parts, job.latent_exchange
        columns = model.feed_forward.row_columns(*how)
        inside = job.element_bytes * columns.kept + factor * columns.inputs
        norms[1] = norms[1] or normed[1][1]
    routed = routed_row_bytes(job) if "moe" in modules else 0.0
    if "moe_act" in modules and not routed:
        routed = factor * sum(experts.ffn_hidden_size for experts in model.routed)
    return Freed(norms[0], norms[1] + inside, routed)


def feed_forward_again(job: Job) -> bool:
    """Whether the MLP of a layer, or its experts that see every token, are computed again."""
    modules, model = job.again.modules, job.model
    if model.routed:
        return not modules.isdisjoint(("moe", "shared_experts"))
    return "mlp" in modules and model.feed_forward in model.parts


def token_qkv_bytes(job: Job) -> float:
    """Return the bytes of a token's query, key and value on one GPU; sent latent columns are one KV head."""
    model, tp = job.model, job.tensor_parallel
    keys = job.workload().local_kv_heads * job.exchanged_columns
    return job.element_bytes * (model.heads // tp * model.head_dim + keys)


def kept_weights(job: Job) -> list[float]:
    """Return, for each kind of layers, the bytes that a layer keeps of a token, relative to other kinds.

    All are 1 if layers are of one kind, or if all are recomputed: then each keeps its input only.
    """
    if len(job.kinds) == 1 or job.again.is_whole:
        return [1] * len(job.kinds)
    found = []
    for kind in job.kinds:
        freed, active = freed_bytes(kind), sum(experts.active for experts in kind.model.routed)
        found.append(
            token_activation_bytes(kind)
            - freed.mixer
            - freed.feed_forward
            + kind.model.mixer.attends * token_qkv_bytes(kind)
            + active * (routed_row_bytes(kind) - freed.routed)
        )
    return found


def attention_bytes(
    job: Job, tokens: Floats | float, group_tokens: Floats, heads: Floats, kv: Floats
) -> Floats:
    """Return the bytes that this package's autograd function of attention keeps of one layer, [U].

    B G (D + V) (h + k) e, and log-sum-exp B G h 4.

    Where latent columns travel, C + R in place of k (D + V).

    Query, key, value and output in the heads' layout (runtime/attention.py). The output of a unit that is
    alone in its group is itself the projection's input and is counted there, unless values are narrower than
    keys: then it is a part of a wider tensor (runtime/attention_blocks.py); by fp8's ``delayed`` the
    projection keeps a copy of its own.
    """
    query, value = job.model.head_dim, job.model.value_dim
    is_alone = is_alone_in_group(job, tokens, group_tokens, heads)
    is_shared = query == value and not (job.precision == "fp8" and job.fp8_recipe == "delayed")
    output = np.where(is_alone, 0 if is_shared else job.model.kernel_dim, value)
    kept = heads * (query + output) + kv * job.exchanged_columns
    sequence = job.micro_batch_size * group_tokens
    return sequence * (kept * job.element_bytes + 4 * heads)


def is_alone_in_group(job: Job, tokens: Floats | float, group_tokens: Floats, heads: Floats) -> Bools:
    """Return whether units have all tokens and heads of their groups, [U]."""
    alone: Bools = (tokens == group_tokens) & (heads == job.model.heads // job.tensor_parallel)
    return alone


def working_set_bytes(
    job: Job, tokens: Floats, group_tokens: Floats, heads: Floats, kv: Floats, flights: Flights, window: int
) -> Floats:
    """Return the bytes that a layer needs at its peak, the backward pass of attention (runtime/attention.py).

    All-to-all, there and back:  2 (T (H D + K (D + V)) + G (h D + k (D + V))) B e
    Gradient of the output:      G h V B e
    All gradients in their type: G (h D + k (D + V)) B e
    Only with other groups: three times as much of gradients that wait to be added up (runtime/sums.py); own
    keys contiguous and one prefix 2 G k (D + V) B e; `window` + 1 steps of keys and values R (D + V) B e
    each, the gradient of one twice;
    gradients on their way to the owner, `window` + 1 steps S (D + V) B e each. R, S: tokens x KV heads
    received and sent in a step.
    In a window of fewer tokens than the group's: such gradients wait without other groups too, and the rows
    of a call at its edge are copied, G (h (D + 2 V) + k (D + V)) B e.
    Where keys and values differ in size: value and output and their gradients padded to the wider of the two,
    2 G (h + k) max(D, V) B e.
    Where latent columns travel, they are one KV head of C + R in place of D + V, and of the own tokens, or of
    a step's if these are more: keys and values that are made of them, and their gradients as they come from
    kernels and put together, 3 h (D + V) B e; the gradient of the matrix, H C (N + V) (4 + 2 e).
    Sequence parallelism brings the rows of all ranks of a unit together, and has the gradient of as many
    before it is cut: 2 T B hidden e.
    """
    element, query, value = job.element_bytes, job.model.head_dim, job.model.value_dim
    both = job.exchanged_columns
    own = group_tokens * (heads * query + kv * both)
    qkv = tokens * token_qkv_bytes(job) / element
    inside = element * (2 * (qkv + own) + group_tokens * heads * value + own)
    received = flights.received * both * ((window + 1) * element + 2 * element)
    sent = flights.sent * both * (window + 1) * element
    waiting = 3 * element * own
    between = waiting + 2 * element * group_tokens * kv * both + received + sent
    exchanges = (flights.received > 0) | (flights.sent > 0)
    if job.model.span.size < job.seq_length:
        edge = element * group_tokens * (heads * (query + 2 * value) + kv * both)
        is_cut = group_tokens > job.model.span.size
        inside = inside + np.where(is_cut, edge + np.where(exchanges, 0.0, waiting), 0.0)
    if query != value:
        keys = heads if job.latent_exchange else kv
        inside = inside + 2 * element * group_tokens * (heads + keys) * job.model.kernel_dim
    if job.latent_exchange:
        inside = inside + 3 * element * np.maximum(group_tokens, flights.received) * heads * (query + value)
        matrix = (
            (4 + 2 * element) * job.workload().local_heads * job.model.attention.expansion(job.model).weights
        )
        inside = inside + matrix / job.micro_batch_size
    whole = 2 * (job.row_parts > 1) * job.micro_batch_size * tokens * job.model.hidden_size * element
    return whole + job.micro_batch_size * (inside + np.where(exchanges, between, 0.0))


def input_bytes(job: Job, tokens: Floats) -> Floats:
    """Return the bytes of a micro-batch's activations between two layers, on one GPU: B T hidden e / t.

    t is the tensor-parallel size under sequence parallelism, else 1.
    """
    return job.micro_batch_size * tokens * job.model.hidden_size * job.element_bytes / job.row_parts


def prediction_bytes(job: Job, tokens: Floats) -> Floats:
    """Return the bytes of a micro-batch that a block of multi-token prediction keeps beside its layer.

    Inputs of its three norms 3 h, and of its projection 2 h.
    """
    return 5 * input_bytes(job, tokens)


def border_bytes(job: Job, tokens: Floats) -> Floats:
    """Return the bytes of the activations in flight over one border between stages, on one GPU."""
    return BORDER_ROWS * input_bytes(job, tokens)


def logit_bytes(job: Job) -> float:
    """Return the bytes of one logit, forward or backward.

    Megatron casts 16 bits to fp32 first, and the gradient to 16 bits last; in between, softmax and gradient
    overwrite the logits (VocabParallelCrossEntropy).
    """
    return 4 + (job.element_bytes if job.element_bytes < 4 else 0)


def logits_bytes(job: Job, rows: Floats, logit: float) -> Floats:
    """Return the bytes that the loss needs: rows (V (`logit` + 4 n) + (1 + n) 3 h e), n blocks of prediction.

    Logits, input and output of the last norm, and the output's gradient. With sequence parallelism the output
    and its gradient exist for the rows of all ranks of a unit before the gradient is cut. Losses of further
    tokens are computed before that of the next one, and keep the softmax, in fp32, until their backward pass.

    Args:
        rows: number of rows of the unit, B T.
    """
    vocab = job.model.vocab_params(job.tensor_parallel) / job.model.hidden_size
    around = (3 / job.row_parts + 2 * (job.row_parts > 1)) * (1 + job.model.mtp_layers)
    kept = 4 * job.model.mtp_layers
    return rows * (vocab * (logit + kept) + around * job.model.hidden_size * job.element_bytes)
