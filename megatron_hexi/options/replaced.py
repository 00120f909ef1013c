"""Flags in whose place a plan speaks: printed lines leave them out, and training refuses them beside it."""

from __future__ import annotations

from typing import Final

from megatron_hexi.plan import Plan
from megatron_hexi.plan.flags import FLAGS

#: Sizes that the stages of a plan say each for itself.
PARALLEL_SIZES: Final = (
    "--tensor-model-parallel-size",
    "--pipeline-model-parallel-size",
    "--context-parallel-size",
)
#: How Megatron would cut layers into stages, and experts over ranks.
STAGE_FLAGS: Final = (
    "--pipeline-model-parallel-layout",
    "--decoder-first-pipeline-num-layers",
    "--decoder-last-pipeline-num-layers",
    "--num-layers-per-virtual-pipeline-stage",
    "--num-virtual-stages-per-pipeline-rank",
    "--account-for-embedding-in-pipeline-split",
    "--account-for-loss-in-pipeline-split",
    "--expert-model-parallel-size",
    "--expert-tensor-parallel-size",
)
RECOMPUTE_FLAGS: Final = ("--recompute-granularity", "--recompute-method", "--recompute-num-layers")
#: Flags of a term of a plan's `job`, where they are several.
_TERMS: Final = {
    "precision": ("--bf16", "--fp16"),
    "overlap_gradients": (FLAGS["overlap_gradients"], "--overlap-param-gather"),
    "recompute": (*RECOMPUTE_FLAGS, "--recompute-activations"),
    # The planner's own number of stages: Megatron's other flags for stages need not fit it.
    "pipeline_parallel": (FLAGS["pipeline_parallel"], *STAGE_FLAGS),
}


def replaced_flags(plan: Plan) -> frozenset[str]:
    """Return the flags of a job that lines for this plan leave out, since the plan says what they say."""
    terms = {term: _TERMS.get(term, (flag,)) for term, flag in FLAGS.items()} | _TERMS
    stated = {
        flag for term, flags in terms.items() if getattr(plan.job, term, None) is not None for flag in flags
    }
    stated |= {"--hexi-plan", "--seq-length", "--encoder-seq-length", "--context-parallel-size"}
    if plan.workload.tensor_parallel is not None:
        stated.add("--tensor-model-parallel-size")
    if not plan.is_repeated:
        stated |= {*PARALLEL_SIZES, *STAGE_FLAGS}
        if any(stage.recompute is not None for replica in plan.replicas for stage in replica.stages):
            stated |= set(_TERMS["recompute"])
    return frozenset(stated)
