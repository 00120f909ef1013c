"""What a plan says beside who does what: how its job must run, what is expected of it, where it comes from.

And the kinds of number that its fields are.
"""

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

#: What the backward pass computes again: nothing, core attention, every layer, or so many first layers.
Recompute = Literal["none", "selective", "full"] | Layers
Precision = Literal["bf16", "fp16", "fp32"]
#: What of a stage may wait in host memory while it is not used.
Offload = Literal["parameters", "optimizer", "activations"]


@dataclass(frozen=True)
class JobTerms:
    """How the job must run: given fields set Megatron's arguments; a job that says something else is refused.

    Args:
        micro_batch_size: --micro-batch-size.
        global_batch_size: --global-batch-size.
        pipeline_parallel: --pipeline-model-parallel-size, of a plan without stages of its own.
        precision: --bf16, --fp16, or neither.
        recompute: --recompute-granularity; a number: so many first layers.
        optimizer: --optimizer.
        distributed_optimizer: --use-distributed-optimizer.
        overlap_gradients: --overlap-grad-reduce and --overlap-param-gather.
        sequence_parallel: --sequence-parallel, where units have several ranks.
        kernel: --hexi-kernel, by the GPU's name in the cluster file.
    """

    micro_batch_size: Positive | None = None
    global_batch_size: Positive | None = None
    pipeline_parallel: Layers | None = None
    precision: Precision | None = None
    recompute: Recompute | None = None
    optimizer: Literal["adam", "sgd"] | None = None
    distributed_optimizer: bool | None = None
    overlap_gradients: bool | None = None
    sequence_parallel: bool | None = None
    kernel: dict[Label, Label] | None = None

    __pydantic_config__: ClassVar[ConfigDict] = STRICT


@dataclass(frozen=True)
class UnitRates:
    """What each unit takes and has room for, in the order of ranks: by it documents are dealt anew.

    Args:
        row_s: seconds of one token outside attention, forward and backward, of one layer.
        pair_s: likewise, of one pair of query and key in all heads of a unit's rank.
        room: tokens that a unit has memory for.
        attended: memory of a token of its group, in tokens that it holds, if the unit has all heads.
    """

    row_s: tuple[Rate, ...]
    pair_s: tuple[Rate, ...]
    room: tuple[Count, ...]
    attended: Real = 0.0

    __pydantic_config__: ClassVar[ConfigDict] = STRICT


@dataclass(frozen=True)
class Estimate:
    """What the planner expects. Read by people and reports, never by the runtime.

    Args:
        iteration_s: seconds of an iteration.
        tokens_per_s: tokens of an iteration over these seconds.
        lower_bound_s: no plan takes less, under the cost model.
        gap: how much longer this plan takes, as a part of it (0.01: 1 %).
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
    """Where the plan comes from. For people, but commands take `model` where they are not given one.

    Args:
        planner: the program that made it, with its version.
        solver: likewise.
        seed: of the solver.
        cluster: name of the cluster.
        cluster_digest: its SHA-256 (hex).
        model: as ``--model`` takes it.
        created: when.
    """

    planner: Label | None = None
    solver: Label | None = None
    seed: Count | None = None
    cluster: Label | None = None
    cluster_digest: Label | None = None
    model: str | None = None
    created: Label | None = None

    __pydantic_config__: ClassVar[ConfigDict] = STRICT
