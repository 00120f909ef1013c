"""Settings of a plan's job, its estimate and provenance, and the number types of its fields."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from pydantic import ConfigDict, Field

from megatron_hexi.yaml_schema import Label

# Of a whole model and of an iteration, far above any: commands spend time on each of them.
Heads = Annotated[int, Field(strict=True, ge=1, le=100_000)]
Experts = Annotated[int, Field(strict=True, ge=1, le=100_000)]
Layers = Annotated[int, Field(strict=True, ge=1, le=10_000)]
MicroBatches = Annotated[int, Field(strict=True, ge=1, le=100_000)]
Count = Annotated[int, Field(strict=True, ge=0, le=2**40)]
Positive = Annotated[int, Field(strict=True, ge=1, le=2**40)]
Real = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Rate = Annotated[float, Field(gt=0, allow_inf_nan=False)]

#: What pydantic checks when a plan is read from a file. The constructors themselves check nothing.
STRICT = ConfigDict(extra="forbid")

#: What the backward pass recomputes: nothing, core attention, every layer, or a number of first layers.
Recompute = Literal["none", "selective", "full"] | Layers
Precision = Literal["bf16", "fp16", "fp32"]
#: Data of a stage that may wait in host memory while it is not used.
Offload = Literal["parameters", "optimizer", "activations"]


@dataclass(frozen=True)
class JobTerms:
    """Settings of the job: given fields set Megatron's arguments; a job that contradicts them is refused.

    Args:
        micro_batch_size: --micro-batch-size.
        global_batch_size: --global-batch-size.
        pipeline_parallel: --pipeline-model-parallel-size, of a plan without stages of its own.
        virtual_stages: --num-virtual-stages-per-pipeline-rank, likewise: chunks of each pipeline stage's
            layers, which Megatron's interleaved schedule runs in turn.
        precision: --bf16, --fp16, or neither.
        recompute: --recompute-granularity; a number: that many first layers.
        optimizer: --optimizer.
        distributed_optimizer: --use-distributed-optimizer.
        overlap_gradients: --overlap-grad-reduce and --overlap-param-gather.
        sequence_parallel: --sequence-parallel, where units have several ranks.
        kernel: --hexi-kernel, by the GPU's name in the cluster file.
        expert_imbalance: variation of experts' loads that the plan was made for; sets no argument.
    """

    micro_batch_size: Positive | None = None
    global_batch_size: Positive | None = None
    pipeline_parallel: Layers | None = None
    virtual_stages: Layers | None = None
    precision: Precision | None = None
    recompute: Recompute | None = None
    optimizer: Literal["adam", "sgd"] | None = None
    distributed_optimizer: bool | None = None
    overlap_gradients: bool | None = None
    sequence_parallel: bool | None = None
    kernel: dict[Label, Label] | None = None
    expert_imbalance: Real | None = None

    __pydantic_config__: ClassVar[ConfigDict] = STRICT


@dataclass(frozen=True)
class UnitRates:
    """Speed and memory of each unit, in the order of ranks: documents are assigned by them.

    Args:
        row_s: seconds of a token outside attention, forward and backward, in one layer.
        pair_s: likewise, of a pair of query and key in all heads of a unit's rank.
        room: tokens that a unit has memory for.
        attended: memory of a token of its group, in held tokens, if the unit has all heads.
    """

    row_s: tuple[Rate, ...]
    pair_s: tuple[Rate, ...]
    room: tuple[Count, ...]
    attended: Real = 0.0

    __pydantic_config__: ClassVar[ConfigDict] = STRICT


@dataclass(frozen=True)
class Estimate:
    """The planner's prediction. Read by people and reports, never by the runtime.

    Args:
        iteration_s: seconds of an iteration.
        tokens_per_s: tokens of an iteration / `iteration_s`.
        lower_bound_s: seconds that no plan can beat under the cost model.
        gap: excess of `iteration_s` over `lower_bound_s`, as a part of the bound (0.01: 1 %).
        memory_gib: peak of each rank, GiB.
        against: tokens/s predicted for other layouts.
    """

    iteration_s: Real | None = None
    tokens_per_s: Real | None = None
    lower_bound_s: Real | None = None
    gap: Real | None = None
    memory_gib: tuple[Real, ...] | None = None
    against: dict[Label, Real] | None = None

    __pydantic_config__: ClassVar[ConfigDict] = STRICT


@dataclass(frozen=True)
class Provenance:
    """Origin of a plan. For people, but commands use `model` where they are not given one.

    Args:
        planner: the program that made it, with its version.
        solver: the solver, with its version.
        seed: the solver's seed.
        cluster: name of the cluster.
        cluster_digest: its SHA-256 (hex).
        model: as ``--model`` takes it.
        created: date and time.
    """

    planner: Label | None = None
    solver: Label | None = None
    seed: Count | None = None
    cluster: Label | None = None
    cluster_digest: Label | None = None
    model: str | None = None
    created: Label | None = None

    __pydantic_config__: ClassVar[ConfigDict] = STRICT
