"""Settings of a plan's job, its estimate and provenance, its number types, and the choice of kernels.

Attention kernels are chosen by one name, or one per kind of GPU (``H100=cudnn,A100=flash-attn-2``). A kind of
GPU is the beginning of a GPU's name in the cluster file; if several kinds match, the longest counts. In
training a GPU has the name that torch reports (``NVIDIA H100 80GB HBM3``), which contains the first part of
the kind as words.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field

from megatron_hexi.errors import HexiError
from megatron_hexi.plan.recompute import Layers, Recompute
from megatron_hexi.yaml_schema import Label, Strict

# Of a whole model and of an iteration, far above any: commands spend time on each of them.
Heads = Annotated[int, Field(strict=True, ge=1, le=100_000)]
Experts = Annotated[int, Field(strict=True, ge=1, le=100_000)]
MicroBatches = Annotated[int, Field(strict=True, ge=1, le=100_000)]
Count = Annotated[int, Field(strict=True, ge=0, le=2**40)]
Positive = Annotated[int, Field(strict=True, ge=1, le=2**40)]
Real = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Rate = Annotated[float, Field(gt=0, allow_inf_nan=False)]


#: `fp8`: products of matrices in fp8, all else in bf16.
Precision = Literal["bf16", "fp16", "fp32", "fp8"]
#: How values are scaled before they are cast to fp8, by Megatron's names.
Fp8Recipe = Literal["tensorwise", "delayed", "blockwise", "mxfp8"]
#: Data of a stage that may wait in host memory while it is not used.
Offload = Literal["parameters", "optimizer", "activations"]
#: Order of a replica's ministages other than one after the other.
Order = Literal["interleaved"]


def fp8_row_multiple(recipe: Fp8Recipe | None, parts: int) -> int:
    """Return the number that divides the rows of a unit outside attention, with padding.

    Transformer Engine's products sum over rows, for gradients of weights, in multiples of 16, and MXFP8
    scales blocks of 32 rows. Blockwise tensors are gathered in fp8 only where each rank has whole tiles of
    128 rows.

    Args:
        recipe: the unit's recipe; ``None``: it is not in fp8.
        parts: number of the unit's ranks that share its rows: the tensor-parallel size under sequence
            parallelism, else 1.
    """
    rows = {None: 1, "mxfp8": 32, "blockwise": 16 if parts == 1 else 128}
    return rows.get(recipe, 16) * parts


@dataclass(frozen=True)
class JobTerms(Strict):
    """Settings of the job: a given field sets Megatron's argument; a job that contradicts it is refused.

    Args:
        micro_batch_size: --micro-batch-size.
        global_batch_size: --global-batch-size.
        pipeline_parallel: --pipeline-model-parallel-size, for a plan with a repeated stage.
        virtual_stages: --num-virtual-stages-per-pipeline-rank, for a plan with a repeated stage: chunks of
            each pipeline stage's layers, which Megatron's interleaved schedule runs in turn.
        precision: --bf16, --fp16, or neither; `fp8`: --bf16 and --fp8-format, for all units that do not
            state `precision: bf16`.
        fp8_recipe: --fp8-recipe, for a job in fp8.
        recompute: --recompute-granularity; a number n: full recomputation of the first n layers; a list:
            --recompute-modules. `selective` is `[core_attn]`.
        optimizer: --optimizer.
        distributed_optimizer: --use-distributed-optimizer.
        overlap_gradients: --overlap-grad-reduce and --overlap-param-gather.
        sequence_parallel: --sequence-parallel, for units of several ranks.
        kernel: --hexi-kernel, by the GPU's name in the cluster file.
        expert_imbalance: variation of the experts' loads for which the plan was made; sets no argument.
        lora_rank: rank of the adapters that alone are trained, for a job in Megatron Bridge's loop.
    """

    micro_batch_size: Positive | None = None
    global_batch_size: Positive | None = None
    pipeline_parallel: Layers | None = None
    virtual_stages: Layers | None = None
    precision: Precision | None = None
    fp8_recipe: Fp8Recipe | None = None
    recompute: Recompute | None = None
    optimizer: Literal["adam", "sgd"] | None = None
    distributed_optimizer: bool | None = None
    overlap_gradients: bool | None = None
    sequence_parallel: bool | None = None
    kernel: dict[Label, Label] | None = None
    expert_imbalance: Real | None = None
    lora_rank: Positive | None = None


@dataclass(frozen=True)
class UnitRates(Strict):
    """Speed and memory of each unit, in rank order, by which each batch of documents is balanced.

    Every stage has its own units; a unit of a repeated stage stands for its counterparts in all of them.

    Args:
        row_s: seconds per token outside attention, forward and backward, in one layer.
        pair_s: seconds per pair of query and key in attention, forward and backward, in one layer, over all
            heads of a rank of the unit.
        room: number of tokens for which the unit has memory.
        attended: memory that a unit with all heads needs for each token of its group, relative to the memory
            of a token of its shard; the largest of all units.
    """

    row_s: tuple[Rate, ...]
    pair_s: tuple[Rate, ...]
    room: tuple[Count, ...]
    attended: Real = 0.0

    def of(self, units: Sequence[int]) -> UnitRates:
        """Return the rates of some units, in their order."""
        rows, pairs = (tuple(values[unit] for unit in units) for values in (self.row_s, self.pair_s))
        return UnitRates(rows, pairs, tuple(self.room[unit] for unit in units), self.attended)


@dataclass(frozen=True)
class Estimate(Strict):
    """The planner's prediction for a plan. People and reports read it; the runtime never does.

    Args:
        iteration_s: seconds per iteration.
        tokens_per_s: tokens of an iteration / `iteration_s`.
        lower_bound_s: seconds per iteration that no plan can beat under the cost model.
        gap: (`iteration_s` - `lower_bound_s`) / `lower_bound_s`; 0.01 is 1 %.
        memory_gib: peak memory of each rank, GiB.
        against: predicted tokens/s of other layouts, by their names.
    """

    iteration_s: Real | None = None
    tokens_per_s: Real | None = None
    lower_bound_s: Real | None = None
    gap: Real | None = None
    memory_gib: tuple[Real, ...] | None = None
    against: dict[Label, Real] | None = None


@dataclass(frozen=True)
class Provenance(Strict):
    """Origin of a plan, for people; commands that are given no model use `model`.

    Args:
        planner: name and version of the program that made the plan.
        solver: name and version of the solver.
        seed: seed of the solver.
        cluster: name of the cluster.
        cluster_digest: SHA-256 (hex) of the cluster.
        model: the model, as the value of ``--model``.
        created: date and time at which the plan was made.
    """

    planner: Label | None = None
    solver: Label | None = None
    seed: Count | None = None
    cluster: Label | None = None
    cluster_digest: Label | None = None
    model: str | None = None
    created: Label | None = None


#: Kernels that are timed by the curves of another kernel, with that kernel's name: torch ships
#: FlashAttention-2's CUDA code as `aten::_flash_attention`.
KERNEL_ALIASES = {"aten-flash": "flash-attn-2"}
#: Widest head that each fused kernel can compute; in latent attention the wider of key and value.
WIDEST_HEADS = {"cudnn": 128, "flash-attn-2": 256, "aten-flash": 256, "flash-attn-3": 256}


def split_kernels(text: str) -> dict[str, str]:
    """Return the kernel chosen for each kind of GPU; the kind "" stands for every GPU."""
    if "=" not in text and "," not in text and text:
        return {"": text}
    kernels: dict[str, str] = {}
    for part in text.split(","):
        gpu, _, kernel = part.partition("=")
        if not gpu or not kernel or "=" in kernel:
            raise HexiError(
                f"kernel {text}: {part!r} is not GPU=NAME; write one name, or as H100=cudnn,A100=flash-attn-2"
            )
        if gpu in kernels:
            raise HexiError(f"kernel {text}: names {gpu} twice; name each GPU once")
        kernels[gpu] = kernel
    return kernels


def join_kernels(kernels: Mapping[str, str]) -> str:
    """Return kernels by kind of GPU as the text that `split_kernels` parses."""
    return ",".join(f"{gpu}={kernel}" for gpu, kernel in kernels.items())


def kernel_on(text: str | None, device: str) -> str | None:
    """Return the kernel that `text` chooses for a GPU of the cluster file; ``None``: the default kernel."""
    chosen = {} if text is None else split_kernels(text)
    kinds = [gpu for gpu in chosen if device.startswith(gpu)]
    return chosen[max(kinds, key=len)] if kinds else None


def kernel_by_torch(kernels: Mapping[str, str], gpu: str) -> str | None:
    """Return the kernel chosen for a GPU by its name in torch.

    ``None`` if no kind of GPU matches the name, or if several match that have different kernels.

    Args:
        gpu: the name that `torch.cuda.get_device_name` returns; empty on a CPU.
    """
    if not gpu:
        return kernels.get("")
    words = re.split(r"[^A-Za-z0-9]+", gpu)
    # RTX 4090 is the kind RTX4090, RTX 3080 Ti is RTX3080Ti.
    runs = {"".join(words[a:b]).lower() for a, b in itertools.combinations(range(len(words) + 1), 2)}
    named = {kernel for kind, kernel in kernels.items() if not kind or kind.split("-")[0].lower() in runs}
    return named.pop() if len(named) == 1 else None


def is_same_kernel(first: str, second: str) -> bool:
    """Whether two kernel names stand for the same kernel code."""
    return KERNEL_ALIASES.get(first, first) == KERNEL_ALIASES.get(second, second)
