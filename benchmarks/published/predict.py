"""What the cost model says of a published row.

What others do otherwise than Megatron with a plan is carried over here, each by one rule:

- an interleaved schedule of v chunks a stage with experts fills and drains in one v-th (Narayanan et al.,
  arXiv 2104.04473, section 2.2): the bubble counts 1 / v. Without experts it is Megatron's, which jobs state;
- sums inside units that hide behind matrix products (`hidden_sums`) count nothing;
- all-to-alls to experts hide behind another micro-batch's work (1F1B overlap) by 0.3655, as Megatron Bridge
  measured with Qwen3-30B (skills/nemo-mbridge-perf-moe-optimization-workflow/SKILL.md): `hidden_experts`;
- InternEvo's ranks send their parts of the weights one after the other, in broadcasts of their own
  (hybrid_zero_optim.py, `broadcast_params`): each has the latencies of a ring in NCCL's own tables, by LL128
  1.9 us a GPU and 4 us a node (https://github.com/NVIDIA/nccl/blob/01afd20/src/graph/tuning.cc). Bytes and
  latencies are waited for: its configuration of this model has overlap_sync_param=False
  (https://github.com/InternLM/InternEvo/blob/00de61348f53850e5aea5ed5003996220cc64116/configs/7B_sft.py);
- torch's context parallelism waits for keys, values and gradients (`torch_ring.py`);
- sends that block (DeepSpeed's pipeline: send and receive in line with compute) are in both stages' time.

Gradients are summed in bf16 by all of NVIDIA's scripts in fp8 (`gradient_bytes`): grad_sync_dtype of NeMo 1
(https://github.com/NVIDIA/NeMo-Framework-Launcher/blob/26e42fa/examples/training/llama/h100/llama2_7b_fp8.sh),
grad_reduce_in_fp32 of NeMo 2 (https://github.com/NVIDIA/NeMo/blob/02a0e6a/scripts/performance/helpers.py) and
of Megatron Bridge (perf_recipes/_common.py), there in bf16 too.

Memory, where others keep something else. torchtitan's figure is what torch's allocator reserved at most, in
which NCCL's buffers are not.

- ``fsdp``: weights, gradients and Adam in fp32, 16 bytes a weight over all ranks, and two layers whole in
  bf16; Float8 makes its copies as they are used. torch's cross entropy keeps bf16 logits, their fp32 copy,
  its own output and that one's gradient: 14 bytes a logit where Megatron's keeps 8.
- ``fsdp-pipeline``: with a pipeline weights stay whole in bf16 and gradients are added up whole in fp32, as
  Megatron's do; the logits as above.
- ``foundry``: as ``fsdp``, with the loss of FlashAttention, by default of llm-foundry's models
  (models/mpt/modeling_mpt.py, `fused_crossentropy`): logits in bf16 and their gradient.
- ``automodel``: as ``fsdp``, with all of it in bf16, the type in which NeMo AutoModel makes models
  (_transformers/auto_model.py, `from_config`), and logits that are not cast (`fp32_upcast: false`).
- ``nemo``: NeMo's Adam keeps of fp32 weights the 16 bits by which they differ from those in bf16
  (megatron_base_model.py, `store_param_remainders`, as Megatron's precision-aware optimizer does): 2 bytes a
  weight of the shard less.
- ``bridge``: recipes of Megatron Bridge's benchmarks, and NVIDIA's of NeMo since 24.11, keep matrices in fp8
  alone (`fp8_param_gather` of mixed_precision.py, `fp8_params` before).
- ``deepspeed``: 8 bytes a weight more than Megatron's 16 (copies, a buffer for sums), 4.76 GB of fused
  kernels and 0.3 GB besides (Sailor's own model: sailor/Planner/simulations/runtime_simulator.py), and plain
  attention's scores, 4 bytes each.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import numpy as np

from benchmarks.published.convert import mask_tflops, tokens_per_s
from benchmarks.published.layers import layer_seconds
from benchmarks.published.layouts import (
    K,
    equal_cluster,
    equal_plan,
    job,
    mixed_cluster,
    mixed_plan,
    training_plan,
)
from benchmarks.published.tables import Row, Table, site
from benchmarks.published.torch_ring import ring_seconds
from megatron_hexi.cluster import device
from megatron_hexi.cost import CostModel, Phases, Timing
from megatron_hexi.cost.layer_bytes import logits_bytes
from megatron_hexi.cost.library_bytes import workspace_bytes
from megatron_hexi.cost.memory import FRAGMENTATION, GIB, SLACK_BYTES, part_params
from megatron_hexi.cost.once import iteration_phases
from megatron_hexi.cost.pipeline import Pipeline
from megatron_hexi.cost.plan_arrays import PlanArrays
from megatron_hexi.models import Job

#: Of MagiAttention's comparison.
_TOKENS_A_GPU = 8192
#: Bytes of a weight that all ranks share, with its gradient and Adam's two moments, and of a logit with what
#: the loss keeps of it.
_SHARDED = {"fsdp": (16, 14), "fsdp-pipeline": (16, 14), "foundry": (16, 4), "automodel": (8, 8)}
_DEEPSPEED_WEIGHT = 8
#: Of a step of NCCL's rings inside nodes and between them, s.
_RING_LATENCY = (1.9e-6, 4e-6)
_FUSED_KERNELS = 4.76e9 + 0.3e9


@dataclass(frozen=True)
class Comparison:
    """A row, in the unit in which it is compared.

    Args:
        table: its table's name.
        row: what it is, for people.
        what: is compared.
        unit: of both figures.
        published: by the source, converted.
        predicted: by the cost model.
        job: what was trained on what, whatever the layout.
        sort: kind of the training: dense, or where its experts are; empty: a part of one.
        year: of the software.
    """

    table: str
    row: str
    what: Literal["time", "memory"]
    unit: str
    published: float
    predicted: float
    job: str = ""
    sort: str = ""
    year: int = 0

    @property
    def error(self) -> float:
        """How far the prediction is off, as a part of what was published; above 0: too much."""
        return self.predicted / self.published - 1


class Misfit(NamedTuple):
    """A row that ran, and that the cost model says needs more than its GPU has, GiB."""

    table: str
    row: str
    needed: float
    usable: float


def compare(table: Table) -> list[Comparison]:
    """All rows of a table."""
    predict = {"training": _training, "attention": _attention, "stages": _stages, "layers": _layers}[
        table.kind
    ]
    return [one for row in table.rows for one in predict(table, row)]


def _comparison(table: Table, row: Row, unit: str, published: float, predicted: float) -> Comparison:
    what: Literal["time", "memory"] = "memory" if unit in ("GiB", "GB") else "time"
    name = row.model.partition("-of-")[0]  # with another number of layers, where stages are not equal
    batch = row.way or f"{row.batch} x {row.context}K"
    trained = f"{name}, {row.ranks} {row.cluster} GPUs, {batch}, {job(row).precision}"
    if row.release:
        trained += f", release {row.release}"
    label = table.label.format(row=row)
    return Comparison(
        table.name, label, what, unit, published, predicted, trained, _sort(table, row), table.year
    )


def _sort(table: Table, row: Row) -> str:
    if table.kind != "training":
        return ""
    if not row.expert:
        return "dense"
    return "experts across nodes" if row.expert > site(row.cluster).gpus else "experts inside a node"


def _training(table: Table, row: Row) -> Iterator[Comparison]:
    wanted, timing = _timed(row)
    phases = timing.phases
    hidden = phases.tensor_parallel if row.hidden_sums else 0.0
    hidden += row.hidden_experts * phases.all_to_all
    seconds = phases.total - hidden - phases.bubble * (1 - wanted.virtual_stages / row.chunks)
    if row.broadcast:
        seconds += _broadcasts(row, timing)
    if row.torch_ring and row.parallel > 1:
        seconds += ring_seconds(row, wanted, equal_cluster(row)) - phases.exchange
    published, tokens = row.published, wanted.global_batch_size * wanted.seq_length
    if table.unit == "s":
        published = tokens / published / row.ranks
    elif table.unit == "sequences/s":
        published *= wanted.seq_length / row.ranks
    elif table.unit == "TFLOP/s":
        published = tokens_per_s(published, wanted.model, wanted.seq_length, row.counting)
    predicted = tokens / seconds / row.ranks
    yield _comparison(table, row, "tokens/s a GPU", published, predicted)
    if row.memory_gib is not None:
        yield _comparison(table, row, "GiB", row.memory_gib, _needed_gib(row, wanted, timing))


def _broadcasts(row: Row, timing: Timing) -> float:
    """Seconds that broadcasts of every rank's weights take longer than a gather behind the forward pass."""
    nodes = row.ranks / min(row.ranks, site(row.cluster).gpus)
    latency = (row.ranks - nodes) * _RING_LATENCY[0] + (nodes - 1) * _RING_LATENCY[1]
    (weights,) = (
        float(turn.seconds[0].max()) for turn in timing.reductions.turns if turn.hides_behind == "forward"
    )
    first = weights / timing.model.job.model.layers  # of the first layer, which no pass hides
    return row.ranks * latency + min(weights - first, float(timing.stages[0].forward_s[0]))


@functools.cache
def _timed(row: Row) -> tuple[Job, Timing]:
    """Return the job of a row of training, and what the model says of it."""
    wanted = job(row)
    return wanted, CostModel(wanted, equal_cluster(row)).timing(training_plan(row, wanted))


def misfit(table: Table, row: Row) -> Misfit | None:
    """What the model says of a row that ran, where it says that it does not fit."""
    wanted, timing = _timed(row)
    needed, usable = _needed_gib(row, wanted, timing), float(timing.usable[0].min()) / GIB
    return Misfit(table.name, table.label.format(row=row), needed, usable) if needed > usable else None


def _needed_gib(row: Row, wanted: Job, timing: Timing) -> float:
    if row.memory in ("", "nemo", "bridge"):
        return max(_needed_bytes(row, wanted, timing, stage) for stage in range(len(timing.memory))) / GIB
    largest = 0.0
    for stage, terms in enumerate(timing.memory):
        own = {name: float(values.max()) for name, values in terms.items()}
        section, kind = timing.sections[stage], wanted.model.kinds[0]
        experts = sum(routed.count for routed in kind.routed)  # of all ranks that share the state
        params = float(np.max(part_params(wanted, section.part, experts / row.tensor)))
        each, logit = _SHARDED[row.memory]
        own["optimizer"] = each * params / (row.data * row.parallel)
        if row.memory == "fsdp-pipeline":
            own["weights"] = 2.0 * params
        else:
            routed = experts / max(1, row.expert) * kind.expert_params()
            own |= {"weights": 2 * 2 * (kind.layer_params(row.tensor) + routed), "gradients": 0.0}
        rows = section.arrays.tokens.max(keepdims=True).astype(float) * section.job.micro_batch_size
        loss = float(logits_bytes(section.job, rows, logit)[0]) if np.all(section.part.is_last) else 0.0
        own["logits"] = max(0.0, loss - own["working_set"])
        own["reserve"] = _reserved(section.arrays, section.job, own)
        largest = max(largest, sum(own.values()))
    return largest / GIB


def _needed_bytes(row: Row, wanted: Job, timing: Timing, stage: int) -> float:
    """Bytes of a stage of Megatron's, with what NVIDIA's recipes keep otherwise."""
    terms = dict(timing.memory[stage])
    if row.memory == "nemo":
        terms["optimizer"] = terms["optimizer"] * 10 / 12
    elif row.memory == "bridge":
        copies = timing.sections[stage].placement.stage.fp8_copies
        if np.any(copies):
            whole = terms["gradients"]  # of as many bytes, in bf16
            terms["weights"] = terms["weights"] - 2 * (terms["weights"] - whole) / copies
    return float(np.max(sum(terms.values())))


def _reserved(arrays: PlanArrays, wanted: Job, own: dict[str, float]) -> float:
    """The reserve as torch's allocator sees it: workspaces, and not what NCCL allocates by itself."""
    tokens = arrays.group_tokens[arrays.group].astype(float)
    workspace = workspace_bytes(wanted, tokens, arrays.heads.astype(float), arrays.kv.astype(float))
    moving = sum(own[name] for name in ("activations", "attention", "working_set", "logits"))
    return SLACK_BYTES + float(workspace.max()) + FRAGMENTATION * moving


def _attention(table: Table, row: Row) -> Iterator[Comparison]:
    count, row = row.gpus, replace(row, context=_TOKENS_A_GPU * row.gpus / K)
    wanted = job(row)
    timing = CostModel(wanted, equal_cluster(row)).timing(equal_plan(row, wanted))
    layer = timing.stages[0].layer
    one = layer.forward if row.way == "forward" else layer.backward
    seconds = float((one.finish - one.token).max())
    predicted = mask_tflops(wanted.model, wanted.seq_length, count, seconds, backward=row.way == "backward")
    yield _comparison(table, row, "TFLOP/s a GPU", row.published, predicted)


def _layers(table: Table, row: Row) -> Iterator[Comparison]:
    seconds = layer_seconds(job(row), device(site(row.cluster).gpu))
    found = _comparison(table, row, "ms", row.published, 1e3 * seconds[row.way == "backward"])
    yield replace(found, job="")  # sizes of one layer, and no layouts of a job


def _stages(table: Table, row: Row) -> Iterator[Comparison]:
    wanted = job(row)
    timing = CostModel(wanted, mixed_cluster(row)).timing(mixed_plan(row, wanted))
    replicas = [
        (_blocking(pipeline) if row.blocking and pipeline.is_1f1b else pipeline).phases
        for pipeline in timing.pipelines
    ]
    seconds = iteration_phases(replicas, timing.once, 0.0).total
    yield _comparison(table, row, "s", row.published, seconds)
    if row.memory_gb is not None:
        yield _comparison(table, row, "GB", row.memory_gb, _deepspeed_gb(row, timing))


def _blocking(pipeline: Pipeline) -> Pipeline:
    """The same with every send in the time of both its stages."""
    between = (pipeline.there + pipeline.back)[:, 0]
    waits = np.concatenate([[0.0], between]) + np.concatenate([between, [0.0]])
    stages = tuple(
        phases + Phases(pipeline=float(wait))
        for phases, wait in zip(pipeline.stage_phases, waits, strict=True)
    )
    instant = replace(pipeline, there=0 * pipeline.there, back=0 * pipeline.back)
    return instant.with_stage_phases(stages)


def _deepspeed_gb(row: Row, timing: Timing) -> float:
    largest = 0.0
    for section, terms in zip(timing.sections, timing.memory, strict=True):
        params = float(terms["weights"].max()) / 4
        scores = 4 * row.micro * (section.job.model.heads / row.tensor) * (row.context * K) ** 2
        kept = scores * section.part.layers * section.part.in_flight(timing.micro_batches[section.replica])
        own = {name: float(values.max()) for name, values in terms.items()}
        # State is whole on every rank, and libraries are in what Sailor counts as kernels.
        own |= {"optimizer": 8 * params, "reserve": 0.0}
        more = _DEEPSPEED_WEIGHT * params + float(np.max(kept)) + _FUSED_KERNELS
        largest = max(largest, sum(own.values()) + more)
    return largest / 1e9
