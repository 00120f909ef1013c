"""Bytes of memory on the GPUs of each unit, and in host memory, by term."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from megatron_hexi.cost.arrays import Counts, Floats, Ints
from megatron_hexi.cost.encoder_bytes import kept_bytes
from megatron_hexi.cost.layer_bytes import (
    Flights,
    border_bytes,
    freed_bytes,
    input_bytes,
    kept_weights,
    logit_bytes,
    logits_bytes,
    prediction_bytes,
    routed_row_bytes,
    routed_working_bytes,
    token_activation_bytes,
)
from megatron_hexi.cost.library_bytes import workspace_bytes
from megatron_hexi.cost.memory_terms import HostMemoryTerms
from megatron_hexi.cost.mixer_bytes import mixer_bytes, mlp_gradient_bytes
from megatron_hexi.cost.model_part import ModelPart, Present, end_weights
from megatron_hexi.cost.plan_arrays import PlanArrays
from megatron_hexi.mesh import ROWS_ON_DEVICE
from megatron_hexi.models.job import Job

if TYPE_CHECKING:  # both of which need the bytes of a weight
    from megatron_hexi.cost.experts import ExpertsOnRanks
    from megatron_hexi.cost.sections import Section

GIB = 2.0**30

#: Bytes a weight of gradients, and of optimizer state where it is not sharded. Megatron's own table:
#: 18 (bf16), 20 (fp16), 16 (fp32) together with the weight itself, or 6 + 12 / d, 4 + 16 / d, 8 + 8 / d
#: (docs/source/api-guide/dist_optimizer.md of Megatron-LM).
GRADIENT_BYTES = {"bf16": 4, "fp16": 2, "fp32": 4, "fp8": 4}
OPTIMIZER_BYTES = {"bf16": 12, "fp16": 16, "fp32": 8, "fp8": 12}


class WeightBytes(NamedTuple):
    """Bytes of a weight, its gradient and its optimizer state; of adapters, their part of a frozen weight's.

    Args:
        weight: bytes of the weight itself, and of the adapters' weights beside it.
    """

    weight: float
    gradient: float
    state: float


def weight_bytes(job: Job) -> WeightBytes:
    """Return the bytes that a job keeps for each of the model's weights."""
    trained, precision = job.trained_share, job.precision
    beside = trained if job.lora_rank else 0.0
    state = OPTIMIZER_BYTES[precision] if job.state_bytes is None else job.state_bytes
    gradient = job.gradient_bytes or GRADIENT_BYTES[precision]
    return WeightBytes((1 + beside) * job.element_bytes, trained * gradient, trained * state)


#: Bytes that torch's allocator and cuBLAS (32 MiB a handle and stream on Hopper) keep, without CUDA's share,
#: which `usable_gib` leaves out. An estimate.
SLACK_BYTES = 0.5 * GIB
#: NCCL's rings and trees: some 24 channels of 12 MiB in each of two communicators over NVLink. An estimate.
COLLECTIVES_BYTES = 0.5 * GIB
#: The least bytes of kernels' workspaces and of NCCL's buffers for messages, which library_bytes.py counts.
LEAST_LIBRARY_BYTES = 0.5 * GIB
#: The least that all these take together.
RESERVE_BYTES = SLACK_BYTES + COLLECTIVES_BYTES + LEAST_LIBRARY_BYTES
#: Number of tokens that take far more bytes than all terms that do not depend on tokens.
_MANY = 1e6
#: Part of temporary tensors' bytes that the caching allocator loses to fragmentation. An estimate.
FRAGMENTATION = 0.05


def part_params(job: Job, part: ModelPart, experts: Floats | float = 0, *, trained: bool = False) -> Counts:
    """Return the number of weights on one GPU, of layers and outside of these.

    Args:
        experts: number of routed experts that it holds of each layer with experts; a slice is a part of one.
        trained: whether to count only weights that are trained, themselves or by adapters.
    """
    model, tp = job.model, job.tensor_parallel
    kinds = zip(model.kinds, part.of_kinds(model), strict=True)
    params: Counts = sum(
        held.layers * (kind.layer_params(tp) + experts * kind.expert_params()) for kind, held in kinds
    )
    for one in (one for one in end_weights(job, tp) if one.is_trained or not trained):
        params = params + one.held(part.is_first, part.is_last) * (one.blocks * one.params)
    return params


def owned_params(job: Job, params: Counts, owners: Counts) -> Floats | float:
    """Return the number of a GPU's weights whose optimizer state it keeps.

    Args:
        owners: number of GPUs that hold the same weights and share the distributed optimizer's state equally.
    """
    return params / owners if job.distributed_optimizer else params


def allocated_bytes[N: (float, Floats)](tensors: N) -> N:
    """Return the bytes that the caching allocator takes for temporary tensors of `tensors` bytes."""
    return (1 + FRAGMENTATION) * tensors


@dataclass(frozen=True, eq=False)
class Holdings:
    """Tokens, heads and micro-batches that units hold, arrays of one shape.

    Args:
        tokens: number of tokens of each unit's shard, T.
        group_tokens: number of tokens of its group, G.
        heads: number of query heads (of one tensor-parallel rank).
        kv: number of KV heads that these read.
        micro_batches: number of micro-batches that the unit takes.
        flights: most keys that its exchange has in flight.
        experts: number of routed experts in each layer with experts; a slice is a part of one.
        routed_rows: number of rows of a micro-batch that its experts compute; those of a slice count in part.
        fp8_copies: bytes of fp8 copies of a weight of the layers' matrices (`fp8.copies`); 0: in bf16.
        images: number of images of a micro-batch that it encodes.
    """

    tokens: Floats
    group_tokens: Floats
    heads: Floats
    kv: Floats
    micro_batches: Ints
    flights: Flights
    experts: Floats | float = 0
    routed_rows: Floats | float = 0
    fp8_copies: Floats | float = 0
    images: Floats | float = 0

    @classmethod
    def of(cls, plan: PlanArrays, micro_batches: Ints, flights: Flights, **more: Floats | float) -> Holdings:
        """Return the holdings of a section's units, [U]; `more` are the fields that need not be 0."""
        tokens, heads, kv = (held.astype(float) for held in (plan.tokens, plan.heads, plan.kv))
        group_tokens = plan.group_tokens[plan.group].astype(float)
        return cls(tokens, group_tokens, heads, kv, micro_batches, flights, **more)

    @classmethod
    def of_section(
        cls, section: Section, micro_batches: Ints, flights: Flights, experts: ExpertsOnRanks | None
    ) -> Holdings:
        """Return the holdings of a section's units, [U], with their routed experts, if the model has any.

        Args:
            micro_batches: number of micro-batches of each replica of the plan, [replicas].
            flights: most keys that the units' exchange has in flight.
        """
        more: dict[str, Floats | float] = {"fp8_copies": section.placement.stage.fp8_copies}
        if experts is not None:
            rows = experts.rows(section.job) / experts.parts
            more |= {"experts": experts.whole, "routed_rows": rows}
        if section.images is not None:
            more["images"] = section.images.of_units
        return cls.of(section.arrays, section.turns(micro_batches), flights, **more)


def static_memory(
    job: Job,
    part: ModelPart,
    weights: Floats | float,
    gradients: Floats | float,
    state: Floats | float,
    fp8_copies: Floats | float = 0,
    experts: Floats | float = 0,
) -> dict[str, Floats]:
    """Return the bytes on a GPU that do not depend on the sequence, by the names of `Memory`'s terms.

    Args:
        gradients: number of weights whose gradients are on the GPU.
        state: number of weights whose optimizer state is on the GPU.
        fp8_copies: bytes of fp8 copies of a weight of the layers' matrices; 0: in bf16.
        experts: number of routed experts that it holds of each layer with experts.
    """
    copied = fp8_params(job, part, experts) if np.any(fp8_copies) else 0
    each = weight_bytes(job)
    return {
        "weights": np.asarray(weights * each.weight + copied * fp8_copies),
        "gradients": np.asarray(gradients * each.gradient),
        "optimizer": np.asarray(state * each.state),
    }


def fp8_params(job: Job, part: ModelPart, experts: Floats | float = 0) -> Counts:
    """Return the number of weights of a part's matrices that are multiplied in fp8 where a GPU has it."""
    if job.precision != "fp8":
        return 0
    tp, kinds = job.tensor_parallel, zip(job.kinds, part.of_kinds(job.model), strict=True)
    layers = sum(
        held.layers * (kind.model.matrix_params(tp) + experts * kind.model.expert_params())
        for kind, held in kinds
        if kind.precision == "fp8"
    )
    return layers + part.predictions(job.model).layers * job.model.projection_params(tp)


def part_memory(
    job: Job,
    part: ModelPart,
    held: Holdings,
    window: int,
    owned: Floats | float,
    present: Present | None = None,
    message_buffers: Floats | float = 0.0,
) -> dict[str, Floats]:
    """Return the peak bytes on one GPU of each unit, [U], by the names of `Memory`'s terms.

    Full recomputation keeps each layer's input (h e a token), and all activations of one layer, unless later
    layers are not computed again, whose activations are free by then. Modules that are computed again keep
    their inputs, and need one layer's activations of the module (`freed_bytes`). 1F1B keeps the
    activations of as many micro-batches as it runs forward before the backward pass; a ministage keeps those
    of one micro-batch, and the rows of all micro-batches that entered each ministage.

    Args:
        window: prefetch depth of the exchange, in steps.
        owned: number of weights whose optimizer state a GPU keeps.
        present: numbers of weights on a GPU at the peak; ``None``: all of its part.
        message_buffers: bytes of NCCL's buffers (`message_buffer_bytes`), if the exchanging units are known.
    """
    how = part, held, window, owned, present, message_buffers
    in_fp8 = np.asarray(held.fp8_copies) > 0
    if job.precision != "fp8" or in_fp8.all():
        return _part_memory(job, *how)
    found = _part_memory(job.in_bf16, *how)
    if in_fp8.any():
        low = _part_memory(job, *how)
        found = {name: np.where(in_fp8, low[name], terms) for name, terms in found.items()}
    return found


def _part_memory(
    job: Job,
    part: ModelPart,
    held: Holdings,
    window: int,
    owned: Floats | float,
    present: Present | None,
    message_buffers: Floats | float,
) -> dict[str, Floats]:
    """Return the bytes of `part_memory` where all units compute in the job's precision."""
    here, added = (
        part_params(job, part, held.experts, trained=trained) + np.zeros(held.tokens.shape)
        for trained in (False, True)
    )
    state = owned + np.zeros(held.tokens.shape)
    if present is not None:
        here, added, state = here - added + present.weights, present.gradients, present.state
    rows, in_flight = job.micro_batch_size * held.tokens, part.in_flight(held.micro_batches)
    at_once = in_flight
    if np.any(part.ministages):
        at_once = in_flight * part.at_once(job.model, kept_weights(job))
    working = activations = attention = np.zeros(held.tokens.shape)
    for kind, count in zip(job.kinds, part.of_kinds(job.model), strict=True):
        layer = _layer_memory(kind, held, window)
        needed = np.maximum(layer.working, held.routed_rows * routed_working_bytes(kind))
        if job.again.is_whole:
            whole = layer.outside + layer.inside
            needed = needed + np.where(np.equal(count.again, count.layers), whole, 0.0)
        working = np.maximum(working, np.where(np.equal(count.layers, 0), 0.0, needed))
        activations = activations + at_once * count.kept(layer.outside, layer.outside_again)
        attention = attention + at_once * count.kept(layer.inside, layer.inside_again)
    # Under full recomputation one of a block's two inputs is counted with its layer.
    block, inputs = prediction_bytes(job, held.tokens), input_bytes(job, held.tokens)
    blocks = part.predictions(job.model).kept(block, inputs if job.again.is_whole else block)
    activations = activations + in_flight * blocks
    if np.any(part.ministages):
        waiting = part.entered(held.micro_batches)
        waiting = np.where(part.rows_on_host, np.minimum(waiting, ROWS_ON_DEVICE), waiting)
        activations = activations + waiting * input_bytes(job, held.tokens)
    # The loss comes before the layers' backward pass, so only the larger of the two counts.
    loss = logits_bytes(job, rows, logit_bytes(job))
    logits = np.where(part.is_last, np.maximum(loss - working, 0.0), 0.0)
    working = working + part.borders * border_bytes(job, held.tokens)
    encoded = part.encoded(held.micro_batches)
    encoder = kept_bytes(job, part, held.images, encoded) + np.zeros(held.tokens.shape)
    return {
        **static_memory(job, part, here, added, state, held.fp8_copies, held.experts),
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
        + FRAGMENTATION * (activations + attention + working + logits + encoder),
        "encoder": encoder,
    }


class _LayerMemory(NamedTuple):
    """Bytes of a layer and micro-batch: kept outside attention and inside, and needed while it is computed.

    Arrays over units, [U].
    `outside_again` and `inside_again` are the bytes kept by a layer that is computed again.
    """

    outside: Floats
    inside: Floats
    outside_again: Floats
    inside_again: Floats
    working: Floats


def _layer_memory(job: Job, held: Holdings, window: int) -> _LayerMemory:
    """Return the bytes of a layer, for a job with layers of one kind."""
    rows = job.micro_batch_size * held.tokens
    outside = rows * token_activation_bytes(job) + held.routed_rows * routed_row_bytes(job)
    mixed = mixer_bytes(job.model.mixer, job, held, window)
    if job.again.is_whole:
        again = input_bytes(job, held.tokens), np.zeros(np.shape(mixed.kept))
        return _LayerMemory(outside, mixed.kept, *again, mixed.working)
    if not job.again:
        return _LayerMemory(outside, mixed.kept, outside, mixed.kept, mixed.working)
    freed = freed_bytes(job)
    behind, routed = rows * freed.feed_forward, held.routed_rows * freed.routed
    left = outside - rows * freed.mixer - behind - routed
    # What is computed again is there while its gradients are.
    inside = behind + rows * mlp_gradient_bytes(job)
    experts = routed + held.routed_rows * routed_working_bytes(job)
    if "moe" in job.again:  # all of it at once
        inside, experts = inside + routed, experts + behind
    else:  # what routed rows kept is free by then
        inside = inside - held.routed_rows * (routed_row_bytes(job) - freed.routed)
    working = np.maximum(mixed.working_again + rows * freed.mixer, np.where(routed > 0, experts, 0.0))
    working = np.maximum(working, np.where(behind > 0, inside, 0.0))
    return _LayerMemory(outside, mixed.kept, left, mixed.kept_again, working)


def token_bytes(
    job: Job, part: ModelPart, window: int, shards: int, micro_batches: int = 1, fp8_copies: float = 0
) -> tuple[float, float, float]:
    """Return the bytes on a GPU without tokens, per token of its unit, and per token the unit attends to.

    A unit with h of the H heads attends to h / H of its group's tokens. The exchange is taken to have as many
    keys in flight as the unit's group has.

    Args:
        shards: number of units that share the optimizer's state.
        fp8_copies: bytes of fp8 copies of a weight of the layers' matrices; 0: in bf16.
    """
    tokens, attended = np.array([0.0, _MANY, 0.0]), np.array([0.0, 0.0, _MANY])
    heads = np.full(3, float(job.workload().local_heads))
    keys = heads / job.workload().queries_per_kv
    flights = Flights(attended * keys, attended * keys)
    # Where experts and tokens are in proportion, as many rows come to a rank as leave it.
    active = sum(experts.active for experts in job.model.routed)
    routed = active * job.micro_batch_size * tokens / job.tensor_parallel
    turns = np.full(3, micro_batches)
    held = Holdings(tokens, attended, heads, keys, turns, flights, routed_rows=routed, fp8_copies=fp8_copies)
    owned = owned_params(job, part_params(job, part, trained=True), shards)
    alone, *more = np.sum(list(part_memory(job, part, held, window, owned).values()), axis=0).tolist()
    return alone, (more[0] - alone) / _MANY, (more[1] - alone) / _MANY


def part_host_memory(job: Job, part: ModelPart, held: Holdings, present: Present | None) -> dict[str, Floats]:
    """Return the bytes in host memory for one GPU of each unit, [U], by the terms of `HostMemoryTerms`.

    Args:
        present: numbers of weights on the device and in host memory; ``None``: nothing is offloaded.
    """
    if present is None:
        return {field.name: np.zeros(held.tokens.shape) for field in fields(HostMemoryTerms)}
    each = weight_bytes(job)
    # In fp32 the model's weights are the optimizer's, so the host has one copy of those that are trained.
    trained = job.trained_share * job.element_bytes
    masters = present.host_masters * trained if job.precision == "fp32" else 0.0
    return {
        "weights": present.host_weights * each.weight,
        "gradients": present.host_gradients * each.gradient,
        "optimizer": present.host_state * each.state + masters,
        "activations": part.rows_on_host * part.entered(held.micro_batches) * input_bytes(job, held.tokens),
    }
