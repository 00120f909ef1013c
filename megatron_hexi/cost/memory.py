"""Memory that each unit's GPUs take, term by term, in bytes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import NamedTuple

import numpy as np

from megatron_hexi.cost.arrays import Counts, Floats, Ints
from megatron_hexi.cost.job import Job
from megatron_hexi.cost.layer_bytes import (
    Flights,
    attention_bytes,
    border_bytes,
    input_bytes,
    logit_bytes,
    logits_bytes,
    prediction_bytes,
    routed_row_bytes,
    routed_working_bytes,
    token_activation_bytes,
    token_qkv_bytes,
    working_set_bytes,
)
from megatron_hexi.cost.library_bytes import workspace_bytes
from megatron_hexi.cost.memory_terms import HostMemoryTerms, Memory
from megatron_hexi.cost.model_part import ModelPart, Present
from megatron_hexi.cost.plan_arrays import PlanArrays
from megatron_hexi.cost.state_bytes import scan_bytes, scan_working_bytes
from megatron_hexi.mesh import ROWS_ON_DEVICE

GIB = 2.0**30

#: Bytes a weight of gradients, and of optimizer state where it is not sharded. Megatron's own table:
#: 18 (bf16), 20 (fp16), 16 (fp32) together with the weight itself, or 6 + 12 / d, 4 + 16 / d, 8 + 8 / d
#: (docs/source/api-guide/dist_optimizer.md of Megatron-LM).
GRADIENT_BYTES = {"bf16": 4, "fp16": 2, "fp32": 4, "fp8": 4}
OPTIMIZER_BYTES = {"bf16": 12, "fp16": 16, "fp32": 8, "fp8": 12}
#: Bytes a weight of the fp8 copies of a layer's matrices that Transformer Engine keeps beside those in bf16:
#: one by rows, one by columns (its docs, "Performance considerations", handling transposes).
FP8_COPIES = 2

#: What torch's allocator and cuBLAS (32 MiB a handle and stream on Hopper) keep. CUDA's own share is not in
#: it: `usable_gib` is what that leaves. An estimate.
SLACK_BYTES = 0.5 * GIB
#: NCCL's rings and trees: some 24 channels of 12 MiB in each of two communicators over NVLink. An estimate.
COLLECTIVES_BYTES = 0.5 * GIB
#: Workspaces of kernels and NCCL's buffers for messages are counted (library_bytes.py), and taken for this
#: much at least.
LEAST_LIBRARY_BYTES = 0.5 * GIB
#: The least that all these take together.
RESERVE_BYTES = SLACK_BYTES + COLLECTIVES_BYTES + LEAST_LIBRARY_BYTES
#: Tokens that take far more bytes than what does not depend on them.
_MANY = 1e6
#: What the caching allocator loses of the tensors that come and go. An estimate.
FRAGMENTATION = 0.05


def part_params(job: Job, part: ModelPart, experts: Floats | float = 0) -> Counts:
    """Weights on one GPU: layers, and an embedding at either end.

    Where first and last stage differ, tied embeddings are held twice, and those that multi-token prediction
    embeds its tokens with.

    Args:
        job: the job.
        part: what the GPU has of the model.
        experts: routed experts that it holds of each layer with some, slices counted as parts of one.
    """
    model, tp = job.model, job.tensor_parallel
    embedding = model.vocab_params(tp) + model.learned_positions * model.hidden_size
    last_norm = model.norm_params(model.hidden_size)
    has_embedding = part.is_first + part.copies_embedding(model)
    has_output = part.is_last * (1 - has_embedding * model.tied_embeddings)
    kinds = zip(model.kinds, part.of_kinds(model), strict=True)
    params: Counts = (
        sum(held.layers * (kind.layer_params(tp) + experts * kind.expert_params()) for kind, held in kinds)
        + has_embedding * embedding
        + part.predictions(model).layers * model.prediction_params(tp)
        + part.is_last * last_norm
        + has_output * model.vocab_params(tp)
    )
    return params


def owned_params(job: Job, params: Counts, owners: float) -> Floats | float:
    """Weights whose optimizer state a GPU keeps, of those that it holds.

    Args:
        job: the job.
        params: weights on the GPU.
        owners: GPUs that hold the same, which share the distributed optimizer's state equally.
    """
    return params / owners if job.distributed_optimizer else params


def allocated_bytes[N: (float, Floats)](tensors: N) -> N:
    """Bytes that the caching allocator takes for tensors that come and go."""
    return (1 + FRAGMENTATION) * tensors


def stage_params(job: Job, stage: int) -> int:
    """Weights on one GPU of a pipeline stage of a job whose stages are alike."""
    return int(part_params(job, ModelPart.of_job(job, stage)))


@dataclass(frozen=True, eq=False)
class Holdings:
    """Tokens, heads and micro-batches that units hold, arrays of one shape.

    Args:
        tokens: T of each.
        group_tokens: G of its group.
        heads: query heads (of one tensor-parallel rank).
        kv: KV heads that these read.
        micro_batches: that it takes.
        flights: of its exchange.
        experts: routed experts of each layer with some, slices counted as parts of one.
        routed_rows: rows of a micro-batch that these compute, a slice's counted as parts of one.
    """

    tokens: Floats
    group_tokens: Floats
    heads: Floats
    kv: Floats
    micro_batches: Ints
    flights: Flights
    experts: Floats | float = 0
    routed_rows: Floats | float = 0

    @classmethod
    def of(
        cls,
        plan: PlanArrays,
        micro_batches: Ints,
        flights: Flights,
        experts: Floats | float = 0,
        routed_rows: Floats | float = 0,
    ) -> Holdings:
        """The holdings of units, [U], of which each takes so many `micro_batches`."""
        tokens, heads, kv = (held.astype(float) for held in (plan.tokens, plan.heads, plan.kv))
        group_tokens = plan.group_tokens[plan.group].astype(float)
        return cls(tokens, group_tokens, heads, kv, micro_batches, flights, experts, routed_rows)


def static_memory(
    job: Job,
    part: ModelPart,
    weights: Floats | float,
    gradients: Floats | float,
    state: Floats | float,
) -> dict[str, Floats]:
    """Bytes on a GPU that do not depend on the sequence, by the names of `Memory`'s terms.

    Args:
        job: the job.
        part: what the GPU has of the model.
        weights: how many are on the GPU.
        gradients: of how many weights there are gradients.
        state: of how many weights there is optimizer state.
    """
    copied: Counts = 0
    if job.precision == "fp8":
        kinds = zip(job.model.kinds, part.of_kinds(job.model), strict=True)
        copied = sum(
            held.layers * (FP8_COPIES * kind.matrix_params(job.tensor_parallel)) for kind, held in kinds
        )
        projection = job.model.projection_params(job.tensor_parallel)
        copied = copied + part.predictions(job.model).layers * (FP8_COPIES * projection)
    return {
        "weights": np.asarray(weights * float(job.element_bytes) + copied),
        "gradients": np.asarray(gradients * float(GRADIENT_BYTES[job.precision])),
        "optimizer": np.asarray(state * float(OPTIMIZER_BYTES[job.precision])),
    }


def part_memory(
    job: Job,
    part: ModelPart,
    held: Holdings,
    window: int,
    owned: Floats | float,
    present: Present | None = None,
    message_buffers: Floats | float = 0.0,
) -> dict[str, Floats]:
    """Bytes on one GPU of each unit, by the names of `Memory`'s terms.

    Recomputation of a whole layer keeps its input (h e a token), and one layer is there whole, unless layers
    behind it are not computed again: what these kept is given back before. Recomputation of core attention
    keeps query, key and value in the tokens' layout, and one layer's inside is there. 1F1B keeps the
    activations of as many micro-batches as it runs forward ahead of the backward pass; a ministage those of
    one, and the rows of all that entered each ministage.

    Args:
        job: the units' job.
        part: what they have of the model.
        held: what they hold of the sequence.
        window: steps under way ahead of the one in use.
        owned: weights whose optimizer state a GPU keeps.
        present: what is on a GPU at the peak; ``None``: all of its part.
        message_buffers: NCCL's (`message_buffer_bytes`), where it is known which units meet.
    """
    params = part_params(job, part, held.experts) + np.zeros(held.tokens.shape)
    here, added, state = params, params, owned
    if present is not None:
        here, added, state = present.weights, present.gradients, present.state
    rows, in_flight = job.micro_batch_size * held.tokens, part.in_flight(held.micro_batches)
    at_once = in_flight * part.at_once(job.model)
    working = activations = attention = np.zeros(held.tokens.shape)
    for kind, count in zip(job.kinds, part.of_kinds(job.model), strict=True):
        layer = _layer_memory(kind, held, window)
        needed = layer.working
        if kind.model.experts is not None:
            needed = np.maximum(needed, held.routed_rows * routed_working_bytes(kind))
        if job.mode == "full":
            whole = layer.outside + layer.inside
            needed = needed + np.where(np.equal(count.again, count.layers), whole, 0.0)
        working = np.maximum(working, np.where(np.equal(count.layers, 0), 0.0, needed))
        activations = activations + at_once * count.kept(layer.outside, layer.outside_again)
        attention = attention + at_once * count.kept(layer.inside, layer.inside_again)
    if job.model.mtp_layers:
        # Of a block's two inputs its layer counts one, where whole ones are computed again.
        block, inputs = prediction_bytes(job, held.tokens), input_bytes(job, held.tokens)
        blocks = part.predictions(job.model).kept(block, inputs if job.mode == "full" else block)
        activations = activations + in_flight * blocks
    if np.any(part.ministages):
        waiting = part.entered(held.micro_batches)
        waiting = np.where(part.rows_on_host, np.minimum(waiting, ROWS_ON_DEVICE), waiting)
        activations = activations + waiting * input_bytes(job, held.tokens)
    # The loss comes before the layers' backward pass: of the two only the larger one is there.
    loss = logits_bytes(job, rows, logit_bytes(job))
    logits = np.where(part.is_last, np.maximum(loss - working, 0.0), 0.0)
    working = working + part.borders * border_bytes(job, held.tokens)
    return {
        **static_memory(job, part, here, added, state + np.zeros(params.shape)),
        "activations": activations,
        "attention": attention,
        "working_set": working,
        "logits": logits,
        "reserve": SLACK_BYTES
        + COLLECTIVES_BYTES
        + np.maximum(
            LEAST_LIBRARY_BYTES,
            workspace_bytes(job, held.group_tokens, held.heads, held.kv) + message_buffers,
        )
        + FRAGMENTATION * (activations + attention + working + logits),
    }


class _LayerMemory(NamedTuple):
    """Bytes of a layer and micro-batch: kept outside attention and inside, and needed while it is computed.

    Arrays over units, [U].
    `outside_again` and `inside_again` are what a layer keeps that is computed again.
    """

    outside: Floats
    inside: Floats
    outside_again: Floats
    inside_again: Floats
    working: Floats


def _layer_memory(job: Job, held: Holdings, window: int) -> _LayerMemory:
    """The bytes of a layer of a job whose layers are of one kind."""
    rows = job.micro_batch_size * held.tokens
    outside = rows * token_activation_bytes(job)
    if job.model.experts is not None:
        outside = outside + held.routed_rows * routed_row_bytes(job)
    if not job.model.has_attention:
        inside = scan_bytes(job, held.group_tokens, held.heads)
        working = scan_working_bytes(job, held.tokens, held.group_tokens, held.heads)
        if job.mode == "full":
            inputs, nothing = input_bytes(job, held.tokens), np.zeros(np.shape(inside))
            return _LayerMemory(outside, inside, inputs, nothing, working)
        return _LayerMemory(outside, inside, outside, inside, working)
    inside = attention_bytes(job, held.tokens, held.group_tokens, held.heads, held.kv)
    working = working_set_bytes(
        job, held.tokens, held.group_tokens, held.heads, held.kv, held.flights, window
    )
    if job.mode == "full":
        return _LayerMemory(outside, inside, input_bytes(job, held.tokens), np.zeros(inside.shape), working)
    if job.mode == "selective":
        return _LayerMemory(outside, inside, outside, rows * token_qkv_bytes(job), working + inside)
    return _LayerMemory(outside, inside, outside, inside, working)


def token_bytes(
    job: Job, part: ModelPart, window: int, shards: int, micro_batches: int = 1
) -> tuple[float, float, float]:
    """Bytes on a GPU with no token, of a token that its unit holds, and of one that all its heads attend to.

    With h of a group's H heads a unit attends to h / H of the group's tokens. Keys under way are taken to be
    as many as those of its own group.

    Args:
        job: the unit's job.
        part: what it has of the model.
        window: steps under way ahead of the one in use.
        shards: units that share the optimizer's state.
        micro_batches: that it takes.
    """
    tokens, attended = np.array([0.0, _MANY, 0.0]), np.array([0.0, 0.0, _MANY])
    heads = np.full(3, float(job.workload().local_heads))
    keys = heads / job.workload().queries_per_kv
    flights = Flights(attended * keys, attended * keys)
    experts = job.model.experts
    # Where experts and tokens are in proportion, as many rows come to a rank as leave it.
    routed = 0.0 if experts is None else experts.active * job.micro_batch_size * tokens / job.tensor_parallel
    held = Holdings(tokens, attended, heads, keys, np.full(3, micro_batches), flights, routed_rows=routed)
    owned = owned_params(job, part_params(job, part), shards)
    alone, *more = np.sum(list(part_memory(job, part, held, window, owned).values()), axis=0).tolist()
    return alone, (more[0] - alone) / _MANY, (more[1] - alone) / _MANY


def part_host_memory(job: Job, part: ModelPart, held: Holdings, present: Present | None) -> dict[str, Floats]:
    """Bytes in host memory of one GPU of each unit, by the names of `HostMemoryTerms`'s terms.

    Args:
        job: the units' job.
        part: what they have of the model.
        held: what they hold of the sequence.
        present: what is where; ``None``: nothing is offloaded.
    """
    if present is None:
        return {field.name: np.zeros(held.tokens.shape) for field in fields(HostMemoryTerms)}
    element = float(job.element_bytes)
    # In fp32 the model's weights are the optimizer's: on the host there is one of them.
    masters = present.host_masters * element if job.precision == "fp32" else 0.0
    return {
        "weights": present.host_weights * element,
        "gradients": present.host_gradients * float(GRADIENT_BYTES[job.precision]),
        "optimizer": present.host_state * float(OPTIMIZER_BYTES[job.precision]) + masters,
        "activations": part.rows_on_host * part.entered(held.micro_batches) * input_bytes(job, held.tokens),
    }


def unit_memory(terms: Mapping[str, Floats], unit: int) -> Memory:
    """One unit's part of `part_memory`."""
    return Memory(**{name: float(values[unit]) for name, values in terms.items()})


def unit_host_memory(terms: Mapping[str, Floats], unit: int) -> HostMemoryTerms:
    """One unit's part of `part_host_memory`."""
    return HostMemoryTerms(**{name: float(values[unit]) for name, values in terms.items()})
