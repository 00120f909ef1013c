"""What a plan says beside who does what: how its job must run, what is expected of it, where it comes from.

And the kinds of number that its fields are.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from pydantic import ConfigDict, Field

Count = Annotated[int, Field(strict=True, ge=0, le=2**40)]
Positive = Annotated[int, Field(strict=True, ge=1, le=2**40)]
Real = Annotated[float, Field(ge=0, allow_inf_nan=False)]

#: What pydantic checks when a plan is read from a file. The constructors themselves check nothing.
STRICT = ConfigDict(extra="forbid")

#: What the backward pass computes again: nothing, core attention, every layer, or so many first layers.
Recompute = Literal["none", "selective", "full"] | Positive
Precision = Literal["bf16", "fp16", "fp32"]
#: What of a stage may wait in host memory while it is not used.
Offload = Literal["parameters", "optimizer", "activations"]


@dataclass(frozen=True)
class JobTerms:
    """How the job must run that the plan is for; ``None`` where the plan does not care.

    Megatron's arguments are set by it, and a job that says something else is refused.

    Args:
        micro_batch_size: sequences that go through a replica at once (B): --micro-batch-size.
        global_batch_size: sequences of an iteration: --global-batch-size.
        pipeline_parallel: stages, of a plan that leaves them to the job: --pipeline-model-parallel-size.
        precision: --bf16, --fp16, or neither of them.
        recompute: what the backward pass computes again: --recompute-granularity.
        optimizer: --optimizer.
        distributed_optimizer: --use-distributed-optimizer.
        overlap_gradients: --overlap-grad-reduce and --overlap-param-gather.
        sequence_parallel: --sequence-parallel, where units have several ranks.
        kernel: attention kernel of each kind of GPU, by its name in the cluster file: --hexi-kernel.
    """

    micro_batch_size: Positive | None = None
    global_batch_size: Positive | None = None
    pipeline_parallel: Positive | None = None
    precision: Precision | None = None
    recompute: Recompute | None = None
    optimizer: Literal["adam", "sgd"] | None = None
    distributed_optimizer: bool | None = None
    overlap_gradients: bool | None = None
    sequence_parallel: bool | None = None
    kernel: dict[str, str] | None = None

    __pydantic_config__: ClassVar[ConfigDict] = STRICT


@dataclass(frozen=True)
class Estimate:
    """What the planner expects. Read by people and reports, never by the runtime.

    Args:
        iteration_s: seconds of an iteration.
        tokens_per_s: tokens of an iteration over these seconds.
        lower_bound_s: no plan takes less, under the cost model.
        gap: how much longer than that this plan takes, as a part of it (0.01: 1 %).
        memory_gib: at the peak, GiB on the GPU of each rank.
        against: tokens/s predicted for other layouts, by name.
    """

    iteration_s: Real | None = None
    tokens_per_s: Real | None = None
    lower_bound_s: Real | None = None
    gap: Real | None = None
    memory_gib: tuple[Real, ...] | None = None
    against: dict[str, Real] | None = None

    __pydantic_config__: ClassVar[ConfigDict] = STRICT


@dataclass(frozen=True)
class Provenance:
    """Where the plan comes from. For people, but commands take `model` where they are not given one.

    Args:
        planner: the program that made it, with its version.
        solver: likewise, what solved it.
        seed: of the solver.
        cluster: name of the cluster that it is for.
        cluster_digest: SHA-256 (hex) of that cluster.
        model: the model that it is for, as ``--model`` takes it.
        created: when.
    """

    planner: str | None = None
    solver: str | None = None
    seed: Count | None = None
    cluster: str | None = None
    cluster_digest: str | None = None
    model: str | None = None
    created: str | None = None

    __pydantic_config__: ClassVar[ConfigDict] = STRICT
