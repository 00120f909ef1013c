"""Products in fp8 as Transformer Engine computes them: casts, copies of weights, and the rows that they need.

A factor is cast by rows for one product and by columns for another: the input of a layer for its result and
for the gradient of its weights, say. What a cast reads and writes depends on the recipe, and on whether the
GPU multiplies transposed factors in fp8 (Blackwell, for one scale a tensor), which then has no second copy
(transformer_engine/pytorch/utils.py, `is_non_tn_fp8_gemm_supported`).
"""

from __future__ import annotations

from typing import Final

import numpy as np

from megatron_hexi.cluster import Cluster, Device
from megatron_hexi.cost.arrays import Bools, Floats
from megatron_hexi.models.job import Job
from megatron_hexi.plan import Plan
from megatron_hexi.plan.terms import Fp8Recipe, fp8_row_multiple
from megatron_hexi.plan.units import rank_gpus, unit_rows

#: Recipes with one scale a tensor.
_PER_TENSOR: Final = ("tensorwise", "delayed")
#: Bytes of scales of an activation's copy, an element: fp32 for 128, one byte for 32. Weights have blocks of
#: 128 x 128 by ``blockwise``, whose scales are next to nothing.
SCALE_BYTES: Final = {
    "tensorwise": 0,
    "delayed": 0,
    "blockwise": 4 / 128,
    "mxfp8": 1 / 32,
}
#: Part of a memory's nominal bandwidth that casts reach: 2 bytes read and 2 written of an element, in 52.3 us
#: for 8192 x 8192 on a B200 (https://github.com/ROCm/TransformerEngine/pull/598).
CAST_SHARE: Final = 0.64


def has_fp8(device: Device, recipe: Fp8Recipe) -> bool:
    """Whether units of this GPU compute in fp8: whether its rate by the recipe is known."""
    return device.fp8_matmul(recipe) is not None


def copies(device: Device, recipe: Fp8Recipe) -> float:
    """Return the bytes of fp8 copies of a matrix's weight that Transformer Engine keeps beside that in bf16.

    By rows and by columns, with scales; one of them where products may be of transposed factors. Copies are
    made in the first micro-batch of an iteration and kept for the others. 0: the GPU computes in bf16.
    """
    if not has_fp8(device, recipe):
        return 0.0
    is_one = recipe in _PER_TENSOR and (10, 0) <= device.capability < (12, 0)
    return (1 if is_one else 2) * (1 + SCALE_BYTES[recipe] * (recipe != "blockwise"))


def cast_bytes(recipe: Fp8Recipe, kept: float, after_norm: bool = False) -> float:
    """Return the bytes that a cast of an element of 16 bits reads and writes, with all copies made of it.

    Current scales (``tensorwise``) read the element once more, for the largest of the tensor; a norm finds it
    as it writes (csrc/extensions/normalization.cpp). Other recipes find theirs as they cast.

    Args:
        kept: bytes of a weight's copies (`copies`), of which an activation has as many.
        after_norm: whether a norm's kernel wrote the element.
    """
    return 2 + int(kept) * (1 + SCALE_BYTES[recipe]) + 2 * (recipe == "tensorwise" and not after_norm)


def computed_rows(job: Job, tokens: Floats, in_fp8: Bools | bool) -> Floats:
    """Return the rows of a micro-batch that units compute outside attention, with padding, B x T [U].

    Args:
        tokens: number of tokens of each unit's shard, [U].
        in_fp8: whether each unit computes in fp8.
    """
    step = fp8_row_multiple(job.fp8_recipe, job.row_parts)
    return job.micro_batch_size * np.where(in_fp8, np.ceil(tokens / step) * step, tokens)


def fp8_fault(device: Device, recipe: Fp8Recipe) -> str:
    """Return why a GPU does not compute in fp8, and the remedy."""
    curve = f"matmul_{recipe if recipe in ('blockwise', 'mxfp8') else 'fp8'}"
    return (
        f"no rate of {device.name} in fp8 by {recipe} scales is known; if it has them, give {curve} under "
        "devices: in the cluster file"
    )


def units_in_bf16(plan: Plan, job: Job, cluster: Cluster) -> dict[int, Device]:
    """Return the first ranks of a plan's units that lack the job's fp8, each with the GPU that does.

    Empty if the job is not in fp8. Units that state bf16 are left out.
    """
    if job.precision != "fp8":
        return {}
    gpus, found = rank_gpus(plan, len(cluster.ranks)), {}
    for unit in unit_rows(plan, job.micro_batch_size, job.pipeline_parallel, job.model.layers):
        devices = (cluster.ranks[gpus[rank]].device for rank in unit.ranks)
        lacking = next((device for device in devices if not has_fp8(device, job.fp8_recipe)), None)
        if lacking is not None and unit.precision is None:
            found[unit.ranks[0]] = lacking
    return found
